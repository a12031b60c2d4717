"""Migrates a store of the previous schema to the current one.

A migration is one transaction on the only connection to the file. A store is therefore migrated as a whole or
not at all, and a process of the previous release never finds tables that it does not know.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path

from areal_agents.errors import StoreError

PREVIOUS_SCHEMA = 3

_WAIT_S = 10.0  # longest wait for other processes to close the file
_POLL_S = 0.05
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)

# Schema 4: a group may be leased several times, so the key of a lease is the group and the number of the use.
_STATEMENTS = (
    "ALTER TABLE leases RENAME TO leases_of_schema_3",
    "DROP INDEX leases_by_state",
    "DROP INDEX leases_by_step",
    """CREATE TABLE leases (
        group_id TEXT NOT NULL,
        "use" INTEGER NOT NULL,
        state TEXT NOT NULL,
        step INTEGER NOT NULL,
        holder TEXT NOT NULL,
        version INTEGER,
        reason TEXT,
        PRIMARY KEY (group_id, "use"),
        FOREIGN KEY(group_id) REFERENCES groups (id)
    )""",
    """INSERT INTO leases (group_id, "use", state, step, holder, version, reason)
        SELECT group_id, 0, state, step, holder, version, reason FROM leases_of_schema_3""",
    "DROP TABLE leases_of_schema_3",
    "CREATE INDEX leases_by_state ON leases (state)",
    "CREATE INDEX leases_by_step ON leases (step)",
    "UPDATE store_meta SET value = '4' WHERE key = 'schema_version'",
)


def migrate(path: Path) -> None:
    """Migrate the store in `path` if it has the previous schema.

    The caller must have no connection to the file.

    Raises:
        StoreError: another process has the store open, or the database failed. The store is then unchanged.
    """
    deadline = time.monotonic() + _WAIT_S
    while True:
        try:
            if _has_previous_schema(path):
                _migrate_alone(path)
            return
        except sqlite3.Error as error:
            if error.sqlite_errorcode & 0xFF not in _BUSY:
                raise StoreError(
                    f"cannot migrate the store {path} from schema {PREVIOUS_SCHEMA}: {error}; it is unchanged"
                ) from error
            if time.monotonic() >= deadline:
                raise StoreError(
                    f"{path} was written with store schema {PREVIOUS_SCHEMA} and must be migrated, but "
                    "another process has it open; end every process that uses this store, then start again"
                ) from error
        time.sleep(_POLL_S)


def _has_previous_schema(path: Path) -> bool:
    # Another process of this release may have migrated the store in the meantime and have it open.
    with contextlib.closing(sqlite3.connect(path, timeout=_POLL_S, isolation_level=None)) as connection:
        return _schema(connection) == str(PREVIOUS_SCHEMA)


def _migrate_alone(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as connection:
        # Set before the first access, this mode locks the file against all other connections, including those
        # without a transaction, or fails with SQLITE_BUSY. Closing the connection releases the lock.
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        connection.execute("BEGIN EXCLUSIVE")
        if _schema(connection) == str(PREVIOUS_SCHEMA):
            for statement in _STATEMENTS:
                connection.execute(statement)
        connection.execute("COMMIT")


def _schema(connection: sqlite3.Connection) -> str:
    [(found,)] = connection.execute("SELECT value FROM store_meta WHERE key = 'schema_version'")
    return str(found)
