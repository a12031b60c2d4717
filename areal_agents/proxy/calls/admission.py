"""Admits a bounded number of concurrent model calls; further calls wait in a queue.

Calls wait instead of getting a 429, because a 429 triggers every retry loop between the agent and the proxy.
A call gets 429 only if the queue is full.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from areal_agents.errors import RequestError


class Admission:
    """Bounds the number of concurrent calls and the length of the queue in front of them."""

    def __init__(self, *, max_concurrent: int, max_queued: int, longest_wait_s: float) -> None:
        self._slots = asyncio.Semaphore(max_concurrent)
        self._max_queued = max_queued
        self._longest_wait_s = longest_wait_s
        self._queued = 0
        self._held = 0

    @property
    def waiting(self) -> int:
        """Number of calls in the queue."""
        return self._queued

    @property
    def running(self) -> int:
        """Number of calls that hold a slot."""
        return self._held

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold one slot. Raise RequestError 429 if the queue is full, 503 after `longest_wait_s` in it."""
        if self._slots.locked():
            if self._queued >= self._max_queued:
                raise RequestError(
                    f"the proxy's queue is full: {self._queued} model calls are waiting; try again later",
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
                    f"the call waited {self._longest_wait_s:g} s in the proxy's queue; try again later",
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
