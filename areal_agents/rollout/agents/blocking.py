"""Notices an async agent that blocks its event loop, which stops every other episode and the run itself.

A thread looks at the loop's stack while the loop does not run. The time that one call of the user's code
takes between two turns of the loop is counted by its line, so that many short blocks at one line, such as
calls of a client that is not async, are found like one long block. A loop that is late because many tasks
have much to do is in another call at each look, and nothing is counted. Neither is time in which other
processes had the processors, nor the import of a module.
"""

from __future__ import annotations

import asyncio
import linecache
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from areal_agents.errors import AgentError
from areal_agents.user_functions import is_user_code

BLOCKED_S = 5.0
_CHECK_S = 0.1
_LEAST_SHARE = 0.25  # of the time: short blocks that add up to less are not reported
_REMEDY = (
    "While an async function waits without await, no other episode runs: use an async client (AsyncOpenAI, "
    "httpx.AsyncClient), asyncio.sleep or asyncio.to_thread(...), or make the agent a plain function (def), "
    "which runs in processes of its own"
)


class BlockingWatch:
    """Calls `report` from another thread if the event loop has not run for `blocked_s`, once for each time.

    The report names the line and the function of the user's code that block. It is a context manager, to be
    entered on the loop's thread.
    """

    def __init__(
        self, report: Callable[[str], None], *, blocked_s: float = BLOCKED_S, adds_up: bool = False
    ) -> None:
        """Args:
        report: called with what a user is told.
        blocked_s: how long the loop may be blocked, in seconds.
        adds_up: whether to report a line also if its shorter blocks take that long together, and again
            each time that their sum has doubled.
        """
        self._report = report
        self._blocked_s = blocked_s
        self._adds_up = adds_up
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
            await asyncio.sleep(_CHECK_S / 2)

    def _watch(self) -> None:
        begun = time.monotonic()
        reported_at = 0.0  # the last beat before the block that was reported
        sums: dict[str, float] = {}  # seconds by line
        allowed: dict[str, float] = {}  # the sum at which a line is reported
        seen: tuple[float, int] | None = None  # the last beat, and the call that was then found to run
        counted_to = 0.0
        turns = _OwnTurns()
        while not self._ended.wait(_CHECK_S):
            ran_at, now = self._ran_at, time.monotonic()
            silent_s = now - ran_at - turns.waited_s(ran_at, now)
            if silent_s <= _CHECK_S:
                continue
            found = self._call()
            if found is None:
                continue
            call, line = found
            at = f" at {line}" if line else ""
            if silent_s > self._blocked_s:
                if reported_at != ran_at:
                    reported_at = ran_at
                    self._report(
                        f"the agent has blocked its event loop for {self._blocked_s:g} s{at}. {_REMEDY}"
                    )
                continue
            is_same, seen = seen == (ran_at, call), (ran_at, call)
            if not (self._adds_up and line and is_same):
                continue
            sums[line] = sums.get(line, 0.0) + now - max(ran_at, counted_to)
            counted_to = now
            # On a busy machine a call that only computes takes long too; its share of the time stays small.
            if sums[line] > max(allowed.get(line, self._blocked_s), _LEAST_SHARE * (now - begun)):
                allowed[line] = 2 * sums[line]
                self._report(
                    f"the agent blocks its event loop again and again, for {sums[line]:.0f} of the last "
                    f"{now - begun:.0f} s{at}. {_REMEDY}"
                )

    def _call(self) -> tuple[int, str] | None:
        """Return the innermost call of the user's code that the loop's thread executes, and its line.

        Returns:
            A number that differs from call to call, and a description for users; (0, "") if it executes none,
            and None if that call is the import of a module, which happens once and takes as long as it takes.
        """
        frame = sys._current_frames().get(self._loop_thread)
        while frame is not None and not is_user_code(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return 0, ""
        if frame.f_code.co_name == "<module>":
            return None
        file, number = frame.f_code.co_filename, frame.f_lineno
        text = linecache.getline(file, number).strip()
        return id(frame), f"{file}, line {number}, in {frame.f_code.co_qualname}: {text}"


class _OwnTurns:
    """For how long a thread that wakes every `_CHECK_S` seconds got no processor, while the loop was silent.

    It wakes late when other processes have the processors, and also when this one computes without letting
    another of its threads run. The processor time that this process used tells the two apart.
    """

    def __init__(self) -> None:
        self._woke_at, self._computed_s = time.monotonic(), time.process_time()
        self._beat, self._waited_s = 0.0, 0.0

    def waited_s(self, ran_at: float, now: float) -> float:
        """Return the seconds since the loop's last beat at `ran_at`. The thread calls this when it wakes."""
        computed_s = time.process_time()
        late_s = now - self._woke_at - _CHECK_S - (computed_s - self._computed_s)
        earlier_s = self._waited_s if ran_at == self._beat else 0.0
        self._waited_s = min(earlier_s + max(late_s, 0.0), now - ran_at)
        self._beat, self._woke_at, self._computed_s = ran_at, now, computed_s
        return self._waited_s


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
