"""Deletes the texts and tokens of the turns of groups that no resume can train again.

The rows of the turns remain, with all their counts: only the blobs are deleted, and `codec` is set to
`EMPTIED`. A group expires when the trainer has trained or dropped it in a step that is covered by two
checkpoints (so the newest one may be lost) and that is older than the versions to be kept. For a group that
was reused, this is the step of its last use, so nothing is deleted of a group that is leased for reuse.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from areal_agents.store.chunks import chunks
from areal_agents.store.codec import EMPTIED
from areal_agents.store.database import driver_of
from areal_agents.store.schema import checkpoints, episodes, leases, turns, versions

TURNS_GIVEN_UP = "its turns were deleted (store.retain)"

_SPARE_PAGES = 4096  # free pages that stay in the file for the next turns: 16 MiB in pages of 4 KiB
_MOST_RETURNED = 4096  # the most pages that one transaction returns to the disk


def is_emptied(group_id: sa.ColumnElement[str]) -> sa.ColumnElement[bool]:
    """Whether turns of a group were deleted."""
    return sa.exists().where(
        episodes.c.group_id == group_id, turns.c.episode_id == episodes.c.id, turns.c.codec == EMPTIED
    )


def is_last_use() -> sa.ColumnElement[bool]:
    """Whether a row of `leases` is the last use of its group."""
    later = leases.alias()
    return ~sa.exists().where(later.c.group_id == leases.c.group_id, later.c.use > leases.c.use)


def expired_groups(
    connection: sa.Connection, *, keep_versions: int, after_step: int, limit: int
) -> list[tuple[str, int]]:
    """Return (group, step of its last use) of expired groups that still have turns.

    They are those of the oldest steps after `after_step`, at most `limit`.
    """
    query = (
        sa.select(leases.c.group_id, leases.c.step)
        .where(_is_expired(keep_versions), leases.c.step > after_step, _has_turns(leases.c.group_id))
        .order_by(leases.c.step, leases.c.group_id)
        .limit(limit)
    )
    return [(row[0], row[1]) for row in connection.execute(query)]


def empty_groups(connection: sa.Connection, ids: Sequence[str], *, keep_versions: int) -> int:
    """Delete the turns of those of the groups that are (still) expired; return the number of turns."""
    emptied = 0
    for chunk in chunks(ids):
        chosen = (
            sa.select(episodes.c.id)
            .join(leases, leases.c.group_id == episodes.c.group_id)
            .where(leases.c.group_id.in_(chunk), _is_expired(keep_versions))
        )
        emptied += connection.execute(
            sa.update(turns)
            .where(turns.c.episode_id.in_(chosen), turns.c.codec != EMPTIED)
            .values(codec=EMPTIED, **_NO_BLOBS)
        ).rowcount
    return emptied


def return_space(connection: sa.Connection) -> int:
    """Return a bounded number of free pages of a SQLite file to the disk; return how many.

    Some free pages are kept for the next turns. A file that was created without auto_vacuum cannot return
    pages; it only stops growing. PostgreSQL returns its space by itself.
    """
    if connection.dialect.name != "sqlite":
        return 0
    free = int(connection.exec_driver_sql("PRAGMA freelist_count").scalar_one())
    returned = min(free - _SPARE_PAGES, _MOST_RETURNED)
    if returned <= 0:
        return 0
    driver = driver_of(connection)
    for _ in range(returned):
        # The driver makes one step of the statement, which frees one page, whatever the number.
        driver.execute("PRAGMA incremental_vacuum(1)")
    return free - int(connection.exec_driver_sql("PRAGMA freelist_count").scalar_one())


def return_all_space(connection: sa.Connection) -> None:
    """Return all free pages of a SQLite file to the disk, as far as it was created with auto_vacuum."""
    if connection.dialect.name != "sqlite":
        return
    driver = driver_of(connection)
    for _ in range(int(connection.exec_driver_sql("PRAGMA freelist_count").scalar_one())):
        driver.execute("PRAGMA incremental_vacuum(1)")


def _is_expired(keep_versions: int) -> sa.ColumnElement[bool]:
    last = sa.select(versions.c.step).order_by(versions.c.version.desc()).limit(keep_versions).subquery()
    first_kept = sa.select(sa.func.min(last.c.step)).scalar_subquery()
    safe = sa.select(checkpoints.c.step).order_by(checkpoints.c.step.desc()).limit(1).offset(1)
    return sa.and_(
        is_last_use(),
        leases.c.state.in_(("trained", "dropped")),
        leases.c.step < first_kept,
        leases.c.step <= safe.scalar_subquery(),  # null, and so never true, with fewer than two checkpoints
    )


def _has_turns(group_id: sa.ColumnElement[str]) -> sa.ColumnElement[bool]:
    return sa.exists().where(
        episodes.c.group_id == group_id, turns.c.episode_id == episodes.c.id, turns.c.codec != EMPTIED
    )


_NO_BLOBS = {
    column.name: None if column.nullable else b""
    for column in turns.c
    if isinstance(column.type, sa.LargeBinary)
}
