"""Lets at most one running trainer own a store. Ownership depends on a lock, never on a clock.

The lock is one that the system takes away with the process, however that ends; so a lease of anybody
else is one of the dead, and is void. A clock that is set forward or back changes nothing.

There are two files, always locked in the same order: first the door, briefly, by a process that takes the
lock or checks whether it is held; then the lock itself, which a trainer keeps until it exits. A process that
only checks is thus never mistaken for a trainer: a trainer that starts meanwhile waits at the door.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Literal

from areal_agents.store.errors import Conflict

_POLL_S = 0.1
_DOOR_POLL_S = 0.01
_LONGEST_LOOK_S = 30.0  # an engine pool looks for as long as an engine takes to resume


class TrainerLock:
    """The right to lease the groups of the store in `path`. Taken once, kept until it is let go."""

    def __init__(self, path: Path) -> None:
        path = path.resolve()  # one lock, by whatever name the store is known
        self._path = path.with_name(path.name + ".trainer")
        self._door = path.with_name(path.name + ".trainer-door")
        self._file: IO[str] | None = None
        self.holder = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"

    def take(self, wait_s: float = 0.0) -> None:
        """Take it if it is not taken yet; an earlier trainer that is ending is given `wait_s`.

        A process that checks whether it is held (`nobody`) is waited for in any case, for at least 30 s.

        Raises:
            Conflict: another process holds it, and the message says which; or a check takes too long.
        """
        if self._file is not None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = open(self._path, "a+")  # noqa: SIM115 - open for as long as it is held
        began = time.monotonic()
        try:
            while (state := self._try(file)) != "taken":
                waited_s = time.monotonic() - began
                if state == "held" and waited_s >= wait_s:
                    file.seek(0)
                    raise Conflict(
                        f"{file.read().strip() or 'another process'} is training on {self._path.parent}: end "
                        "it first, or use another run folder or store"
                    )
                if state == "looked at" and waited_s >= max(wait_s, _LONGEST_LOOK_S):
                    raise Conflict(
                        f"another process has held {self._door} locked for {waited_s:.0f} s, as a proxy does "
                        "while it resumes an engine: end that proxy, or try again"
                    )
                time.sleep(_POLL_S if state == "held" else _DOOR_POLL_S)
            file.truncate(0)
            file.write(self.holder)
            file.flush()
        except BaseException:
            file.close()
            raise
        self._file = file

    def _try(self, file: IO[str]) -> Literal["taken", "held", "looked at"]:
        """Lock the door and then the trainer's file, or report which of them is locked."""
        with open(self._door, "a") as door:
            if not _locked(door):
                return "looked at"
            return "taken" if _locked(file) else "held"

    @contextmanager
    def nobody(self) -> Iterator[bool]:
        """Whether no process holds the lock; if so, none can take it within the with-block.

        False also while another process checks or takes it. OSError if the files cannot be opened.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as looking:
            door = looking.enter_context(open(self._door, "a"))
            is_free = False
            if _locked(door):
                with open(self._path, "a+") as file:
                    is_free = _locked(file)
            if not is_free:
                looking.close()
            yield is_free

    @contextmanager
    def held(self, wait_s: float) -> Iterator[None]:
        """`take`, and let it go at the end."""
        self.take(wait_s)
        try:
            yield
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Leave the store to another trainer. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
