"""The store in a SQLite file: the default, for the processes of one machine."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import orjson
import sqlalchemy as sa

from areal_agents.errors import StoreError
from areal_agents.store.config import Durability
from areal_agents.store.database import Job, T, add_columns, created_or_found, driver_of
from areal_agents.store.migrations import PREVIOUS_SCHEMA, migrate
from areal_agents.store.schema import SCHEMA_VERSION

_BUSY_TIMEOUT_S = 60.0


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
            found = self._created_or_found()
            if found == str(PREVIOUS_SCHEMA):
                self._writer_engine.dispose()  # the migration needs exclusive access to the file
                migrate(Path(str(sa.make_url(self._url).database)))
                found = self._created_or_found()
            if found != str(SCHEMA_VERSION):
                raise StoreError(
                    f"{self._url} was written with store schema {found}, and this release reads "
                    f"{SCHEMA_VERSION} and migrates {PREVIOUS_SCHEMA}; use the release that wrote it, or a "
                    "new run folder"
                )
            with self._writer_engine.begin() as connection:
                add_columns(connection)
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

    def write(self, work: Job[T]) -> T:
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

    def _created_or_found(self) -> str | None:
        with self._writer_engine.begin() as connection:
            return created_or_found(connection, self._url)


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
