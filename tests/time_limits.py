"""Time limits of episodes that expire once an agent hangs, however long that takes on a slow machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from areal_agents.rollout.agents import attempt

LONGEST_S = 120.0


class TimeLimits:
    """Replaces `asyncio` in a module, by default that of `run_rollout`, so that a time limit expires once
    `reached` returns true, whatever its length."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, reached: Callable[[], object], *, module: ModuleType = attempt
    ) -> None:
        self._reached = reached
        self._ending: set[asyncio.Task[None]] = set()
        monkeypatch.setattr(module, "asyncio", self)

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    def timeout(self, delay_s: float) -> asyncio.Timeout:
        """Return a time limit that expires once the `reached` of this object returns true."""
        return self.limit_until(self._reached)

    def limit_until(self, reached: Callable[[], object]) -> asyncio.Timeout:
        """Return a time limit that expires once `reached` returns true."""
        limit = asyncio.timeout(LONGEST_S)
        self._ending.add(asyncio.create_task(self._end(limit, reached)))
        return limit

    async def _end(self, limit: asyncio.Timeout, reached: Callable[[], object]) -> None:
        while True:
            if reached():
                try:
                    limit.reschedule(asyncio.get_running_loop().time())
                except RuntimeError:  # not entered yet: the rollout process does not know yet that a job runs
                    pass
                else:
                    return
            await asyncio.sleep(0.01)
