"""Notices an async agent that blocks its event loop, which stops every other episode and the run itself.

A thread looks at the loop's stack while the loop does not run. The time that one call of the user's code
takes between two turns of the loop is counted by its line, so that many short blocks at one line, such as
calls of a client that is not async, are found like one long block. A loop that is late because many tasks
have much to do is in another call at each look, and nothing is counted. Neither is what a run loads before
its loop first runs, time in which other processes had the processors, nor the import of a module.
"""

from __future__ import annotations

import asyncio
import linecache
import logging
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from areal_agents.errors import AgentError
from areal_agents.user_functions import is_user_code

logger = logging.getLogger(__name__)

BLOCKED_S = 5.0
_CHECK_S = 0.1
_IMPORT = "<frozen importlib._bootstrap"  # how the files of Python's import begin, `_bootstrap_external` too
_LEAST_SHARE = 0.25  # of the time: short blocks that add up to less are not reported
_REMEDY = (
    "While an async function waits without await, no other episode runs: use an async client (AsyncOpenAI, "
    "httpx.AsyncClient), asyncio.sleep or asyncio.to_thread(...), or make the agent a plain function (def), "
    "which runs in processes of its own"
)


class BlockingWatch:
    """Calls `report` from another thread if the event loop has not run for `blocked_s`, once for each time.

    The report names the line and the function of the user's code that block. A module that takes that long to
    be imported is only logged. It is a context manager, to be entered on the loop's thread.
    """

    def __init__(
        self, report: Callable[[str], None], *, blocked_s: float | None = None, adds_up: bool = False
    ) -> None:
        """Args:
        report: called with what a user is told.
        blocked_s: how long the loop may be blocked, in seconds; None: BLOCKED_S.
        adds_up: whether to report a line also if its shorter blocks take that long together, and again
            each time that their sum has doubled.
        """
        self._report = report
        self._blocked_s = BLOCKED_S if blocked_s is None else blocked_s
        self._adds_up = adds_up
        self._ended = threading.Event()
        self._ran_at = math.inf  # until the loop first runs
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
        # Times of beats: the last one, and those before the block last reported and the import last logged.
        beat = reported_at = logged_at = 0.0
        sums: dict[str, float] = {}  # seconds by line
        allowed: dict[str, float] = {}  # the sum at which a line is reported
        seen, counted_s = 0, 0.0  # since the last beat: the call last found, and its seconds in `sums`
        excused = _Excused()
        while not self._ended.wait(_CHECK_S):
            ran_at, now = self._ran_at, time.monotonic()
            stacks = sys._current_frames() if now - ran_at > _CHECK_S else {}
            loops = stacks.pop(self._loop_thread, None)
            is_import = _imports(loops)
            others_import = any(map(_imports, stacks.values()))
            silent_s = now - ran_at - excused.seconds(ran_at, now, is_import, others_import)
            if loops is None or (silent_s <= _CHECK_S and not is_import):
                continue
            call, line = _innermost_call(loops)
            if is_import:
                if now - ran_at > self._blocked_s and logged_at != ran_at:
                    logged_at = ran_at
                    logger.info(
                        "no episode has run for %.1f s: the event loop waits for an import at %s",
                        now - ran_at,
                        line,
                    )
                continue
            if silent_s > self._blocked_s:
                if reported_at != ran_at:
                    reported_at = ran_at
                    self._report(
                        f"the agent has blocked its event loop for {self._blocked_s:g} s at {line}. {_REMEDY}"
                    )
                continue
            if beat != ran_at:
                beat, seen, counted_s = ran_at, 0, 0.0
            is_same, seen = call == seen, call
            if not (self._adds_up and call and is_same):
                continue
            sums[line] = sums.get(line, 0.0) + silent_s - counted_s
            counted_s = silent_s
            # On a busy machine a call that only computes takes long too; its share of the time stays small.
            if sums[line] > max(allowed.get(line, self._blocked_s), _LEAST_SHARE * (now - begun)):
                allowed[line] = 2 * sums[line]
                self._report(
                    f"the agent blocks its event loop again and again, for {sums[line]:.0f} of the last "
                    f"{now - begun:.0f} s at {line}. {_REMEDY}"
                )


def _imports(frame: FrameType | None) -> bool:
    """Whether a thread with this stack imports a module, or waits until another thread has imported it."""
    while frame is not None and not frame.f_code.co_filename.startswith(_IMPORT):
        frame = frame.f_back
    return frame is not None


def _innermost_call(frame: FrameType) -> tuple[int, str]:
    """Return the innermost call of the user's code on a stack, and its line.

    Returns:
        A number that differs from call to call, and a description for users. If there is no such call, the
        number is 0 and the line is that of the innermost call of all.
    """
    users: FrameType | None = frame
    while users is not None and not is_user_code(users.f_code.co_filename):
        users = users.f_back
    found = users or frame
    file, number = found.f_code.co_filename, found.f_lineno
    text = linecache.getline(file, number).strip()
    return id(users) if users else 0, f"{file}, line {number}, in {found.f_code.co_qualname}: {text}"


class _Excused:
    """Counts the time in which imports or other processes, and not the agent, kept the loop from running.

    The watching thread wakes late when other processes have the processors, and also when this one computes
    without letting another of its threads run. The processor time that this process used tells the two apart.
    """

    def __init__(self) -> None:
        self._woke_at, self._computed_s = time.monotonic(), time.process_time()
        self._beat, self._seconds = 0.0, 0.0

    def seconds(self, ran_at: float, now: float, is_import: bool, others_import: bool) -> float:
        """Return the excused seconds since the loop's last beat at `ran_at`. The thread calls this when it
        wakes.

        Args:
            is_import: whether the loop's thread imports a module.
            others_import: whether another thread does, which may compute without letting the loop run.
        """
        computed_s = time.process_time()
        late_s = now - self._woke_at - _CHECK_S - (0.0 if others_import else computed_s - self._computed_s)
        excused_s = now - self._woke_at if is_import else max(late_s, 0.0)
        earlier_s = self._seconds if ran_at == self._beat else 0.0
        self._seconds = min(earlier_s + excused_s, max(now - ran_at, 0.0))
        self._beat, self._woke_at, self._computed_s = ran_at, now, computed_s
        return self._seconds


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
