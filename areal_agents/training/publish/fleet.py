"""The engines that one publication reaches, and the event loop on which their clients run."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from areal_agents.errors import EngineError, EngineUnavailable
from areal_agents.inference.engine import Engine

T = TypeVar("T")

logger = logging.getLogger(__name__)


class EventLoopThread:
    """An event loop on its own thread: engines are called while the caller's thread gathers weights."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engines", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start the coroutine on the loop without waiting for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine and wait for its result. It is cancelled if the caller is interrupted."""
        future = self.start(work)
        try:
            return future.result()
        finally:
            future.cancel()  # has no effect once the future is done

    def close(self) -> None:
        """Stop the loop and end the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Fleet:
    """The engines to which a version is published. An engine that fails is removed, unless all engines fail.

    The process that routes requests updates a removed engine from the folder before the engine serves again.

    Attributes:
        left_out: the URLs of the removed engines.
        were_lost: whether all engines were lost before, so that the version had to wait for them.
    """

    def __init__(self, engines: Sequence[Engine], version: int) -> None:
        self.engines = list(engines)
        self.version = version
        self.left_out: list[str] = []
        self.were_lost = False

    async def each(self, call: Callable[[Engine], Awaitable[T]]) -> list[T]:
        """Call all engines concurrently; return the results of those that did not fail.

        Raises:
            EngineUnavailable: every engine failed, and at least one did not answer and may come back.
            EngineError: every engine failed.
        """
        engines = list(self.engines)
        results = await asyncio.gather(*(call(engine) for engine in engines), return_exceptions=True)
        failures = [r for r in results if isinstance(r, BaseException)]
        for failure in failures:
            if not isinstance(failure, EngineError):
                raise failure
        if len(failures) == len(engines):
            raised = next((f for f in failures if isinstance(f, EngineUnavailable)), failures[0])
            for other in (failure for failure in failures if failure is not raised):
                logger.warning("version %d: %s", self.version, other)
            raise raised
        for engine, result in zip(engines, results, strict=True):
            if isinstance(result, EngineError):
                self.leave_out(engine, result)
        return [r for r in results if not isinstance(r, BaseException)]

    def leave_out(self, engine: Engine, error: EngineError) -> None:
        """Remove the engine from the fleet, and record that it did not take the version."""
        logger.warning(
            "version %d is published without the engine %s: %s", self.version, engine.base_url, error
        )
        self.engines.remove(engine)
        self.left_out.append(engine.base_url)
