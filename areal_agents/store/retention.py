"""Deletes the messages and tokens of groups that no resumed run can need again.

The rows stay, with everything that is counted: only their blobs go, and `codec` says so. A group is
given up when the trainer is done with it, by a step that two checkpoints have passed (so the newest one
may be lost), and whose version is older than those to be kept. Of a group that was reused, that step is the
one of its last use, so nothing is given up of a group that is leased for reuse.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from areal_agents.store.chunks import chunks
from areal_agents.store.codec import EMPTIED
from areal_agents.store.database import driver_of
from areal_agents.store.schema import checkpoints, episodes, leases, turns, versions

TURNS_GIVEN_UP = "its turns are no longer kept (store.retain)"

_SPARE_PAGES = 4096  # that stay in the file for the next turns: 16 MiB of pages of 4 KiB
_MOST_RETURNED = 4096  # pages that go back to the disk in one transaction


def is_emptied(group_id: sa.ColumnElement[str]) -> sa.ColumnElement[bool]:
    """Whether the turns of a group were given up."""
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
    """(group, step of its last use) of the oldest steps after `after_step` whose turns can be given up and
    were not yet."""
    query = (
        sa.select(leases.c.group_id, leases.c.step)
        .where(_is_expired(keep_versions), leases.c.step > after_step, _has_turns(leases.c.group_id))
        .order_by(leases.c.step, leases.c.group_id)
        .limit(limit)
    )
    return [(row[0], row[1]) for row in connection.execute(query)]


def empty_groups(connection: sa.Connection, ids: Sequence[str], *, keep_versions: int) -> int:
    """Give up the turns of those groups that (still) may be; how many turns."""
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
    """Give pages of the file that nothing needs back to the disk, a bounded number; how many.

    Some are left for the next turns. A store of a release before this one cannot: its file stops growing.
    """
    free = int(connection.exec_driver_sql("PRAGMA freelist_count").scalar_one())
    returned = min(free - _SPARE_PAGES, _MOST_RETURNED)
    if returned <= 0:
        return 0
    driver = driver_of(connection)
    for _ in range(returned):
        driver.execute(
            "PRAGMA incremental_vacuum(1)"
        )  # the driver makes one step, so one page, of any number
    return free - int(connection.exec_driver_sql("PRAGMA freelist_count").scalar_one())


def _is_expired(keep_versions: int) -> sa.ColumnElement[bool]:
    last = sa.select(versions.c.step).order_by(versions.c.version.desc()).limit(keep_versions).subquery()
    first_kept = sa.select(sa.func.min(last.c.step)).scalar_subquery()
    safe = sa.select(checkpoints.c.step).order_by(checkpoints.c.step.desc()).limit(1).offset(1)
    return sa.and_(
        is_last_use(),
        leases.c.state.in_(("trained", "dropped")),
        leases.c.step < first_kept,
        leases.c.step <= safe.scalar_subquery(),  # null, so never, with fewer than two checkpoints
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
