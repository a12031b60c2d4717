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

_POLL_S = 0.1


class TrainerLock:
    """The right to lease the groups of the store in `path`. Taken once, kept until it is let go."""

    def __init__(self, path: Path) -> None:
        path = path.resolve()  # one lock, by whatever name the store is known
        self._path = path.with_name(path.name + ".trainer")
        self._file: IO[str] | None = None
        self.holder = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"

    def take(self, wait_s: float = 0.0) -> None:
        """Take it if it is not taken yet; an earlier trainer that is ending is given `wait_s`.

        Raises:
            Conflict: another process has it; the message says which.
        """
        if self._file is not None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = open(self._path, "a+")  # noqa: SIM115 - open for as long as it is held
        deadline = time.monotonic() + wait_s
        try:
            while not _locked(file):
                if time.monotonic() >= deadline:
                    file.seek(0)
                    raise Conflict(
                        f"{file.read().strip() or 'another process'} is training on {self._path.parent}: end "
                        "it first, or use another run folder or store"
                    )
                time.sleep(_POLL_S)
            file.truncate(0)
            file.write(self.holder)
            file.flush()
        except BaseException:
            file.close()
            raise
        self._file = file

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
