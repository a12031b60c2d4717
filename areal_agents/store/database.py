"""The database of a store: one writer thread per process, any number of readers.

Every write is a job, which is a function of a connection. The writer runs all queued jobs in one transaction
that excludes every other writer, and commits once; a job's future resolves only after the commit, so an
acknowledged write survives kill -9. A job must have no effect except through the connection, because it may
run twice: if one job of a batch fails, the batch is rolled back and each job runs again in a transaction of
its own.

Jobs that only add rows which no other such job reads, as turns are, need not exclude one another: a batch of
nothing else may be committed at the same time as such batches of other processes, but never beside another
write.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import sqlalchemy as sa

from areal_agents.errors import StoreError

T = TypeVar("T")
Job = Callable[[sa.Connection], T]
_Queued = tuple[Job[Any], "Future[Any]", bool]  # whether it only adds

_MAX_BATCH = 256
_FIRST_POLL_S, _LAST_POLL_S = 0.002, 0.05


class Backend(Protocol):
    """What SQLite and PostgreSQL do differently."""

    driver_error: type[Exception]  # of the driver, without SQLAlchemy around it

    def open(self) -> None:
        """Connect; create the tables, or check and migrate them. Raises StoreError."""

    def read(self) -> AbstractContextManager[sa.Connection]:
        """Open a connection that sees one consistent snapshot."""

    def query(self, read: Job[T]) -> T:
        """Return the result of a read of one snapshot; it may run again after a lost connection."""

    def write(self, work: Job[T], *, only_adds: bool) -> T:
        """Run `work` in a transaction that excludes all other writers, and commit. One thread calls this.

        With `only_adds` it need not exclude the other writers for which this is true.

        Raises what `work` raises, after a rollback; StoreError or an error of the driver if the database
        fails.
        """

    def write_beside(self, work: Job[T]) -> T:
        """Run `work` in a transaction that the writers neither wait for nor notice, as far as this database
        can; it may run again after a lost connection. Any thread calls this.
        """

    def commits(self) -> int:
        """Return a number that changes with any commit of `write` by any process."""

    def close(self) -> None:
        """Close every connection. Idempotent."""


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
    """An open database. Thread-safe; it must not be used after a fork."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._closed = False
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self._jobs: queue.SimpleQueue[_Queued | None] = queue.SimpleQueue()
        try:
            backend.open()
        except BaseException:
            backend.close()
            raise
        self._writer = threading.Thread(target=self._write_loop, name="store-writer", daemon=True)
        self._writer.start()

    def submit(self, job: Job[T], *, only_adds: bool = False) -> Future[T]:
        """Queue a write. The future resolves after its commit, or with the job's exception.

        Args:
            only_adds: whether the job does no more than to add rows that no other such job reads.
        """
        future: Future[T] = _WriteFuture()
        with self._lock:  # so that no job is queued after the None that closes the queue
            if self._closed:
                raise StoreError("the store is closed")
            self._jobs.put((job, future, only_adds))
        return future

    @contextlib.contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """Open a connection that sees one consistent snapshot. Raises StoreError if the database fails."""
        if self._closed:
            raise StoreError("the store is closed")
        try:
            with self._backend.read() as connection:
                yield connection
        except sa.exc.DBAPIError as error:
            raise StoreError(f"the store cannot be read: {error.orig}") from error

    def query(self, read: Job[T]) -> T:
        """Return the result of a read of one consistent snapshot. Raises StoreError if the database fails."""
        if self._closed:
            raise StoreError("the store is closed")
        try:
            return self._backend.query(read)
        except sa.exc.DBAPIError as error:
            raise StoreError(f"the store cannot be read: {error.orig}") from error

    def write_beside(self, work: Job[T]) -> T:
        """Write what concerns no other writer, without waiting for them. Raises StoreError if that fails."""
        if self._closed:
            raise StoreError("the store is closed")
        try:
            return self._backend.write_beside(work)
        except sa.exc.DBAPIError as error:
            raise StoreError(f"the store refused a write: {error.orig}") from error

    def cursor(self) -> int:
        """Return a number that changes with any commit by any process, for `wait` of this object only."""
        with self._changed:
            return self._commits()

    def wait(self, cursor: int, timeout_s: float) -> int:
        """Block until a commit after `cursor`, for at most `timeout_s`, and return the new cursor."""
        deadline = time.monotonic() + timeout_s
        poll_s = _FIRST_POLL_S
        with self._changed:
            while True:
                commits = self._commits()
                left = deadline - time.monotonic()
                if commits != cursor or left <= 0 or self._closed:
                    return commits
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
            self._backend.close()
            self._changed.notify_all()

    def _commits(self) -> int:
        return -1 if self._closed else self._backend.commits()

    def _write_loop(self) -> None:
        while (first := self._jobs.get()) is not None:
            batch, ended = self._gather(first)
            self._commit(batch)
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

    def _commit(self, batch: list[_Queued]) -> None:
        if not batch:
            return
        try:
            results = self._backend.write(
                lambda connection: [_run(job, connection) for job, _, _ in batch],
                only_adds=all(only_adds for _, _, only_adds in batch),
            )
        except _JobFailed as failure:
            if len(batch) == 1:
                batch[0][1].set_exception(self._translated(failure.error))
                return
            for item in batch:
                self._commit([item])
            return
        except Exception as error:  # the database itself failed, for example on a full disk; no job caused it
            for _, future, _ in batch:
                future.set_exception(self._translated(error))
            return
        with self._changed:
            self._changed.notify_all()
        for (_, future, _), result in zip(batch, results, strict=True):
            future.set_result(result)

    def _translated(self, error: Exception) -> Exception:
        if isinstance(error, (sa.exc.DBAPIError, self._backend.driver_error)):
            cause = error.orig if isinstance(error, sa.exc.DBAPIError) else error
            translated = StoreError(f"the store refused a write: {cause}")
            translated.__cause__ = error
            return translated
        return error


def driver_of(connection: sa.Connection) -> Any:
    """Return the driver's connection that SQLAlchemy's connection wraps."""
    return connection.connection.driver_connection
