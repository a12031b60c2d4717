"""A lock that lets at most one process be the trainer of a store.

The lock of a store in a file is a lock of the operating system; that of a store in PostgreSQL belongs to a
session of the server. Either is released when its process ends in any way, so a lease of any other holder
belongs to a process that has ended, and is void. Leases therefore do not depend on clocks.

There are two locks, which are always taken in the same order. The door is locked first and briefly, by a
process that takes the lock or checks whether it is held; then the lock itself, which a trainer keeps until it
exits. A process that only checks is thus never mistaken for a trainer: a trainer that starts at the same time
waits at the door.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Literal, Protocol

import sqlalchemy as sa

from areal_agents.store.errors import Conflict
from areal_agents.store.postgres import Retry, advisory_key, engine_of, is_postgres, schema_of, shown
from areal_agents.store.schema import store_meta
from areal_agents.store.urls import store_path

_POLL_S = 0.1
_DOOR_POLL_S = 0.01
_LONGEST_CHECK_S = 30.0  # an engine pool holds the door for as long as an engine takes to resume
_HOLDER = "trainer"  # the key of store_meta that names the holder


class Held(Protocol):
    """A lock that is held."""

    def is_held(self) -> bool:
        """Whether it still is: a session of a server may be lost."""

    def release(self) -> None:
        """Release it."""


class Locks(Protocol):
    """The two locks of a store."""

    name: str  # for messages

    def try_door(self) -> Held | None:
        """Lock the door, or return None if another process has."""

    def try_lock(self) -> Held | None:
        """Lock the trainer's lock, or return None if another process has."""

    def record(self, held: Held, holder: str) -> None:
        """Write down who holds the lock."""

    def holder(self) -> str:
        """Return who held the lock last; "" if that is not known."""


class TrainerLock:
    """The right to lease the groups of a store. It is held from `take` until `release`. Thread-safe."""

    def __init__(self, locks: Locks) -> None:
        self._locks = locks
        self._mutex = threading.RLock()  # a thread that writes folders may find a lost session too
        self._held: Held | None = None
        self._was_taken = False  # and not released since; a session may be lost, and the lock with it
        self.holder = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"

    @classmethod
    def of(cls, url_or_path: str | Path) -> TrainerLock:
        """Return the lock of the store at a URL or path."""
        if isinstance(url_or_path, str) and is_postgres(url_or_path):
            return cls(PostgresLocks(url_or_path))
        return cls(FileLocks(store_path(url_or_path)))

    def take(self, wait_s: float = 0.0) -> None:
        """Take the lock if this object does not hold it; wait `wait_s` for a trainer that is ending.

        A process that checks whether the lock is held (`unheld`) is always waited for, for at least 30 s.

        Raises:
            Conflict: another process holds the lock, and the message says which; or a check takes too long;
                or the session that held it was lost, and another process has been the trainer since.
        """
        with self._mutex:
            self._take(wait_s)

    def _take(self, wait_s: float) -> None:
        if self._held is not None and self._held.is_held():
            return
        if self._held is not None:
            self._held.release()
            self._held = None
        began = time.monotonic()
        while isinstance(found := self._try(), str):
            waited_s = time.monotonic() - began
            if found == "held" and waited_s >= wait_s:
                raise Conflict(
                    f"{self._locks.holder() or 'another process'} is training on {self._locks.name}; end it "
                    "first, or use another run folder or store"
                )
            if found == "being checked" and waited_s >= max(wait_s, _LONGEST_CHECK_S):
                raise Conflict(
                    f"another process has held the door of {self._locks.name} locked for {waited_s:.0f} s, "
                    "as a proxy does while it resumes an engine; end that proxy, or try again"
                )
            time.sleep(_POLL_S if found == "held" else _DOOR_POLL_S)
        if self._was_taken and (other := self._locks.holder()) != self.holder:
            found.release()
            raise Conflict(f"the connection to the store was lost, and {other} has been its trainer since")
        try:
            self._locks.record(found, self.holder)
        except BaseException:
            found.release()
            raise
        self._held, self._was_taken = found, True

    def _try(self) -> Held | Literal["held", "being checked"]:
        """Lock the door and then the lock, or say which of them is locked."""
        door = self._locks.try_door()
        if door is None:
            return "being checked"
        try:
            return self._locks.try_lock() or "held"
        finally:
            door.release()

    @contextmanager
    def unheld(self) -> Iterator[bool]:
        """Yield whether no process holds the lock; if so, none can take it within the with-block.

        False also while another process checks or takes it. Raises OSError if the files cannot be opened.
        """
        with ExitStack() as checking:
            door = self._locks.try_door()
            is_free = False
            if door is not None:
                checking.callback(door.release)
                if (lock := self._locks.try_lock()) is not None:
                    lock.release()
                    is_free = True
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
        with self._mutex:
            self._was_taken = False
            if self._held is not None:
                self._held.release()
                self._held = None

    def take_back(self) -> None:
        """Take the lock again if this object had it and its session was lost; see `take`."""
        with self._mutex:
            if self._was_taken:
                self._take(0.0)

    def check(self, connection: sa.Connection) -> None:
        """Raise Conflict if this object held the lock, and another process has taken it since.

        It is a part of each transaction of a trainer: a session of a server may be lost without its notice.
        """
        if not self._was_taken or isinstance(self._locks, FileLocks):
            return
        other = connection.execute(
            sa.select(store_meta.c.value).where(store_meta.c.key == _HOLDER)
        ).scalar_one_or_none()
        if other != self.holder:
            raise Conflict(f"{other} is the trainer of {self._locks.name} now; this one must end")


