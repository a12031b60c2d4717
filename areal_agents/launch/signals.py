"""Turns Ctrl-C and SIGTERM into one exception, and ignores or defers them in blocks of code."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """The user or the system requested that the program ends."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Make SIGINT and SIGTERM raise Interrupted inside the block. Main thread only."""
    with _handled_by(_interrupt):
        yield


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM inside the block, which ends other processes and must complete."""
    with _handled_by(signal.SIG_IGN):
        yield


@contextmanager
def deferred() -> Iterator[None]:
    """Handle SIGINT and SIGTERM at the end of the block, which starts a process and must remember it."""
    received: list[int] = []
    try:
        with _handled_by(lambda number, frame: received.append(number)):
            yield
    finally:
        if received:
            signal.raise_signal(received[0])


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> Iterator[None]:
    previous = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, earlier in previous.items():
            signal.signal(number, earlier)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted
