"""Runs a synchronous function in a thread of its own, which does not block the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def result_of(function: Callable[..., T | Awaitable[T]], *given: Any) -> T:
    """Return what a function returns, which may be async; a synchronous one runs in a thread of its own.

    A function that never returns keeps its thread. In the event loop's pool, that would hold up the calls of
    other episodes as soon as the pool has no thread left, and the end of the process.
    """
    if inspect.iscoroutinefunction(function):
        value: T | Awaitable[T] = function(*given)
    else:
        value = await _in_own_thread(function, given)
    return await value if inspect.isawaitable(value) else value


async def _in_own_thread(function: Callable[..., T], given: tuple[Any, ...]) -> T:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def settle(value: Any, error: BaseException | None) -> None:
        if not done.done():
            done.set_result((value, error))

    def call() -> None:
        try:
            outcome: tuple[Any, BaseException | None] = (context.run(function, *given), None)
        except BaseException as error:  # also SystemExit, which would end this thread without an answer
            outcome = (None, error)
        with contextlib.suppress(RuntimeError):  # the loop was closed after the function's time was over
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=call, name="reward", daemon=True).start()
    value, error = await done
    if isinstance(error, KeyboardInterrupt):
        raise RuntimeError("it raised KeyboardInterrupt") from error
    if error is not None:
        raise error
    return value
