"""A store that is only read: no connection of it can write, create or migrate anything.

It is for pages and tools that look at the run of another process. Every read of a file opens the one that is
at the path at that time, so a store that was deleted or replaced is noticed and never read by mistake.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson
import sqlalchemy as sa

from areal_agents.errors import StoreError
from areal_agents.store import migrations
from areal_agents.store.postgres import engine_of, is_postgres, schema_exists, schema_of
from areal_agents.store.schema import SCHEMA_VERSION, store_meta
from areal_agents.store.urls import shown_store, store_path

_BUSY_TIMEOUT_S = 2.0


class ReadOnlyStore:
    """A store that need not exist yet. Thread-safe; it must not be used after a fork.

    Attributes:
        url: its URL or path.
        path: its file; None if it is in PostgreSQL.
    """

    def __init__(self, url_or_path: str | Path) -> None:
        self.url = str(url_or_path)
        self.path = None if is_postgres(self.url) else store_path(url_or_path)
        self._shown = shown_store(url_or_path)
        self._lock = threading.Lock()
        self._opened: tuple[tuple[int, int], sa.Engine] | None = None  # (device, inode) and its engine

    @property
    def name(self) -> str:
        """A short name of the store."""
        return schema_of(self.url) if self.path is None else self.path.name

    def exists(self) -> bool:
        """Whether there is a store. Raises StoreError if a server cannot be reached."""
        return schema_exists(self.url) if self.path is None else self.path.exists()

    def mark(self) -> tuple[Any, ...]:
        """Return a value that changes with the store. Raises StoreError if a server cannot be reached."""
        if self.path is not None:
            return (_mark(self.path), _mark(self.path.with_name(self.path.name + "-wal")))
        with self.read() as connection:
            query = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text"
            return tuple(connection.exec_driver_sql(query).one())

    @contextlib.contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """Open a connection that sees one consistent snapshot.

        Raises:
            StoreError: there is no store at the path, it has another schema, or it cannot be read now.
        """
        try:
            with self._engine().begin() as connection:
                yield connection
        except sa.exc.DBAPIError as error:
            raise self._explained(error.orig) from error

    def close(self) -> None:
        """Close every connection. Idempotent; a later read opens the file again."""
        with self._lock:
            if self._opened is not None:
                self._opened[1].dispose()
                self._opened = None

    def _engine(self) -> sa.Engine:
        identity = (0, 0)
        if self.path is not None:
            try:
                status = self.path.stat()
            except FileNotFoundError:
                self.close()
                raise StoreError(
                    f"there is no store {self.path}; it was deleted, or not written yet"
                ) from None
            identity = (status.st_dev, status.st_ino)
        with self._lock:
            if self._opened is not None and self._opened[0] == identity:
                return self._opened[1]
            if self._opened is not None:
                self._opened[1].dispose()
                self._opened = None
            engine = _engine(self.path) if self.path is not None else _engine_of_postgres(self.url)
            try:
                with engine.connect() as connection:
                    self._check(connection)
            except BaseException:
                engine.dispose()
                raise
            self._opened = (identity, engine)
            return engine

    def _check(self, connection: sa.Connection) -> None:
        """Raise StoreError unless it is a store with the schema of this release."""
        tables = set(sa.inspect(connection).get_table_names())
        if store_meta.name not in tables:
            raise StoreError(
                f"{self._shown} is not a store of areal-agents; give a run's folder or its store"
            )
        schema = migrations.checked(migrations.schema_of_store(connection, tables), self._shown)
        if schema != SCHEMA_VERSION:
            raise StoreError(
                f"{self._shown} was written with store schema {schema}, and this release reads "
                f"{SCHEMA_VERSION}; `areal-agents episodes ls {self._shown}` migrates it when no process has "
                "it open, after which it can be read here"
            )

    def _explained(self, error: BaseException | None) -> StoreError:
        code = error.sqlite_errorcode & 0xFF if isinstance(error, sqlite3.Error) else 0
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return StoreError(
                f"{self.path} is locked by another process, for example a migration or a backup; try again "
                "when it has ended"
            )
        if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            return StoreError(f"{self.path} is not a readable SQLite file ({error}); restore it from a copy")
        return StoreError(f"{self._shown} cannot be read: {error}")


def _mark(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return (status.st_ino, status.st_size, status.st_mtime_ns)


def _engine_of_postgres(url: str) -> sa.Engine:
    return engine_of(url).execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)


def _engine(path: Path) -> sa.Engine:
    address = f"file:{quote(str(path.absolute()))}?mode=ro"

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(address, uri=True, timeout=_BUSY_TIMEOUT_S, check_same_thread=False)
        connection.isolation_level = None  # the driver must not open transactions by itself
        connection.execute("PRAGMA query_only=ON")
        return connection

    engine = sa.create_engine(
        "sqlite://",
        creator=connect,
        poolclass=sa.pool.QueuePool,
        pool_size=4,
        max_overflow=-1,
        json_serializer=lambda value: orjson.dumps(value).decode(),
        json_deserializer=orjson.loads,
    )

    @sa.event.listens_for(engine, "begin")
    def start(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine
