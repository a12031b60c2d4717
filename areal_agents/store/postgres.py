"""The store in a PostgreSQL database, for the processes of several machines.

A store is a schema of the database, so one database can hold many. Writers exclude one another by an
advisory lock that lasts for a transaction, as BEGIN IMMEDIATE does in SQLite, so both stores behave alike;
those that only add turns share the lock.
Every commit sends a notification, which processes hear that have waited for one. A lost connection, as after
a restart of the server or when a standby takes its place, is opened again: a write whose commit was not
acknowledged is repeated, unless its transaction was committed. Each process counts its commits in the table
`writers`, in the same transactions, so the count tells that on whichever server it is. (The number of a
transaction does not: a standby that did not get it gives the number to another one.)
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any, cast
from urllib.parse import quote

import orjson
import sqlalchemy as sa

from areal_agents.errors import StoreError
from areal_agents.extras import require
from areal_agents.store import migrations
from areal_agents.store.config import Durability
from areal_agents.store.database import Job, T, driver_of
from areal_agents.store.schema import SCHEMA_VERSION, alembic_version

logger = logging.getLogger(__name__)

DEFAULT_SCHEMA = "areal_agents"

_LOST_S = 60.0  # how long the server may be away before a read or a write fails
_FIRST_RETRY_S, _LAST_RETRY_S = 0.05, 1.0
# How long a writer that does nothing, because it is stopped or cut off, keeps the others waiting. Then the
# server rolls its transaction back, and the writer repeats it when it runs again.
_HELD_S = 10.0
_OTHERS_S = 10.0  # longest wait of a migration for other processes to close the store
_LISTEN_S = 1.0  # how often the listening thread looks whether it should end
_EPOCH_S = "extract(epoch FROM clock_timestamp())::double precision"
_WRITER_KEPT_S = 7 * 86_400  # the row of a process that has committed nothing since
_SCHEMA_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_HOSTS = re.compile(
    r"(?P<scheme>[a-z+]+)://(?P<user>[^/?]*@)?(?P<hosts>[^/?@]*)(?P<path>/[^?]*)?(?:\?(?P<query>.*))?"
)
_HOST = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[^:\[\]]+)(?::(?P<port>\d+))?")
# Both sides notice within 25 seconds that the other side, or the network, has gone.
_KEEPALIVE = {
    "keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 25_000,
}  # fmt: skip
_SETTINGS = {
    "tcp_user_timeout": "25s",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "lock_timeout": "60s",
    "idle_in_transaction_session_timeout": "60s",
}

# What a server says to a client that it does not let in, however often the client asks.
_REFUSALS = (
    "no password supplied", "password authentication failed", "no pg_hba.conf entry", "does not exist",
)  # fmt: skip
_ACCESS = "give the password in ~/.pgpass or as PGPASSWORD, and a role and a database that exist"


class PostgresBackend:
    """The connections to a schema of a PostgreSQL database."""

    def __init__(self, url: str, durability: Durability) -> None:
        self._shown = shown(url)
        self._schema = schema_of(url)
        self._engine = engine_of(url)
        self.driver_error = _driver_error()
        self._reader_engine = self._engine.execution_options(
            isolation_level="REPEATABLE READ", postgresql_readonly=True
        )
        self._lock_key = advisory_key(self._schema, "writer")
        self._users_key = advisory_key(self._schema, "users")
        channel = f"areal_agents_{zlib.crc32(self._schema.encode()):08x}"
        self._notify = f"NOTIFY {channel}"
        self._listener = _Listener(self._engine, channel, self._users_key)
        self._writer: sa.Connection | None = None
        self._writer_id = secrets.token_hex(8)
        self._new_writer = (
            f"INSERT INTO writers (id, commits, committed_at) VALUES ('{self._writer_id}', 0, {_EPOCH_S})"
        )
        self._writer_retry = Retry(self._shown)  # of all writes, so that they do not wait one after another
        self._own_commits = 0

    def open(self) -> None:
        """Create the schema and its tables, or check and migrate them. Raises StoreError."""
        try:
            with self._engine.begin() as connection:
                connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({self._lock_key})")
                connection.exec_driver_sql(f'CREATE SCHEMA IF NOT EXISTS "{self._schema}"')
                schema = migrations.created_or_found(connection, self._shown)
                if schema != SCHEMA_VERSION:
                    self._exclude_others(connection)
                    migrations.migrate(connection, schema)
                connection.exec_driver_sql(
                    f"DELETE FROM writers WHERE committed_at < {_EPOCH_S} - {_WRITER_KEPT_S}"
                )
                connection.exec_driver_sql(self._new_writer)
        except sa.exc.DBAPIError as error:
            reason = str(error.orig).strip()
            remedy = f"; {_ACCESS}" if any(refusal in reason for refusal in _REFUSALS) else ""
            raise StoreError(f"cannot open the store {self._shown}: {reason}{remedy}") from error
        self._listener.start()

    @contextlib.contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """Open a connection that sees one consistent snapshot."""
        with self._reader_engine.begin() as connection:
            yield connection

    def query(self, read: Job[T]) -> T:
        """Return the result of a read of one consistent snapshot; it runs again if its connection is lost."""
        retry = Retry(self._shown)
        while True:
            try:
                with self._reader_engine.begin() as connection:
                    return read(connection)
            except sa.exc.OperationalError as error:
                retry.after(error)

    def write(self, work: Job[T], *, only_adds: bool) -> T:
        """Run `work` in a transaction that excludes all other writers, and commit.

        With `only_adds` it shares the writers' lock with the others for which this is true.

        If the connection is lost, `work` runs again in a new transaction, unless the lost one turns out to
        have been committed.
        """
        unanswered: tuple[int, T] | None = None  # commits before one that was sent, and what it did
        while True:
            try:
                if self._writer is None:
                    self._writer = self._connected_writer()
                driver = driver_of(self._writer)
                commits = self._begin(driver, only_adds=only_adds)  # a lost transaction has ended by then
                if unanswered is not None and commits > unanswered[0]:
                    driver.execute(f"ROLLBACK; {self._notify}")
                    return self._done(unanswered[1])
                result = work(self._writer)
                unanswered = (commits, result)
                # The notification is a transaction of its own: those that notify commit one after another.
                driver.execute(
                    f"UPDATE writers SET commits = commits + 1, committed_at = {_EPOCH_S} "
                    f"WHERE id = '{self._writer_id}'; COMMIT; {self._notify}"
                )
                return self._done(result)
            except Exception as error:
                if self._writer is not None and not _is_lost(self._writer):
                    driver_of(self._writer).execute("ROLLBACK")
                    raise
                if self._writer is None and isinstance(error, StoreError):
                    raise
                self._discard_writer()
                self._writer_retry.after(error)

    def write_beside(self, work: Job[T]) -> T:
        """Run `work` in a transaction without the writers' lock, of which no other process is told."""
        retry = Retry(self._shown)
        while True:
            try:
                with self._engine.begin() as connection:
                    return work(connection)
            except sa.exc.OperationalError as error:
                retry.after(error)

    def commits(self) -> int:
        """Return a number that changes with any commit of `write` by any process."""
        self._listener.listen()
        return self._own_commits + self._listener.heard

    def close(self) -> None:
        """Close every connection. Idempotent."""
        self._discard_writer()
        self._listener.close()
        self._engine.dispose()

    def _exclude_others(self, connection: sa.Connection) -> None:
        """Wait until no other process has the store open, and let none open it in this transaction."""
        deadline = time.monotonic() + _OTHERS_S
        lock = f"SELECT pg_try_advisory_xact_lock({self._users_key})"
        while not connection.exec_driver_sql(lock).scalar_one():
            if time.monotonic() >= deadline:
                raise StoreError(
                    f"{self._shown} was written by an earlier release and must be migrated, but another "
                    "process has it open; end every process that uses this store, then start again"
                )
            time.sleep(_FIRST_RETRY_S)

    def _connected_writer(self) -> sa.Connection:
        """Connect. Raises StoreError if a newer release has migrated the store since it was opened."""
        connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        try:
            connection.exec_driver_sql(f"SET idle_in_transaction_session_timeout = '{_HELD_S:g}s'")
            [found] = connection.execute(sa.select(alembic_version.c.version_num)).scalars()
            if found != str(SCHEMA_VERSION):
                raise StoreError(
                    f"a newer release has migrated {self._shown} to store schema {found}, while this process "
                    f"had lost its connection; this release writes {SCHEMA_VERSION}"
                )
        except BaseException:
            connection.close()
            raise
        return connection

    def _discard_writer(self) -> None:
        if self._writer is not None:
            self._writer.invalidate()
            self._writer.close()
            self._writer = None

    def _begin(self, driver: Any, *, only_adds: bool) -> int:
        """Begin a transaction, wait for those that it excludes, and return how many this writer committed.

        Any other transaction of this writer has ended then, because it had locked the row too.
        """
        lock = "pg_advisory_xact_lock_shared" if only_adds else "pg_advisory_xact_lock"
        cursor = driver.execute(
            f"BEGIN; SELECT {lock}({self._lock_key}); "
            f"SELECT commits FROM writers WHERE id = '{self._writer_id}' FOR UPDATE"
        )
        cursor.nextset()
        cursor.nextset()
        if (row := cursor.fetchone()) is not None:
            return cast(int, row[0])
        driver.execute(self._new_writer)  # a standby that was promoted may not have got it
        return 0

    def _done(self, result: T) -> T:
        self._own_commits += 1
        self._writer_retry.succeeded()
        return result


class Retry:
    """How long a server may be away: `after` waits for a while, and in the end raises the error.

    Once it has raised, it raises at every failure until an attempt has `succeeded`.
    """

    def __init__(self, shown: str) -> None:
        self._shown = shown
        self._began: float | None = None
        self._pause_s = _FIRST_RETRY_S

    def succeeded(self) -> None:
        """Forget earlier failures."""
        self._began, self._pause_s = None, _FIRST_RETRY_S

    def after(self, error: Exception) -> None:
        """Wait before the next attempt.

        Raises:
            StoreError: the server has been away for too long, or it answers and refuses the connection.
        """
        now = time.monotonic()
        reason = str(error.orig if isinstance(error, sa.exc.DBAPIError) else error).strip()
        if any(refusal in reason for refusal in _REFUSALS):
            raise StoreError(f"the store {self._shown} cannot be opened: {reason}; {_ACCESS}") from error
        if self._began is None:
            self._began = now
            logger.warning(
                "the connection to the store %s was lost, and is opened again: %s", self._shown, reason
            )
        if now - self._began > _LOST_S:
            raise StoreError(
                f"the store {self._shown} could not be reached for {_LOST_S:.0f} s: {reason}; is its server "
                "running?"
            ) from error
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LAST_RETRY_S)


class _Listener:
    """Counts the notifications of commits, on a thread with a connection of its own.

    The session of this connection also has the lock of the store's users, which a migration waits for. It
    listens only in a process that waits for commits, because each notification costs each listener something.
    """

    def __init__(self, engine: sa.Engine, channel: str, users_key: int) -> None:
        self._engine = engine
        self._channel = channel
        self._users_key = users_key
        self._ended, self._connected = threading.Event(), threading.Event()
        self._wanted, self._listens = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="store-listener", daemon=True)
        self.heard = 0

    def start(self) -> None:
        """Start the thread, and return when its session has the lock, or the server does not answer."""
        self._thread.start()
        self._connected.wait(_LOST_S)

    def listen(self) -> None:
        """Have every later commit heard; if the server does not answer, when it does."""
        if not self._listens.is_set():
            self._wanted.set()
            self._listens.wait(_LISTEN_S)

    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._ended.is_set() or not self._thread.is_alive():
            self._ended.set()
            return
        self._ended.set()
        self._wanted.set()
        with contextlib.suppress(sa.exc.DBAPIError), self._engine.begin() as connection:
            connection.exec_driver_sql(f"NOTIFY {self._channel}")  # so that the thread need not wait
        self._thread.join()

    def _run(self) -> None:
        pause_s = _FIRST_RETRY_S
        while not self._ended.is_set():
            try:
                with self._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                    connection.exec_driver_sql(f"SELECT pg_advisory_lock_shared({self._users_key})")
                    self._connected.set()
                    pause_s = _FIRST_RETRY_S
                    try:
                        self._wait_until_wanted(driver_of(connection))
                        connection.exec_driver_sql(f"LISTEN {self._channel}")
                        self.heard += 1  # there may have been commits while nobody listened
                        self._listens.set()
                        self._listen(driver_of(connection))
                    finally:
                        connection.invalidate()  # no other user of the pool may get a connection that listens
            except Exception as error:
                if not isinstance(error, (sa.exc.DBAPIError, _driver_error())):
                    raise
                logger.debug("the connection that listens for commits was lost: %s", error)
                self._ended.wait(pause_s)
                pause_s = min(2 * pause_s, _LAST_RETRY_S)

    def _wait_until_wanted(self, driver: Any) -> None:
        while not self._wanted.wait(_LISTEN_S):
            for _ in driver.notifies(timeout=0):  # fails if the connection is lost
                pass

    def _listen(self, driver: Any) -> None:
        while not self._ended.is_set():
            for _ in driver.notifies(timeout=_LISTEN_S):
                self.heard += 1
                if self._ended.is_set():
                    return


def is_postgres(url: str) -> bool:
    """Whether a URL names a store in PostgreSQL."""
    return url.startswith(("postgresql:", "postgresql+", "postgres:"))


def parsed_url(url: str) -> sa.URL:
    """Return the parts of a URL, which may name several hosts, as host1:5432,host2:5433 or as libpq does.

    Raises StoreError if it is malformed.
    """
    several = _HOSTS.fullmatch(url)
    if several is not None and "," in several["hosts"]:
        parts = [_HOST.fullmatch(host) for host in several["hosts"].split(",")]
        if None in parts:
            raise StoreError("the hosts of a store's URL must be name:port, with commas between them")
        hosts = ",".join(part["name"].strip("[]") for part in parts if part)
        ports = ",".join(part["port"] or "5432" for part in parts if part)
        query = f"host={quote(hosts)}&port={quote(ports)}"
        rest = several["query"] and f"&{several['query']}"
        url = f"{several['scheme']}://{several['user'] or ''}{several['path'] or ''}?{query}{rest or ''}"
    try:
        return sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError):
        raise StoreError(
            "the URL of the store must be postgresql://user@host:port/database?schema=name"
        ) from None  # the error has the URL, with its password


def shown(url: str) -> str:
    """Return the URL without its passwords."""
    parsed = parsed_url(url)
    hidden = {name: "***" for name in ("password", "sslpassword") if name in parsed.query}
    return parsed.update_query_dict(hidden).render_as_string(hide_password=True)


