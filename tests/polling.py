"""Waits for conditions that a test can only poll."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(holds: Callable[[], object], within_s: float = 150.0) -> None:
    """Return when a condition is true, and raise TimeoutError if it does not become true in time."""
    async with asyncio.timeout(within_s):
        while not holds():
            await asyncio.sleep(0.01)
