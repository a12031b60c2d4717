"""Admits a bounded number of model calls at a time.

Calls beyond the concurrency wait in order, since a 429 makes every outer retry loop multiply; only a
full queue is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from areal_agents.errors import RequestError


class Admission:
    """A bounded number of concurrent calls with a bounded queue in front."""

    def __init__(self, *, max_concurrent: int, max_queued: int, longest_wait_s: float) -> None:
        self._slots = asyncio.Semaphore(max_concurrent)
        self._max_queued = max_queued
        self._longest_wait_s = longest_wait_s
        self._queued = 0
        self._held = 0

    @property
    def waiting(self) -> int:
        """Calls in the queue."""
        return self._queued

    @property
    def running(self) -> int:
        """Calls that hold a slot."""
        return self._held

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold one slot. RequestError 429 if the queue is full, 503 after the longest wait in it."""
        if self._slots.locked():
            if self._queued >= self._max_queued:
                raise RequestError(
                    f"{self._queued} calls are waiting already",
                    status=429,
                    code="queue_full",
                    retry_after_s=2.0,
                )
            self._queued += 1
            try:
                async with asyncio.timeout(self._longest_wait_s):
                    await self._slots.acquire()
            except TimeoutError:
                raise RequestError(
                    f"the call waited {self._longest_wait_s:g} s for its turn",
                    status=503,
                    code="queue_timeout",
                    retry_after_s=2.0,
                ) from None
            finally:
                self._queued -= 1
        else:
            await self._slots.acquire()
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            self._slots.release()