def has_password(url: str) -> bool:
    """Whether the URL contains a password."""
    parsed = parsed_url(url)
    return bool(parsed.password or parsed.query.get("password") or parsed.query.get("sslpassword"))


def host_of(url: str) -> tuple[str, int]:
    """Return the host and the port of the server; of several, the first."""
    parsed = parsed_url(url)
    if parsed.host:
        return parsed.host, parsed.port or 5432
    host, port = (_first(parsed.query.get(name, "")) for name in ("host", "port"))
    with_port = _HOST.fullmatch(host)
    if with_port is not None and with_port["port"]:
        return with_port["name"].strip("[]"), int(with_port["port"])
    return host or "127.0.0.1", int(port or "5432")


def _first(given: str | tuple[str, ...]) -> str:
    """Return the first of the values of a parameter, which may be repeated or separated by commas."""
    return (given if isinstance(given, str) else given[0]).split(",")[0]


def schema_of(url: str) -> str:
    """Return the name of the schema that is the store. Raises StoreError if it is not a plain name."""
    given = parsed_url(url).query.get("schema", DEFAULT_SCHEMA)
    if not isinstance(given, str) or not _SCHEMA_NAME.fullmatch(given):
        raise StoreError(
            f"schema={given!r} of a store's URL must be one name of lower-case letters, digits and _, of at "
            "most 63 characters"
        )
    return given


