"""Notices an async agent that blocks its event loop, which stops every other episode and the run itself."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from areal_agents.errors import AgentError
from areal_agents.user_functions import is_user_code

BLOCKED_S = 5.0
_CHECK_S = 0.5


class BlockingWatch:
    """Calls `report` from another thread if the event loop has not run for `blocked_s`, once for each time.

    The report names the line of the user's code that blocks. It is a context manager, to be entered on the
    loop's thread.
    """

    def __init__(self, report: Callable[[str], None], *, blocked_s: float = BLOCKED_S) -> None:
        self._report = report
        self._blocked_s = blocked_s
        self._ended = threading.Event()
        self._ran_at = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="blocking-watch", daemon=True)
        self._beating: asyncio.Task[None] | None = None
        self._loop_thread = threading.get_ident()

    def __enter__(self) -> BlockingWatch:
        self._beating = asyncio.ensure_future(self._beat())
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._beating is not None:
            self._beating.cancel()

    async def _beat(self) -> None:
        while True:
            self._ran_at = time.monotonic()
            await asyncio.sleep(_CHECK_S)

    def _watch(self) -> None:
        reported_at = 0.0
        while not self._ended.wait(_CHECK_S):
            ran_at = self._ran_at
            if time.monotonic() - ran_at > self._blocked_s and reported_at != ran_at:
                reported_at = ran_at
                self._report(self._describe())

    def _describe(self) -> str:
        frame = sys._current_frames().get(self._loop_thread)
        stack = traceback.extract_stack(frame) if frame is not None else []
        own = [line for line in stack if is_user_code(line.filename)]
        at = f" at {own[-1].filename}, line {own[-1].lineno}: {own[-1].line}" if own else ""
        return (
            f"the agent has blocked its event loop for {self._blocked_s:g} s{at}. While an async function "
            "waits without await, no other episode runs: use an async client or asyncio.to_thread(...), or "
            "make the agent a plain function (def), which runs in processes of its own"
        )


@contextmanager
def interrupted_if_blocked() -> Iterator[None]:
    """Raise AgentError in the agent, within the with-block, if it blocks the event loop.

    The loop must run on the main thread, where Python handles signals.
    """
    report = ""

    def interrupt(text: str) -> None:
        nonlocal report
        report = text
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def fail(_number: int, _frame: FrameType | None) -> None:
        raise AgentError(report)

    previous = signal.signal(signal.SIGUSR1, fail)
    try:
        with BlockingWatch(interrupt):
            yield
    finally:
        signal.signal(signal.SIGUSR1, previous)
