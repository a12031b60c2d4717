"""Writes of the proxy to the table of groups.

A group is complete when as many of its episodes as its size are sealed and rewarded. The transaction that
seals or rewards the last of them decides this and aborts the surplus episodes (over-sampling), so a group
never has more members than its size.
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
    """Return the row of a group, which no other writer changes in this transaction. Raises NotFound."""
    row = connection.execute(sa.select(groups).where(groups.c.id == group_id)).one_or_none()
    if row is None:
        raise NotFound(f"no group {group_id}")
    return row


def claim_group(connection: sa.Connection, group_id: str, expected: str | None, runner: str | None) -> bool:
    """Make `runner` the rollout process of a pending group if `expected` is; return whether it has it now."""
    changed = connection.execute(
        sa.update(groups)
        .where(
            groups.c.id == group_id,
            groups.c.state == "pending",
            groups.c.runner.is_not_distinct_from(expected) | groups.c.runner.is_not_distinct_from(runner),
        )
        .values(runner=runner)
    )
    return changed.rowcount == 1


def complete_if_scored(connection: sa.Connection, group_id: str) -> bool:
    """Make a pending group complete if it has enough scored episodes; return whether it became complete."""
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
    """Abort the live episodes of a complete group that are not among its members."""
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
    """Drop a group for good; idempotent. Raises Conflict if the trainer holds or has trained it."""
    group = group_row(connection, group_id)
    lease = connection.execute(
        sa.select(leases.c.state).where(leases.c.group_id == group_id, leases.c.use == 0)
    ).scalar_one_or_none()
    if lease is not None:
        raise Conflict(f"group {group_id} is {lease}, so only the trainer can drop it")
    if group.state != "dropped":
        connection.execute(
            sa.update(groups).where(groups.c.id == group_id).values(state="dropped", reason=reason)
        )