def engine_of(url: str, *, is_pooled: bool = True) -> sa.Engine:
    """Return an engine whose connections see the schema of the store.

    Without a pool, each connection ends when it is closed.
    """
    require("psycopg", "a store in PostgreSQL")
    parsed = parsed_url(url)
    query = {name: value for name, value in parsed.query.items() if name not in ("schema", "options")}
    own = {**_SETTINGS, "search_path": schema_of(url)}
    query.setdefault("target_session_attrs", "read-write")  # of several hosts, and never a standby
    given = parsed.query.get("options", "")
    pool: dict[str, Any] = {"poolclass": sa.NullPool}
    if is_pooled:
        pool = {"pool_size": 8, "max_overflow": -1, "pool_pre_ping": True}
    options = " ".join([str(given), *(f"-c {name}={value}" for name, value in own.items())]).strip()
    return sa.create_engine(
        parsed.set(drivername="postgresql+psycopg", query=query),
        connect_args={
            "connect_timeout": 5, "application_name": "areal-agents", "options": options, **_KEEPALIVE,
        },
        json_serializer=lambda value: orjson.dumps(value).decode(),
        json_deserializer=orjson.loads,
        **pool,
    )  # fmt: skip


def schema_exists(url: str) -> bool:
    """Whether there is a store at a URL. Raises StoreError if its server cannot be reached."""
    with _once(url) as connection:
        return schema_of(url) in sa.inspect(connection).get_schema_names()


def rename_schema(url: str, stamp: str) -> str:
    """Set a store aside under a name with `stamp`; return its new URL, without a password.

    Raises StoreError if its server cannot be reached, or refuses.
    """
    old = schema_of(url)
    new = f"{old[:40]}_{stamp}".replace("-", "_")
    with _once(url) as connection:
        connection.exec_driver_sql(f'ALTER SCHEMA "{old}" RENAME TO "{new}"')
    return shown(
        str(parsed_url(url).update_query_dict({"schema": new}).render_as_string(hide_password=False))
    )


@contextlib.contextmanager
def _once(url: str) -> Iterator[sa.Connection]:
    """Open a connection for one transaction."""
    try:
        with engine_of(url, is_pooled=False).begin() as connection:
            yield connection
    except sa.exc.DBAPIError as error:
        raise StoreError(f"the store {shown(url)} cannot be reached: {error.orig}") from error


def advisory_key(schema: str, purpose: str) -> int:
    """Return the number of an advisory lock of a store, which is the same in every process."""
    return (zlib.crc32(purpose.encode()) << 31) ^ zlib.crc32(schema.encode())


def _is_lost(connection: sa.Connection) -> bool:
    """Whether a connection is lost, as SQLAlchemy or the driver has noticed."""
    if connection.closed or connection.invalidated:
        return True
    driver = driver_of(connection)
    return bool(driver.closed or driver.broken)


def _driver_error() -> type[Exception]:
    import psycopg  # of the extra `postgres`

    return psycopg.Error
