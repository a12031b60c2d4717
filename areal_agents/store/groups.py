"""Writes of the proxy: groups. A group is complete once as many episodes as its size says are
sealed and rewarded; that is decided in the transaction which seals or rewards the last of them, and
which aborts what the group has beyond (over-sampling). So a group never has more members than its size.
"""

from __future__ import annotations

import time

import sqlalchemy as sa

from areal_agents.store.errors import Conflict, NotFound
from areal_agents.store.rows import LIVE, SCORED
from areal_agents.store.schema import episodes, groups, leases, rewards

SURPLUS = "its group was complete without it"
_ENDED = episodes.c.status.in_(SCORED)


def group_row(connection: sa.Connection, group_id: str) -> sa.Row:
    """The row of a group; NotFound if there is none. No other writer changes it in this transaction."""
    row = connection.execute(sa.select(groups).where(groups.c.id == group_id)).one_or_none()
    if row is None:
        raise NotFound(f"no group {group_id}")
    return row


def complete_if_scored(connection: sa.Connection, group_id: str) -> bool:
    """Make a pending group complete if it has as many scored episodes as its size says; whether it is now."""
    group = group_row(connection, group_id)
    if group.state != "pending":
        return False
    scored = connection.execute(
        sa.select(sa.func.count())
        .select_from(episodes)
        .where(
            episodes.c.group_id == group_id,
            _ENDED,
            sa.exists().where(rewards.c.episode_id == episodes.c.id),
        )
    ).scalar_one()
    if scored < group.size:
        return False
    now = time.time()
    connection.execute(
        sa.update(groups).where(groups.c.id == group_id).values(state="complete", completed_at=now)
    )
    _abort_surplus(connection, group_id, now)
    return True


def _abort_surplus(connection: sa.Connection, group_id: str, now: float) -> None:
    """Seal what a group that is complete has beyond its size: none of it ever becomes a member."""
    scored = sa.exists().where(rewards.c.episode_id == episodes.c.id)
    connection.execute(
        sa.update(episodes)
        .where(episodes.c.group_id == group_id, episodes.c.status.in_(LIVE), ~(_ENDED & scored))
        .values(
            status="aborted",
            error=SURPLUS,
            ended_at=sa.func.coalesce(episodes.c.ended_at, now),
        )
    )


def drop_group(connection: sa.Connection, group_id: str, reason: str) -> None:
    """Give a group up for good. Conflict if the trainer holds or has trained it; else idempotent."""
    group = group_row(connection, group_id)
    lease = connection.execute(
        sa.select(leases.c.state).where(leases.c.group_id == group_id, leases.c.use == 0)
    ).scalar_one_or_none()
    if lease is not None:
        raise Conflict(f"group {group_id} is {lease}: only the trainer can drop it now")
    if group.state != "dropped":
        connection.execute(
            sa.update(groups).where(groups.c.id == group_id).values(state="dropped", reason=reason)
        )
