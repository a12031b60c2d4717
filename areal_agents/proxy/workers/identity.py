"""Several proxy processes on one store: which worker this one is, and which of the others live.

An open episode in the store names its owner, the only process that may have it in memory. An owner is one
life of a worker: what belonged to an earlier life is taken over like anybody else's. A life holds a lock on
a file beside the store, and the kernel lets go of the lock when the process ends, however that happens.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LOCK = ".lock"


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker is told at its start, the same for all of a run but `index` and `life`.

    Attributes:
        folder: where the locks lie; see `locks_beside`.
        run: names the run of the supervisor.
        index: which worker.
        life: how often it was started before.
        ports: [N] each worker's own port.
        loopback: the address at which the workers reach each other.
        secret: proves to a worker that a sibling sent a request.
    """

    folder: Path
    run: str
    index: int
    life: int
    ports: tuple[int, ...]
    loopback: str
    secret: str


class Workers:
    """One worker's view of itself and its siblings."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self.index = spec.index
        self.count = len(spec.ports)
        self.port = spec.ports[spec.index]
        self.secret = spec.secret
        self.owner = owner_name(spec.run, spec.index, spec.life)

    def url(self, index: int) -> str:
        """Where a sibling answers, without a path."""
        return f"http://{self._spec.loopback}:{self._spec.ports[index]}"

    @contextlib.contextmanager
    def living(self) -> Iterator[None]:
        """Be among the living for the length of a with-block."""
        folder = self._spec.folder
        folder.mkdir(parents=True, exist_ok=True)
        for earlier in folder.glob(owner_name(self._spec.run, self.index, "*") + _LOCK):
            earlier.unlink(missing_ok=True)  # a life begins when the one before has ended
        path = folder / (self.owner + _LOCK)
        unlocked = path.with_suffix(f".{os.getpid()}.new")
        with open(unlocked, "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(f"{os.getpid()}\n".encode())  # for whoever looks
            file.flush()
            unlocked.rename(path)  # so that nobody ever meets the file of a living worker without its lock
            try:
                yield
            finally:
                path.unlink(missing_ok=True)

    def is_living(self, owner: str) -> bool:
        """Whether the process that an owner's name stands for still runs."""
        return _is_held(self._spec.folder / (owner + _LOCK))

    def is_up(self, index: int) -> bool:
        """Whether a worker of this run has a life at the moment."""
        name = owner_name(self._spec.run, index, "*")
        return any(_is_held(path) for path in self._spec.folder.glob(name + _LOCK))

    def is_first(self) -> bool:
        """Whether no worker with a lower index lives: it does what one of them must."""
        return not any(self.is_up(index) for index in range(self.index))

    def index_of(self, owner: str | None) -> int | None:
        """The worker of this run that an owner is or was a life of; None for another run's."""
        run, _, rest = (owner or "").partition(".")
        index = rest.partition(".")[0]
        return int(index) if run == self._spec.run and index.isdecimal() else None

    def homes(self, key: bytes) -> list[int]:
        """The workers in the order in which something without an owner falls to them.

        Every worker finds the same order, and the workers share what there is equally.
        """
        return sorted(range(self.count), key=lambda index: _weight(key, index))


def owner_name(run: str, index: int, life: int | str) -> str:
    """How the store names one life of a worker."""
    return f"{run}.{index}.{life}"


def locks_beside(store: Path) -> Path:
    """The folder of the workers' locks."""
    return store.with_name(store.name + ".workers")


def forget_dead(folder: Path) -> None:
    """Remove what killed workers left in the folder of the locks, and the folder if nothing is left."""
    for path in folder.glob("*" + _LOCK):
        if not _is_held(path):
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # others live
        folder.rmdir()


def _is_held(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _weight(key: bytes, index: int) -> bytes:
    return hashlib.blake2b(key + b"\0" + str(index).encode(), digest_size=8).digest()
