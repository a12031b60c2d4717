"""Runs the scheduler in a thread of its own, through which alone it is called.

Callers hand over functions that run between two steps; finished requests come back in batches through
`deliver`, one call per step however many have finished.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

from areal_agents.inference.embedded.scheduling.request import Request
from areal_agents.inference.embedded.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Notice(NamedTuple):
    """After one step, `request` has new tokens or has `finished`; later steps do not change the notice."""

    request: Request
    finished: bool


class EngineThread:
    """Runs `scheduler` until `stop`.

    Args:
        deliver: called in this thread with the notices of a step.
        on_failure: called in this thread with the error, if a step raises; nothing is served after that.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        deliver: Callable[[list[Notice]], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._scheduler = scheduler
        self._deliver = deliver
        self._on_failure = on_failure
        self._outbox: list[Notice] = []
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self.busy_s = 0.0  # wall time spent in steps since the start
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin serving."""
        self._thread.start()

    def stop(self) -> None:
        """End after the current step; running requests are aborted and delivered."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def notify(self, request: Request) -> None:
        """Deliver `request` after this step; used as `Request.notify`."""
        self._outbox.append(Notice(request, request.finish is not None))

    def submit(self, action: Callable[[Scheduler], None]) -> None:
        """Run `action(scheduler)` before the next step; it must not raise."""
        with self._wake:
            self._commands.append(lambda: action(self._scheduler))
            self._wake.notify()

    def call(self, action: Callable[[Scheduler], T]) -> Future[T]:
        """Like `submit`, with the result or the error in a future; nothing is run if that is cancelled."""
        future: Future[T] = Future()
        self.submit(lambda scheduler: _resolve(future, lambda: action(scheduler)))
        return future

    def call_when_idle(self, action: Callable[[Scheduler], T]) -> Future[T]:
        """Like `call`, once nothing runs (at once while paused); see Scheduler.when_idle."""
        future: Future[T] = Future()
        self.submit(
            lambda scheduler: scheduler.when_idle(lambda: _resolve(future, lambda: action(scheduler)))
        )
        return future

    def _run(self) -> None:
        try:
            while self._take_commands():
                started = time.monotonic()
                self._scheduler.step()
                self.busy_s += time.monotonic() - started
                self._flush()
            self._scheduler.abort(None)
            self._flush()
        except Exception as error:
            logger.exception("the engine's thread has failed")
            self._on_failure(error)

    def _take_commands(self) -> bool:
        """Run what was submitted, waiting while there is nothing to do; False when stopping."""
        if not self._commands and self._scheduler.has_work and not self._stopping:
            return True
        with self._wake:
            while not (self._commands or self._scheduler.has_work or self._stopping):
                self._flush()
                self._wake.wait()
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()
        return not self._stopping

    def _flush(self) -> None:
        if self._outbox:
            done, self._outbox = self._outbox, []
            self._deliver(done)


def _resolve(future: Future[T], action: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return  # the caller has cancelled; otherwise the future can no longer be cancelled
    try:
        future.set_result(action())
    except Exception as error:
        future.set_exception(error)
