"""Connections to the store: one writer thread per process, any number of readers.

Every write is a job, which is a function of a connection. The writer runs all queued jobs in one BEGIN
IMMEDIATE transaction and commits once; a job's future resolves only after the commit, so an acknowledged
write survives kill -9. A job must have no effect except through the connection: if one job of a batch fails,
the batch is rolled back and each job runs again in a transaction of its own.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar, cast

import orjson
import sqlalchemy as sa

from areal_agents.errors import StoreError
from areal_agents.store.config import Durability
from areal_agents.store.migrations import PREVIOUS_SCHEMA, migrate
from areal_agents.store.schema import SCHEMA_VERSION, metadata, store_meta

T = TypeVar("T")
Job = Callable[[sa.Connection], T]
_Queued = tuple[Job[Any], "Future[Any]"]

_BUSY_TIMEOUT_S = 60.0
_MAX_BATCH = 256
_FIRST_POLL_S, _LAST_POLL_S = 0.002, 0.05


class _JobFailed(Exception):
    """A job of a batch raised `error`."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def _run(job: Job[T], connection: sa.Connection) -> T:
    try:
        return job(connection)
    except Exception as error:
        raise _JobFailed(error) from error


class _WriteFuture(Future[T]):
    """The future of a queued write, which cannot be cancelled.

    The writer therefore need not mark it as running. Marking it would take the lock that a waiter takes at
    the same time to add its callback, and both threads would contend for it at every write.
    """

    def cancel(self) -> bool:
        return False


