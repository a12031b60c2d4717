"""Runs the calls of one object one at a time, on a background thread."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class OwnThread:
    """Runs functions one at a time on one thread, for objects that must stay on the thread that made them.

    It is a daemon thread: a function that never returns leaves a thread behind, and does not keep the process
    from ending.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    async def run(self, function: Callable[..., T], /, *arguments: Any, **options: Any) -> T:
        """Call a function on the thread, and return its result or raise its exception."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if done.cancelled():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]

        def call() -> None:
            result, error = None, None
            try:
                result = function(*arguments, **options)
            except BaseException as raised:  # also SystemExit, which would end the thread and answer nobody
                error = (
                    raised
                    if isinstance(raised, Exception)
                    else RuntimeError(f"the function raised {raised!r}")
                )
            try:
                loop.call_soon_threadsafe(settle, result, error)
            except RuntimeError:
                if not loop.is_closed():
                    raise

        self._calls.put(call)
        return await done

    def close(self, last: Callable[[], object] | None = None) -> None:
        """End the thread after the calls that are queued and a last one, without waiting for it."""
        if last is not None:
            self._calls.put(partial(_logged, last))
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def _logged(last: Callable[[], object]) -> None:
    """Call a function whose errors nobody waits for."""
    try:
        last()
    except Exception:
        logger.warning("an environment failed while it was closed", exc_info=True)
