"""Identifies the workers of one machine on a store, and determines which of them are running.

An open episode in the store names its owner, the only process that may have it in memory. A restarted worker
is a new owner, and the episodes of its earlier process are taken over like those of any dead worker. Each
process holds a lock on a file beside the store, which the kernel releases however the process ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from areal_agents.errors import ConfigError
from areal_agents.lock_files import holding, is_held
from areal_agents.sockets import listen
from areal_agents.store.postgres import is_postgres
from areal_agents.store.urls import store_path, store_url

PRIVATE_HOST = "127.0.0.1"
ORPHANS_END_S = 25.0  # a worker exits at the latest 15 s after its supervisor
_POLL_S = 0.05
_LOCK = ".lock"
_SUPERVISOR = ".supervisor" + _LOCK


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The identity of a worker. Only `index` and `starts` differ between the workers of a run.

    Attributes:
        folder: the folder of the lock files; see `locks_of`.
        run: name of this run of the supervisor.
        index: index of the worker, from 0.
        starts: number of earlier starts of the worker.
        ports: [N] the port of each worker on `PRIVATE_HOST`, where its siblings reach it.
        secret: the secret that proves to a worker that a request comes from a sibling.
    """

    folder: Path
    run: str
    index: int
    starts: int
    ports: tuple[int, ...]
    secret: str


class Workers:
    """One worker's view of itself and its siblings."""

    spreads_openings = True

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self.index = spec.index
        self.count = len(spec.ports)
        self.private = (PRIVATE_HOST, spec.ports[spec.index])
        self.secret = spec.secret
        self.owner = owner_name(spec.run, spec.index, spec.starts)

    def address(self, index: int) -> str | None:
        """Return the base URL of a sibling's own port, the same after a restart; None while it is down."""
        return self._url(index) if self.is_up(index) else None

    @contextlib.contextmanager
    def holding_lock(self) -> Iterator[None]:
        """Hold the lock of this process run within the with-block."""
        folder = self._spec.folder
        folder.mkdir(parents=True, exist_ok=True)
        for earlier in folder.glob(owner_name(self._spec.run, self.index, "*") + _LOCK):
            earlier.unlink(missing_ok=True)  # earlier processes of this worker have ended
        with holding(folder / (self.owner + _LOCK), f"{os.getpid()} {self._url(self.index)}\n"):
            yield

    def is_alive(self, owner: str) -> bool:
        """Whether the process with this owner name is still running."""
        return is_held(self._spec.folder / (owner + _LOCK))

    def is_up(self, index: int) -> bool:
        """Whether a worker of this run is running."""
        return self.owner_of(index) is not None

    def owner_of(self, index: int) -> str | None:
        """Return the owner name of the process that is a worker now; None while it is down."""
        locks = self._spec.folder.glob(owner_name(self._spec.run, index, "*") + _LOCK)
        return next((path.name.removesuffix(_LOCK) for path in locks if is_held(path)), None)

    def index_of(self, owner: str | None) -> int | None:
        """Return the index of the worker with an owner name, None for an owner of another run."""
        run, _, rest = (owner or "").partition(".")
        index = rest.partition(".")[0]
        return int(index) if run == self._spec.run and index.isdecimal() else None

    def measured(self) -> list[int]:
        """Return the indexes of all workers: one that is not running is restarted at once."""
        return list(range(self.count))

    async def look_for(self, owner: str) -> None:
        """Do nothing, because the locks are looked at whenever somebody asks."""

    async def refresh(self) -> None:
        """Do nothing, as `look_for`."""

    def _url(self, index: int) -> str:
        return f"http://{PRIVATE_HOST}:{self._spec.ports[index]}"


def owner_name(run: str, index: int, starts: int | str) -> str:
    """Return the name with which one process of a worker owns episodes in the store."""
    return f"{run}.{index}.{starts}"


def locks_of(store: str | Path) -> Path:
    """Return the folder of the lock files of a store's workers on this machine.

    It is beside the file of the store, or, for a store in PostgreSQL, in this user's temporary folder.
    """
    url = store_url(store)
    if not is_postgres(url):
        path = store_path(url)
        return path.with_name(path.name + ".workers")
    name = hashlib.blake2b(url.encode(), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir()) / f"areal-agents-workers-{os.getuid()}-{name}"


@contextlib.contextmanager
def supervising(folder: Path, run: str) -> Iterator[None]:
    """Hold the lock of a supervisor within the with-block."""
    with holding(folder / (run + _SUPERVISOR), f"{os.getpid()}\n"):
        yield


def was_killed(folder: Path) -> bool:
    """Whether a supervisor of this store was killed and its lock file still exists."""
    return any(not is_held(path) for path in folder.glob("*" + _SUPERVISOR))


def listen_after(host: str, port: int, folder: Path) -> socket.socket:
    """Open a listening socket; after a supervisor was killed, wait until its workers free the port."""
    deadline = time.monotonic() + ORPHANS_END_S
    while True:
        try:
            return listen(host, port)
        except ConfigError:
            if not was_killed(folder) or time.monotonic() > deadline:
                raise
        time.sleep(_POLL_S)


def wait_for_orphans(folder: Path) -> None:
    """Wait until the workers of every killed supervisor have exited, which they do by themselves.

    Until then they may be writing the last turns of their episodes. Raise ConfigError if some are still
    running after `ORPHANS_END_S`.
    """
    deadline = time.monotonic() + ORPHANS_END_S
    while orphans := [path for path in folder.glob("*.*.*" + _LOCK) if _is_orphan(path)]:
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{len(orphans)} workers of a killed supervisor are still running after {ORPHANS_END_S:g} s; "
                f"kill them (the files in {folder} contain their process ids)"
            )
        time.sleep(_POLL_S)
    forget_dead(folder)


def forget_dead(folder: Path) -> None:
    """Remove the lock files of processes that were killed, and the folder if it is empty."""
    for path in folder.glob("*" + _LOCK):
        if not is_held(path):
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # the folder has lock files of running processes
        folder.rmdir()


def _is_orphan(path: Path) -> bool:
    """Whether the lock of a worker is held and that of its supervisor is not."""
    run = path.name.partition(".")[0]
    return is_held(path) and not is_held(path.with_name(run + _SUPERVISOR))
