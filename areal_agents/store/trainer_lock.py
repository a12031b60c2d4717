"""At most one living trainer has a store: whose leases count is a question of who lives, never of a clock.

The lock is one that the system takes away with the process, however that ends; so a lease of anybody
else is one of the dead, and is void. A clock that is set forward or back changes nothing.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from areal_agents.store.errors import Conflict

_POLL_S = 0.02
_LONGEST_SWAP_S = 60.0  # for which a proxy may hold up a trainer that begins


class TrainerLock:
    """The right to lease the groups of the store in `path`. Taken once, kept until it is let go.

    There are two lock files. Whoever wants to know or to change who the trainer is holds the second one
    meanwhile, so that a look at the first never stands in the way of a trainer that takes it.
    """

    def __init__(self, path: Path) -> None:
        path = path.resolve()  # one lock, by whatever name the store is known
        self._path = path.with_name(path.name + ".trainer")
        self._file: IO[str] | None = None
        self.holder = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"

    def take(self, wait_s: float = 0.0) -> None:
        """Take it if it is not taken yet; an earlier trainer that is ending is given `wait_s`.

        A proxy that is bringing an engine up to date meanwhile is waited for, up to a minute.

        Raises:
            Conflict: another process has it; the message says which.
        """
        if self._file is not None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._beginning(max(wait_s, _LONGEST_SWAP_S)) as is_ours:
            if not is_ours:
                raise Conflict(
                    f"an engine of {self._path.parent} is still being brought up to date; try again"
                )
            self._file = self._taken(wait_s)

    @contextmanager
    def absent(self) -> Iterator[bool]:
        """Whether no trainer lives. If so, none begins before the end of the with-block."""
        with self._beginning(0.0) as is_ours:
            yield is_ours and self._is_free()

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

    @contextmanager
    def _beginning(self, wait_s: float) -> Iterator[bool]:
        """Hold the second file; False if somebody else still has it after `wait_s`."""
        with open(self._path.with_name(self._path.name + "-begins"), "a") as file:
            yield _locked_within(file, wait_s)

    def _taken(self, wait_s: float) -> IO[str]:
        file = open(self._path, "a+")  # noqa: SIM115 - open for as long as it is held
        try:
            if not _locked_within(file, wait_s):
                file.seek(0)
                raise Conflict(
                    f"{file.read().strip() or 'another process'} is training on {self._path.parent}: end "
                    "it first, or use another run folder or store"
                )
            file.truncate(0)
            file.write(self.holder)
            file.flush()
        except BaseException:
            file.close()
            raise
        return file

    def _is_free(self) -> bool:
        with open(self._path, "a") as file:
            return _locked_within(file, 0.0)


def _locked_within(file: IO[str], wait_s: float) -> bool:
    """Lock a file; False if another process still holds it after `wait_s`."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
        time.sleep(_POLL_S)
