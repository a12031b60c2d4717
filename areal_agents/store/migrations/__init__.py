"""Creates the tables of a store, or brings those of an earlier release to the current schema.

The revisions in versions/ are the numbers of the schema, and Alembic's table in the store says which one it
has. All revisions that a store lacks run in one transaction of the caller, so a store is migrated as a whole
or not at all. A new store gets the tables of `schema.py` at once; a test holds that both ways lead to the
same tables.
"""

from __future__ import annotations

import threading
from pathlib import Path

import sqlalchemy as sa

from areal_agents.errors import StoreError
from areal_agents.store.schema import SCHEMA_VERSION, alembic_version, metadata, store_meta

OLDEST_SCHEMA = 3  # that is migrated
FOLDER = Path(__file__).parent

_FIRST_OF_ALEMBIC = 5
_ONE_AT_A_TIME = threading.Lock()  # Alembic keeps the migration under way in a global of the process


def created_or_found(connection: sa.Connection, shown: str) -> int:
    """Return the schema of the store; create the tables if there are none.

    Args:
        shown: the store's name for messages.

    Raises:
        StoreError: the database has tables that are not those of a store, or the store is of a release that
            is newer than this one, or too old.
    """
    names = set(sa.inspect(connection).get_table_names())
    if not names:
        metadata.create_all(connection)
        _write_release_mark(connection)
        _write_schema(connection, SCHEMA_VERSION)
        return SCHEMA_VERSION
    if store_meta.name not in names:
        raise StoreError(
            f"{shown} is not a store of areal-agents (it has the tables {sorted(names)}); give another path"
        )
    return checked(schema_of_store(connection, names), shown)


def schema_of_store(connection: sa.Connection, tables: set[str]) -> str | None:
    """Return the schema of a store with these tables, which need not be a number that this release knows."""
    if alembic_version.name in tables:
        return connection.execute(sa.select(alembic_version.c.version_num)).scalar_one_or_none()
    return connection.execute(
        sa.select(store_meta.c.value).where(store_meta.c.key == "schema_version")
    ).scalar_one_or_none()


def checked(schema: str | None, shown: str) -> int:
    """Return the number of a schema. Raises StoreError if this release can neither read nor migrate it."""
    number = int(schema) if schema is not None and schema.isdecimal() else None
    if number is None or number > SCHEMA_VERSION:
        raise StoreError(
            f"{shown} was written by a newer release, with store schema {schema}, and this release reads "
            f"{SCHEMA_VERSION}; use the release that wrote it, or a new run folder or store"
        )
    if number < OLDEST_SCHEMA:
        raise StoreError(
            f"{shown} was written with store schema {number}, and this release reads {SCHEMA_VERSION} and "
            f"migrates {OLDEST_SCHEMA} and later ones; use the release that wrote it, or a new run folder or "
            "store"
        )
    return number


def migrate(connection: sa.Connection, schema: int) -> None:
    """Migrate a store from `schema` to the current one, in the transaction of the connection.

    No other process may have the store open.
    """
    from alembic import command  # costs a quarter of a second, which a store of this release need not pay
    from alembic.config import Config

    if schema < _FIRST_OF_ALEMBIC:
        _write_schema(connection, schema)
    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(FOLDER).replace("%", "%%"))
    with _ONE_AT_A_TIME:
        command.upgrade(config, "head")


def _write_schema(connection: sa.Connection, schema: int) -> None:
    alembic_version.create(connection)
    connection.execute(sa.insert(alembic_version).values(version_num=str(schema)))


def _write_release_mark(connection: sa.Connection) -> None:
    """Write what releases before Alembic look at, so that they refuse the store; it never changes again."""
    connection.execute(sa.insert(store_meta).values(key="schema_version", value=str(_FIRST_OF_ALEMBIC)))
