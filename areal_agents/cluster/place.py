"""The place of this process in the run: claimed, shown to be alive by a thread, and left at the end."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType

from areal_agents.errors import ConfigError, StoreError
from areal_agents.lock_files import holding, is_held
from areal_agents.sockets import own_address
from areal_agents.store import Conflict, Store
from areal_agents.store.postgres import host_of, is_postgres
from areal_agents.store.roles import BEAT_S, DEAD_AFTER_S, Role, RoleRow

logger = logging.getLogger(__name__)

CLAIM_S = 3 * DEAD_AFTER_S  # longest wait for the process that had the place before
CUT_OFF_S = 120.0  # without a heartbeat, after which a process must end; twice what a write waits
_POLL_S = 1.0


class Place:
    """A place that this process has. Leaving the with-block leaves the place.

    Attributes:
        row: the place when it was claimed.
        lock_fd: the descriptor of the lock of the place, for a child process whose end frees the place too.
    """

    def __init__(self, store: Store, row: RoleRow) -> None:
        self.row = row
        self._store = store
        self._url: str | None = None
        self._lost = False
        self._shown_at = time.monotonic()
        lock = _lock_file(store, row)
        for earlier in lock.parent.glob(f"{row.role}-{row.index}-*.lock"):
            earlier.unlink(missing_ok=True)  # the store says that their processes have no place any more
        self._lock = contextlib.ExitStack()
        self.lock_fd = self._lock.enter_context(holding(lock, f"{os.getpid()}\n"))
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._beating.start()

    @classmethod
    def claim(cls, store: Store, role: Role, index: int, *, host: str, wait_s: float = CLAIM_S) -> Place:
        """Take a place, after the process that has it now has ended.

        Raises:
            ConfigError: that process is still running after `wait_s`.
        """
        deadline = time.monotonic() + wait_s
        said = False
        while True:
            earlier = next((row for row in store.role_rows(role) if row.index == index), None)
            gone = earlier.epoch if earlier is not None and _is_gone(store, earlier) else None
            try:
                return cls(store, store.claim_role(role, index, host=host, pid=os.getpid(), gone=gone))
            except Conflict as error:
                if time.monotonic() > deadline:
                    raise ConfigError(f"{error}; end it, or start another index") from None
                if not said:
                    logger.info("%s; waiting for its end, for at most %.0f s", error, wait_s)
                    said = True
            time.sleep(_POLL_S)

    def __enter__(self) -> Place:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._beating.join()
        try:
            self._store.leave_role(self.row.role, self.row.index, self.row.epoch)
        except StoreError as failed:  # the place becomes free when its last heartbeat is old
            logger.warning("the end of this process could not be recorded: %s", failed)
        self._lock.close()
        with contextlib.suppress(OSError):  # it has the files of other processes
            _lock_file(self._store, self.row).parent.rmdir()

    @property
    def loss(self) -> str | None:
        """Why this process must end, as a clause: another one has or may have its place; else None."""
        name = f"{self.row.role} {self.row.index}"
        if self._lost:
            return f"another process is {name} of the run now"
        if time.monotonic() - self._shown_at > CUT_OFF_S:
            return f"{name} has not reached the store for {CUT_OFF_S:.0f} s, so another may have its place"
        return None

    def announce(self, url: str) -> None:
        """Tell the others the address of this process."""
        self._url = url
        self._show()

    def _show(self) -> None:
        row, began = self.row, time.monotonic()
        if self._store.beat_role(row.role, row.index, row.epoch, url=self._url):
            self._shown_at = began
        else:
            self._lost = True

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S) and not self._lost:
            try:
                self._show()
            except StoreError as error:
                # Another process may reach the store and take the place; the next heartbeat will tell.
                logger.warning("no heartbeat could be written: %s", error)


def address_for_store(store_url: str) -> str:
    """Return the address of this machine on the network over which it reaches the store.

    It is 127.0.0.1 for a store that is a file, because the whole run is then on this machine.
    """
    if not is_postgres(store_url):
        return "127.0.0.1"
    host, port = host_of(store_url)
    if host.startswith("/"):  # a socket in the file system
        return "127.0.0.1"
    return own_address(host, port)


def _is_gone(store: Store, row: RoleRow) -> bool:
    """Whether the process that has a place is known to have ended, because it was on this machine."""
    file = _lock_file(store, row)
    return file.exists() and not is_held(file)


def _lock_file(store: Store, row: RoleRow) -> Path:
    """Return the file whose lock the process of a place holds; other machines and containers lack it."""
    name = hashlib.blake2b(store.url.encode(), digest_size=8).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"areal-agents-places-{os.getuid()}-{name}"
    return folder / f"{row.role}-{row.index}-{row.epoch}.lock"
