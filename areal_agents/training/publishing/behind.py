"""Calls that run one after the other in a thread, behind a caller who goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Behind:
    """One thread of work. After a failure nothing more is run, and `finish` raises it.

    Args:
        limit: bytes that may wait for the thread; a call that is larger by itself waits alone.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="behind")
        self._waiting: deque[tuple[Future[None], int]] = deque()
        self._bytes = 0
        self._failure: BaseException | None = None

    def do(self, call: Callable[[], None], nbytes: int) -> None:
        """Run `call`, which holds on to `nbytes`, after those before it. Waits for room."""
        while self._waiting and self._bytes + nbytes > self._limit:
            self._take()
        if self._failure is None:
            self._waiting.append((self._thread.submit(call), nbytes))
            self._bytes += nbytes

    def finish(self) -> None:
        """Wait for all calls; the first failure is raised."""
        while self._waiting:
            self._take()
        self._thread.shutdown()
        if self._failure is not None:
            raise self._failure

    def _take(self) -> None:
        """Wait for the oldest call."""
        future, nbytes = self._waiting.popleft()
        self._bytes -= nbytes
        failure = future.exception()
        if failure is not None and self._failure is None:
            self._failure = failure
            for later, _ in self._waiting:
                later.cancel()
            self._waiting = deque((later, size) for later, size in self._waiting if not later.cancelled())
