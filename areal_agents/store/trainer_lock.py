"""A file lock that lets at most one process be the trainer of a store.

The operating system releases the lock when its process ends in any way, so a lease of any other holder
belongs to a process that has ended, and is void. Leases therefore do not depend on clocks.

There are two files, which are always locked in the same order. The door is locked first and briefly, by a
process that takes the lock or checks whether it is held; then the lock itself, which a trainer keeps until it
exits. A process that only checks is thus never mistaken for a trainer: a trainer that starts at the same time
waits at the door.
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
_LONGEST_CHECK_S = 30.0  # an engine pool holds the door for as long as an engine takes to resume


class TrainerLock:
    """The right to lease the groups of the store in `path`. It is held from `take` until `release`."""

    def __init__(self, path: Path) -> None:
        path = path.resolve()  # one lock, even if the store is opened by several names
        self._path = path.with_name(path.name + ".trainer")
        self._door = path.with_name(path.name + ".trainer-door")
        self._file: IO[str] | None = None
        self.holder = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"

    def take(self, wait_s: float = 0.0) -> None:
        """Take the lock if this object does not hold it; wait `wait_s` for a trainer that is ending.

        A process that checks whether the lock is held (`unheld`) is always waited for, for at least 30 s.

        Raises:
            Conflict: another process holds the lock, and the message says which; or a check takes too long.
        """
        if self._file is not None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = open(self._path, "a+")  # noqa: SIM115 - open as long as the lock is held
        began = time.monotonic()
        try:
            while (state := self._try(file)) != "taken":
                waited_s = time.monotonic() - began
                if state == "held" and waited_s >= wait_s:
                    file.seek(0)
                    raise Conflict(
                        f"{file.read().strip() or 'another process'} is training on {self._path.parent}; end "
                        "it first, or use another run folder or store"
                    )
                if state == "being checked" and waited_s >= max(wait_s, _LONGEST_CHECK_S):
                    raise Conflict(
                        f"another process has held {self._door} locked for {waited_s:.0f} s, as a proxy does "
                        "while it resumes an engine; end that proxy, or try again"
                    )
                time.sleep(_POLL_S if state == "held" else _DOOR_POLL_S)
            file.truncate(0)
            file.write(self.holder)
            file.flush()
        except BaseException:
            file.close()
            raise
        self._file = file

    def _try(self, file: IO[str]) -> Literal["taken", "held", "being checked"]:
        """Lock the door and then the trainer's file, or report which of them is locked."""
        with open(self._door, "a") as door:
            if not _locked(door):
                return "being checked"
            return "taken" if _locked(file) else "held"

    @contextmanager
    def unheld(self) -> Iterator[bool]:
        """Yield whether no process holds the lock; if so, none can take it within the with-block.

        False also while another process checks or takes it. Raises OSError if the files cannot be opened.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as checking:
            door = checking.enter_context(open(self._door, "a"))
            is_free = False
            if _locked(door):
                with open(self._path, "a+") as file:
                    is_free = _locked(file)
            if not is_free:
                checking.close()
            yield is_free

    @contextmanager
    def held(self, wait_s: float) -> Iterator[None]:
        """Hold the lock within a with-block; see `take`."""
        self.take(wait_s)
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        """Release the lock, so that another trainer can take it. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