class FileLocks:
    """The locks of a store in a file: two files beside it."""

    def __init__(self, path: Path) -> None:
        path = path.resolve()  # one lock, even if the store is opened by several names
        self._path = path.with_name(path.name + ".trainer")
        self._door = path.with_name(path.name + ".trainer-door")
        self.name = str(path.parent)

    def try_door(self) -> Held | None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return _HeldFile.of(self._door)

    def try_lock(self) -> Held | None:
        return _HeldFile.of(self._path)

    def record(self, held: Held, holder: str) -> None:
        assert isinstance(held, _HeldFile)
        held.file.truncate(0)
        held.file.write(holder)
        held.file.flush()

    def holder(self) -> str:
        return self._path.read_text().strip()


class _HeldFile:
    """An open file that is locked."""

    def __init__(self, file: IO[str]) -> None:
        self.file = file

    @classmethod
    def of(cls, path: Path) -> _HeldFile | None:
        file = open(path, "a+")  # noqa: SIM115 - open as long as the lock is held
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        except BaseException:
            file.close()
            raise
        return cls(file)

    def is_held(self) -> bool:
        return True

    def release(self) -> None:
        self.file.close()


class PostgresLocks:
    """The locks of a store in PostgreSQL, which exists: advisory locks of a session."""

    def __init__(self, url: str) -> None:
        schema = schema_of(url)
        # A trainer may train for a long time without using the session, and keeps its lock.
        self._engine = engine_of(url, is_pooled=False).execution_options(isolation_level="AUTOCOMMIT")
        self._keys = {name: advisory_key(schema, name) for name in ("trainer", "trainer-door", "run")}
        self._writers = advisory_key(schema, "writer")
        self.name = shown(url)

    def try_door(self) -> Held | None:
        return self._locked("trainer-door")

    def try_lock(self) -> Held | None:
        return self._locked("trainer")

    def try_run(self) -> Held | None:
        """Lock the store for one run, or return None if another run has."""
        return self._locked("run")

    def record(self, held: Held, holder: str) -> None:
        assert isinstance(held, _HeldSession)
        execute = held.connection.exec_driver_sql
        execute(
            f"BEGIN; SELECT pg_advisory_xact_lock({self._writers})"
        )  # no write of the last holder is open
        execute(
            "INSERT INTO store_meta (key, value) VALUES (%(key)s, %(value)s) "
            "ON CONFLICT (key) DO UPDATE SET value = excluded.value",
            {"key": _HOLDER, "value": holder},
        )
        execute("COMMIT")

    def holder(self) -> str:
        with self._connected() as connection:
            return (
                connection.execute(
                    sa.select(store_meta.c.value).where(store_meta.c.key == _HOLDER)
                ).scalar_one_or_none()
                or ""
            )

    def _connected(self) -> sa.Connection:
        """Return a new connection; a server that is away is waited for. Raises StoreError in the end."""
        retry = Retry(self.name)
        while True:
            try:
                return self._engine.connect()
            except sa.exc.OperationalError as error:
                retry.after(error)

    def _locked(self, which: str) -> _HeldSession | None:
        connection = self._connected()
        try:
            taken = connection.exec_driver_sql(
                f"SELECT pg_try_advisory_lock({self._keys[which]})"
            ).scalar_one()
        except BaseException:
            connection.close()
            raise
        if not taken:
            connection.close()
            return None
        return _HeldSession(connection)


class _HeldSession:
    """A session of PostgreSQL that holds an advisory lock."""

    def __init__(self, connection: sa.Connection) -> None:
        self.connection = connection

    def is_held(self) -> bool:
        try:
            self.connection.exec_driver_sql("SELECT 1")
        except sa.exc.DBAPIError:
            return False
        return not self.connection.invalidated

    def release(self) -> None:
        """Release the lock, and end the session, even if the connection was lost."""
        with suppress(sa.exc.DBAPIError, sa.exc.PendingRollbackError):
            # The server would notice only some time later that a session has ended.
            self.connection.exec_driver_sql("SELECT pg_advisory_unlock_all()")
        self.connection.invalidate()
        self.connection.close()
