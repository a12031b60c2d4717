"""Keeps sandboxes started ahead, so that an episode does not wait for the copy of its folder."""

from __future__ import annotations

import asyncio
from collections import deque

from areal_agents.sandbox.sandbox import Isolation, Sandbox, SandboxSpec


class SandboxPool:
    """Sandboxes of one spec. Each is given out once: nothing that an episode did reaches another."""

    def __init__(self, isolation: Isolation, spec: SandboxSpec, *, warm: int) -> None:
        """Args:
        warm: how many sandboxes are kept started; 0: each is started when it is taken.
        """
        self._isolation = isolation
        self._spec = spec
        self._warm = warm
        self._ready: deque[asyncio.Task[Sandbox]] = deque()

    async def fill(self) -> None:
        """Return when all warm sandboxes are started. Raises SandboxError if one cannot be."""
        self._start_more()
        await asyncio.gather(*self._ready)

    async def take(self) -> Sandbox:
        """Return a sandbox, which the caller ends. Raises SandboxError if it cannot be started."""
        if not self._ready and not self._warm:
            return await self._isolation.start(self._spec)  # nobody else would take it after a cancellation
        starting = self._ready.popleft() if self._ready else self._start()
        self._start_more()
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(self._put_back)
            raise

    def stop_refilling(self) -> int:
        """Start no sandbox ahead from now on; return how many are still to be taken."""
        self._warm = 0
        return len(self._ready)

    async def close(self) -> None:
        """End the sandboxes that nobody took."""
        waiting = list(self._ready)
        self._warm = 0
        self._ready.clear()
        for started in await asyncio.gather(*waiting, return_exceptions=True):
            if not isinstance(started, BaseException):
                await started.end()

    def _start(self) -> asyncio.Task[Sandbox]:
        return asyncio.create_task(self._isolation.start(self._spec))

    def _start_more(self) -> None:
        while len(self._ready) < self._warm:
            self._ready.append(self._start())

    def _put_back(self, started: asyncio.Task[Sandbox]) -> None:
        """Keep a sandbox whose taker was cancelled: nobody has used it."""
        if not started.cancelled() and started.exception() is None and self._warm:
            self._ready.append(started)
