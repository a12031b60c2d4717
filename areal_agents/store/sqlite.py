"""The store in a SQLite file: the default, for the processes of one machine."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import orjson
import sqlalchemy as sa

from areal_agents.errors import StoreError
from areal_agents.store import migrations
from areal_agents.store.config import Durability
from areal_agents.store.database import Job, T, driver_of
from areal_agents.store.schema import SCHEMA_VERSION

_BUSY_TIMEOUT_S = 60.0
_OTHERS_S = 10.0  # longest wait of a migration for other processes to close the file
_POLL_S = 0.05
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


class SqliteBackend:
    """The connections to a store file. A write is a BEGIN IMMEDIATE transaction."""

    driver_error: type[Exception] = sqlite3.Error

    def __init__(self, url: str, durability: Durability) -> None:
        self._url = url
        self._writer_engine = _engine(url, durability, "BEGIN IMMEDIATE")
        self._reader_engine = _engine(url, durability, "BEGIN")
        self._writer: sa.Connection | None = None
        self._watcher: sa.Connection | None = None

    def open(self) -> None:
        """Create the file and its tables, or check and migrate them. Raises StoreError."""
        try:
            if self._created_or_found() != SCHEMA_VERSION:
                self._writer_engine.dispose()  # the migration needs exclusive access to the file
                migrate(Path(str(sa.make_url(self._url).database)))
            self._watcher = self._reader_engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        except sa.exc.DBAPIError as error:
            raise StoreError(f"cannot open the store {self._url}: {error.orig}") from error

    @contextlib.contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """Open a connection that sees one consistent snapshot."""
        with self._reader_engine.begin() as connection:
            yield connection

    def query(self, read: Job[T]) -> T:
        """Return the result of a read of one consistent snapshot."""
        with self._reader_engine.begin() as connection:
            return read(connection)

    def write(self, work: Job[T], *, only_adds: bool) -> T:
        """Run `work` in a transaction of the driver's connection, at a third of the cost of SQLAlchemy's."""
        if self._writer is None:
            self._writer = self._writer_engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        driver = driver_of(self._writer)
        driver.execute("BEGIN IMMEDIATE")
        try:
            result = work(self._writer)
            driver.execute("COMMIT")
        except BaseException:
            if driver.in_transaction:  # a full disk may have rolled it back already
                driver.execute("ROLLBACK")
            raise
        return result

    def write_beside(self, work: Job[T]) -> T:
        """Run `work` in a transaction. It waits for the other writers, whose transactions are short."""
        with self._writer_engine.begin() as connection:
            return work(connection)

    def commits(self) -> int:
        """Return a number that changes with any commit by any process."""
        assert self._watcher is not None, "the backend is open"
        return cast(int, self._watcher.exec_driver_sql("PRAGMA data_version").scalar_one())

    def close(self) -> None:
        """Close every connection. Idempotent."""
        for connection in (self._writer, self._watcher):
            if connection is not None:
                connection.close()
        self._writer_engine.dispose()
        self._reader_engine.dispose()

    def _created_or_found(self) -> int:
        with self._writer_engine.begin() as connection:
            return migrations.created_or_found(connection, self._url)


def migrate(path: Path) -> None:
    """Migrate the store in `path` if it has an earlier schema, on the only connection to the file.

    A process of an earlier release therefore never finds tables that it does not know. The caller must have
    no connection to the file.

    Raises:
        StoreError: another process has the store open, or the database failed. The store is then unchanged.
    """
    deadline = time.monotonic() + _OTHERS_S
    while True:
        try:
            if _schema(path) != SCHEMA_VERSION:
                _migrate_alone(path)
            return
        except sa.exc.DBAPIError as error:
            assert isinstance(error.orig, sqlite3.Error)
            if error.orig.sqlite_errorcode & 0xFF not in _BUSY:
                raise StoreError(f"cannot migrate the store {path}: {error.orig}; it is unchanged") from error
            if time.monotonic() >= deadline:
                raise StoreError(
                    f"{path} was written by an earlier release and must be migrated, but another process has "
                    "it open; end every process that uses this store, then start again"
                ) from error
        time.sleep(_POLL_S)


def _schema(path: Path) -> int:
    # Another process of this release may have migrated the store in the meantime and have it open.
    with _only_engine(path, exclusive=False).begin() as connection:
        return migrations.created_or_found(connection, str(path))


def _migrate_alone(path: Path) -> None:
    with _only_engine(path, exclusive=True).begin() as connection:
        schema = migrations.created_or_found(connection, str(path))
        if schema != SCHEMA_VERSION:
            migrations.migrate(connection, schema)


def _only_engine(path: Path, *, exclusive: bool) -> sa.Engine:
    """Return an engine whose connection ends with its transaction, and never waits for another."""
    engine = sa.create_engine(f"sqlite:///{path}", connect_args={"timeout": 0}, poolclass=sa.NullPool)

    @sa.event.listens_for(engine, "connect")
    def configure(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver must not open transactions by itself
        if exclusive:
            # Set before the first access, this mode locks the file against all other connections, including
            # those without a transaction, or fails with SQLITE_BUSY. Closing the connection releases it.
            connection.execute("PRAGMA locking_mode=EXCLUSIVE")

    @sa.event.listens_for(engine, "begin")
    def start(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN EXCLUSIVE" if exclusive else "BEGIN")

    return engine


def _create_private(path: Path) -> None:
    """Create the file, readable by its owner only; SQLite gives the files beside it the same mode.

    A file that exists keeps its mode. Any other error is reported when the file is opened.
    """
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))


def _engine(url: str, durability: Durability, begin: str) -> sa.Engine:
    parsed = sa.make_url(url)
    if parsed.get_backend_name() != "sqlite" or parsed.database in (None, "", ":memory:"):
        raise StoreError(
            f"the store must be a SQLite file, given as a path or sqlite:///path, got {parsed!r}"
        )
    _create_private(Path(str(parsed.database)))
    engine = sa.create_engine(
        url,
        connect_args={"timeout": _BUSY_TIMEOUT_S, "check_same_thread": False},
        json_serializer=lambda value: orjson.dumps(value).decode(),
        json_deserializer=orjson.loads,
        pool_size=8,
        max_overflow=-1,
    )

    @sa.event.listens_for(engine, "connect")
    def configure(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver must not open transactions by itself
        connection.execute(f"PRAGMA busy_timeout={int(_BUSY_TIMEOUT_S * 1000)}")
        connection.execute(
            "PRAGMA auto_vacuum=INCREMENTAL"
        )  # takes effect in a new file, which can then return free pages
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA synchronous={'FULL' if durability == 'power' else 'NORMAL'}")
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute("PRAGMA secure_delete=FAST")  # no text of a changed row stays in free space

    @sa.event.listens_for(engine, "begin")
    def start(connection: sa.Connection) -> None:
        if connection.get_execution_options().get("isolation_level") != "AUTOCOMMIT":
            connection.exec_driver_sql(begin)

    return engine
