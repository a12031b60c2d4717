"""Deletes episodes with everything that was recorded of them, so that nothing of it stays in the file.

SQLite overwrites deleted rows with zeros (`secure_delete`), and its log, which has copies of changed pages,
is emptied afterwards. PostgreSQL keeps deleted rows until the tables are vacuumed, and their bytes in unused
space of its pages until something else is written there, unless the tables are rewritten. What the trainer
needs to know of a group that it took stays: its id, its step and its version, without any text.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import sqlalchemy as sa

from areal_agents.errors import StoreError
from areal_agents.store.chunks import chunks
from areal_agents.store.database import driver_of
from areal_agents.store.errors import Conflict
from areal_agents.store.postgres import engine_of, is_postgres, shown
from areal_agents.store.rows import SCORED
from areal_agents.store.schema import episodes, groups, leases, rewards, tasks, turns
from areal_agents.store.urls import store_path

DELETED = "an episode of it was deleted"

_BUSY_S, _POLL_S = 5.0, 0.05


def delete_episodes(connection: sa.Connection, ids: Sequence[str]) -> list[str]:
    """Delete episodes with their turns and rewards, and return the ids of those that existed.

    A group that lacks an episode now is not trained on any more. Raises Conflict if one is still open.
    """
    deleted: list[str] = []
    if connection.dialect.name == "sqlite":
        driver_of(connection).execute("PRAGMA secure_delete=ON")
    for chunk in chunks(ids):
        found = connection.execute(
            sa.select(episodes.c.id, episodes.c.group_id, episodes.c.task_uid, episodes.c.status).where(
                episodes.c.id.in_(chunk)
            )
        ).all()
        if still_open := [row.id for row in found if row.status == "open"]:
            raise Conflict(f"episode {still_open[0]} is open: end it before it is deleted")
        known = [row.id for row in found]
        connection.execute(sa.delete(rewards).where(rewards.c.episode_id.in_(known)))
        connection.execute(sa.delete(turns).where(turns.c.episode_id.in_(known)))
        connection.execute(sa.delete(episodes).where(episodes.c.id.in_(known)))
        _end_groups(connection, sorted({row.group_id for row in found if row.group_id is not None}))
        _delete_unused_tasks(connection, sorted({row.task_uid for row in found}))
        deleted += known
    return deleted


def clear(url: str, timeout_s: float, *, is_alone: bool) -> None:
    """Remove what the database keeps of deleted rows; other processes may have the store open.

    Args:
        is_alone: whether no other process uses the store, so that the tables of a store in PostgreSQL can be
            rewritten, for which they are locked. Otherwise bytes of deleted rows may stay in unused space.

    Raises:
        StoreError: a reader holds an old snapshot for longer than `timeout_s`, or the database failed.
    """
    if not is_postgres(url):
        clear_log(store_path(url), timeout_s)
        return
    names = ", ".join(table.name for table in (turns, rewards, episodes, groups, tasks))
    engine = engine_of(url, is_pooled=False).execution_options(isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as connection:
            _wait_for_snapshots(connection, timeout_s)
            how = "FULL" if is_alone else "INDEX_CLEANUP ON"
            connection.exec_driver_sql(f"VACUUM ({how}, ANALYZE) {names}")
    except sa.exc.DBAPIError as error:
        raise StoreError(
            f"the rows are deleted, but the store {shown(url)} could not be vacuumed: {error.orig}; try again"
        ) from error


def _wait_for_snapshots(connection: sa.Connection, timeout_s: float) -> None:
    """Wait until no transaction sees rows that were deleted before this call. Raises StoreError."""
    now = connection.exec_driver_sql("SELECT pg_current_xact_id()::xid::text").scalar_one()
    older = (
        "SELECT count(*) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
        "AND (datname = current_database() OR datname IS NULL) AND age(backend_xmin) > age(%(now)s::xid)"
    )
    deadline = time.monotonic() + timeout_s
    while connection.exec_driver_sql(older, {"now": now}).scalar_one():
        if time.monotonic() > deadline:
            raise StoreError(
                "the rows are deleted, but not yet vacuumed, because the store has been read by one "
                f"transaction for {timeout_s:g} s; deleted text may be in its files until then: try again"
            )
        time.sleep(_POLL_S)


def clear_log(path: Path, timeout_s: float) -> None:
    """Write the log of a SQLite store into its file and empty it; other processes may have the store open.

    Raises StoreError if a reader holds an old snapshot for longer than `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    with closing(sqlite3.connect(path, timeout=_BUSY_S)) as connection:
        while True:
            busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if not busy:
                return
            if time.monotonic() > deadline:
                raise StoreError(
                    f"the log of the store could not be emptied within {timeout_s:g} s, because it is being "
                    "read; deleted text may be in it until then: try again"
                )
            time.sleep(_POLL_S)


def is_cut(group_id: sa.ColumnElement[str]) -> sa.ColumnElement[bool]:
    """Whether episodes of a group that was complete were deleted."""
    left = sa.select(sa.func.count()).where(episodes.c.group_id == groups.c.id, episodes.c.status.in_(SCORED))
    return sa.exists().where(groups.c.id == group_id, groups.c.size > left.scalar_subquery())


def _end_groups(connection: sa.Connection, ids: Sequence[str]) -> None:
    """Drop the groups that the trainer has not taken; of those without episodes only what it needs stays."""
    has_lease = sa.exists().where(leases.c.group_id == groups.c.id)
    of_these = groups.c.id.in_(ids)
    is_empty = ~sa.exists().where(episodes.c.group_id == groups.c.id)
    connection.execute(sa.delete(groups).where(of_these, is_empty, ~has_lease))
    connection.execute(
        sa.update(groups)
        .where(of_these, ~has_lease, groups.c.state != "dropped")
        .values(state="dropped", reason=DELETED)
    )
    emptied = connection.execute(sa.select(groups.c.id).where(of_these, is_empty)).scalars().all()
    if not emptied:
        return
    if connection.execute(sa.select(tasks.c.uid).where(tasks.c.uid == "deleted")).first() is None:
        connection.execute(sa.insert(tasks).values(uid="deleted", id="deleted", input={}))
    connection.execute(sa.update(groups).where(groups.c.id.in_(emptied)).values(task_uid="deleted"))


def _delete_unused_tasks(connection: sa.Connection, uids: Sequence[str]) -> None:
    used = sa.or_(
        sa.exists().where(episodes.c.task_uid == tasks.c.uid),
        sa.exists().where(groups.c.task_uid == tasks.c.uid),
    )
    connection.execute(sa.delete(tasks).where(tasks.c.uid.in_(uids), ~used))
