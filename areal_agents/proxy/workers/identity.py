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
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from areal_agents.errors import ConfigError
from areal_agents.proxy.auth import new_episode_key
from areal_agents.proxy.listening import listen

PRIVATE_HOST = "127.0.0.1"
ORPHANS_END_S = 25.0  # a worker ends by force 15 s after its supervisor has
_LOOK_S = 0.05
_LOCK = ".lock"
_SUPERVISOR = ".supervisor" + _LOCK


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker is told at its start, the same for all of a run but `index` and `life`.

    Attributes:
        folder: where the locks lie; see `locks_beside`.
        run: names the run of the supervisor.
        index: which worker.
        life: how often it was started before.
        ports: [N] each worker's own port on `PRIVATE_HOST`, where its siblings reach it.
        secret: proves to a worker that a sibling sent a request.
    """

    folder: Path
    run: str
    index: int
    life: int
    ports: tuple[int, ...]
    secret: str


class Workers:
    """One worker's view of itself and its siblings."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self.index = spec.index
        self.count = len(spec.ports)
        self.private = (PRIVATE_HOST, spec.ports[spec.index])
        self.secret = spec.secret
        self.owner = owner_name(spec.run, spec.index, spec.life)

    def url(self, index: int) -> str:
        """Where a sibling answers, without a path."""
        return f"http://{PRIVATE_HOST}:{self._spec.ports[index]}"

    @contextlib.contextmanager
    def living(self) -> Iterator[None]:
        """Be among the living for the length of a with-block."""
        folder = self._spec.folder
        folder.mkdir(parents=True, exist_ok=True)
        for earlier in folder.glob(owner_name(self._spec.run, self.index, "*") + _LOCK):
            earlier.unlink(missing_ok=True)  # a life begins when the one before has ended
        with _holding(folder / (self.owner + _LOCK), f"{os.getpid()} {self.url(self.index)}\n"):
            yield

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

    def home(self, episode_key: str) -> int:
        """The worker that opens the episode with this key, and takes it up if nobody living has it.

        It depends on the key and on the number of workers alone, so no restart changes it.
        """
        digest = hashlib.blake2b(episode_key.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % self.count

    def new_key(self) -> str:
        """A fresh key of an episode that is at home here."""
        while True:
            key = new_episode_key()
            if self.home(key) == self.index:
                return key

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


@contextlib.contextmanager
def supervising(folder: Path, run: str) -> Iterator[None]:
    """Be the living supervisor of a run for the length of a with-block."""
    with _holding(folder / (run + _SUPERVISOR), f"{os.getpid()}\n"):
        yield


def was_killed(folder: Path) -> bool:
    """Whether a supervisor of this store was killed, and nobody has cleared up after it."""
    return any(not _is_held(path) for path in folder.glob("*" + _SUPERVISOR))


def listen_after(host: str, port: int, folder: Path) -> socket.socket:
    """`listen`; where a supervisor of this store was killed, wait until its workers let go of the port."""
    deadline = time.monotonic() + ORPHANS_END_S
    while True:
        try:
            return listen(host, port)
        except ConfigError:
            if not was_killed(folder) or time.monotonic() > deadline:
                raise
        time.sleep(_LOOK_S)


def wait_for_orphans(folder: Path) -> None:
    """Return when the workers of every killed supervisor have ended, which they do by themselves.

    Until then they may be writing the last turns of the episodes that they have in memory. ConfigError if
    they are still running after a limit that none should reach.
    """
    deadline = time.monotonic() + ORPHANS_END_S
    while orphans := [path for path in folder.glob("*.*.*" + _LOCK) if _is_orphan(path)]:
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{len(orphans)} workers of a proxy whose supervisor was killed still run after "
                f"{ORPHANS_END_S:g} s; end them (the files in {folder} name their processes)"
            )
        time.sleep(_LOOK_S)
    forget_dead(folder)


def forget_dead(folder: Path) -> None:
    """Remove what killed workers left in the folder of the locks, and the folder if nothing is left."""
    for path in folder.glob("*" + _LOCK):
        if not _is_held(path):
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # others live
        folder.rmdir()


@contextlib.contextmanager
def _holding(path: Path, content: str) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    unlocked = path.with_suffix(f".{os.getpid()}.new")
    with open(unlocked, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(content)  # for whoever looks
        file.flush()
        unlocked.rename(path)  # so that nobody ever meets the file of a living process without its lock
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _is_orphan(path: Path) -> bool:
    """Whether the lock of a worker is held, but not that of its supervisor."""
    run = path.name.partition(".")[0]
    return _is_held(path) and not _is_held(path.with_name(run + _SUPERVISOR))


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