class Database:
    """An open store file. Thread-safe; it must not be used after a fork."""

    def __init__(self, url: str, durability: Durability) -> None:
        self._writer_engine = _engine(url, durability, "BEGIN IMMEDIATE")
        self._reader_engine = _engine(url, durability, "BEGIN")
        self._closed = False
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self._jobs: queue.SimpleQueue[_Queued | None] = queue.SimpleQueue()
        try:
            self._create_or_check(url)
            self._watcher = self._reader_engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        except sa.exc.DBAPIError as error:
            self._dispose()
            raise StoreError(f"cannot open the store {url}: {error.orig}") from error
        except StoreError:
            self._dispose()
            raise
        self._writer = threading.Thread(target=self._write_loop, name="store-writer", daemon=True)
        self._writer.start()

    def submit(self, job: Job[T]) -> Future[T]:
        """Queue a write. The future resolves after its commit, or with the job's exception."""
        future: Future[T] = _WriteFuture()
        with self._lock:  # so that no job is queued after the None that closes the queue
            if self._closed:
                raise StoreError("the store is closed")
            self._jobs.put((job, future))
        return future

    @contextlib.contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """Open a connection that sees one consistent snapshot. Raises StoreError if the database fails."""
        if self._closed:
            raise StoreError("the store is closed")
        try:
            with self._reader_engine.begin() as connection:
                yield connection
        except sa.exc.DBAPIError as error:
            raise StoreError(f"the store cannot be read: {error.orig}") from error

    def cursor(self) -> int:
        """Return a number that changes with any commit by any process, for `wait` of this object only."""
        with self._changed:
            return self._data_version()

    def wait(self, cursor: int, timeout_s: float) -> int:
        """Block until a commit after `cursor`, for at most `timeout_s`, and return the new cursor."""
        deadline = time.monotonic() + timeout_s
        poll_s = _FIRST_POLL_S
        with self._changed:
            while True:
                version = self._data_version()
                left = deadline - time.monotonic()
                if version != cursor or left <= 0 or self._closed:
                    return version
                # Commits of this process notify; those of other processes are found by polling.
                self._changed.wait(min(poll_s, left))
                poll_s = min(poll_s * 1.5, _LAST_POLL_S)

    def close(self) -> None:
        """Commit the queued jobs and close every connection. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._jobs.put(None)
        self._writer.join()
        with self._changed:
            self._watcher.close()
            self._changed.notify_all()
        self._dispose()

    def _data_version(self) -> int:
        if self._watcher.closed:
            return -1
        return cast(int, self._watcher.exec_driver_sql("PRAGMA data_version").scalar_one())

    def _create_or_check(self, url: str) -> None:
        found = self._created_or_found(url)
        if found == str(PREVIOUS_SCHEMA):
            self._writer_engine.dispose()  # the migration needs exclusive access to the file
            migrate(Path(str(sa.make_url(url).database)))
            found = self._created_or_found(url)
        if found != str(SCHEMA_VERSION):
            raise StoreError(
                f"{url} was written with store schema {found}, and this release reads {SCHEMA_VERSION} and "
                f"migrates {PREVIOUS_SCHEMA}; use the release that wrote it, or a new run folder"
            )
        self._add_columns()

    def _created_or_found(self, url: str) -> str | None:
        """Return the schema number of the store; create the tables if there are none."""
        with self._writer_engine.begin() as connection:
            names = set(sa.inspect(connection).get_table_names())
            if not names:
                metadata.create_all(connection)
                connection.execute(
                    sa.insert(store_meta).values(key="schema_version", value=str(SCHEMA_VERSION))
                )
                return str(SCHEMA_VERSION)
            if store_meta.name not in names:
                raise StoreError(
                    f"{url} is not a store of areal-agents (it has the tables {sorted(names)}); "
                    "give another path"
                )
            return connection.execute(
                sa.select(store_meta.c.value).where(store_meta.c.key == "schema_version")
            ).scalar_one_or_none()

    def _add_columns(self) -> None:
        """Add the columns that releases after the one that created the tables write.

        These columns are nullable, so that neither release misreads what the other wrote, and the schema
        keeps its number. Any other change of the schema is a migration.
        """
        with self._writer_engine.begin() as connection:
            inspector = sa.inspect(connection)
            for table in metadata.sorted_tables:
                known = {column["name"] for column in inspector.get_columns(table.name)}
                for column in table.columns:
                    if column.name not in known and column.nullable:
                        kind = column.type.compile(connection.dialect)
                        connection.exec_driver_sql(
                            f'ALTER TABLE {table.name} ADD COLUMN "{column.name}" {kind}'
                        )

    def _write_loop(self) -> None:
        with self._writer_engine.connect() as connection:
            connection = connection.execution_options(isolation_level="AUTOCOMMIT")  # see _transaction
            while (first := self._jobs.get()) is not None:
                batch, ended = self._gather(first)
                self._commit(connection, batch)
                if ended:
                    return

    def _gather(self, first: _Queued) -> tuple[list[_Queued], bool]:
        batch: list[_Queued] = []
        item: _Queued | None = first
        while item is not None:
            batch.append(item)
            if len(batch) == _MAX_BATCH:
                return batch, False
            try:
                item = self._jobs.get_nowait()
            except queue.Empty:
                return batch, False
        return batch, True

    def _commit(self, connection: sa.Connection, batch: list[_Queued]) -> None:
        if not batch:
            return
        try:
            with _transaction(connection):
                results = [_run(job, connection) for job, _ in batch]
        except _JobFailed as failure:
            if len(batch) == 1:
                batch[0][1].set_exception(_translated(failure.error))
                return
            for item in batch:
                self._commit(connection, [item])
            return
        except Exception as error:  # the database itself failed, for example on a full disk; no job caused it
            for _, future in batch:
                future.set_exception(_translated(error))
            return
        with self._changed:
            self._changed.notify_all()
        for (_, future), result in zip(batch, results, strict=True):
            future.set_result(result)

    def _dispose(self) -> None:
        self._writer_engine.dispose()
        self._reader_engine.dispose()


@contextlib.contextmanager
def _transaction(connection: sa.Connection) -> Iterator[None]:
    """Run a write transaction on the driver's connection, at a third of the cost of SQLAlchemy's."""
    driver = driver_of(connection)
    driver.execute("BEGIN IMMEDIATE")
    try:
        yield
        driver.execute("COMMIT")
    except BaseException:
        if driver.in_transaction:  # a full disk may have rolled it back already
            driver.execute("ROLLBACK")
        raise


def driver_of(connection: sa.Connection) -> sqlite3.Connection:
    """Return the driver's connection that SQLAlchemy's connection wraps."""
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    return driver


def store_url(url_or_path: str | Path) -> str:
    """Return the SQLAlchemy URL of a store given as a path or a URL; create the parent folder of a path."""
    text = str(url_or_path)
    if "://" in text:
        return text
    path = Path(text).expanduser().absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{path}"


def store_path(url_or_path: str | Path) -> Path:
    """Return the file of a store given as a path or a URL; its other files are in the same folder."""
    return Path(str(sa.make_url(store_url(url_or_path)).database))


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

    @sa.event.listens_for(engine, "begin")
    def start(connection: sa.Connection) -> None:
        if connection.get_execution_options().get("isolation_level") != "AUTOCOMMIT":
            connection.exec_driver_sql(begin)

    return engine


def _translated(error: Exception) -> Exception:
    if isinstance(error, (sa.exc.DBAPIError, sqlite3.Error)):
        cause = error.orig if isinstance(error, sa.exc.DBAPIError) else error
        translated = StoreError(f"the store refused a write: {cause}")
        translated.__cause__ = error
        return translated
    return error
