"""Reads of the training groups that are not trained yet: those to be leased, to be trained, or abandoned."""

from __future__ import annotations

import sqlalchemy as sa

from areal_agents.core.rollout import OPENED_BY_RUNNER
from areal_agents.store.rows import SCORED, UntrainedGroup, WaitingGroup
from areal_agents.store.schema import episodes, groups, leases, rewards, versions

_TRAINING = sa.and_(groups.c.split == "train", groups.c.state.in_(("pending", "complete")))


def waiting_groups(connection: sa.Connection) -> list[WaitingGroup]:
    """Return the training groups that are pending, or complete and not leased, in the order of submission."""
    # A resume publishes a step that is earlier than that of the versions before it.
    oldest = (
        sa.select(versions.c.version)
        .where(versions.c.version >= groups.c.version)
        .order_by(versions.c.step, versions.c.version)
        .limit(1)
        .scalar_subquery()
    )
    query = sa.select(
        groups.c.id, groups.c.state, sa.func.coalesce(oldest, groups.c.version, 0).label("version")
    ).where(_TRAINING, ~sa.exists().where(leases.c.group_id == groups.c.id, leases.c.use == 0))
    return [WaitingGroup(*row) for row in connection.execute(query.order_by(groups.c.seq))]


def untrained_groups(connection: sa.Connection) -> list[UntrainedGroup]:
    """Return the training groups that are neither trained nor dropped, in the order of submission."""
    done = sa.exists().where(leases.c.group_id == groups.c.id, leases.c.use == 0, leases.c.state != "leased")
    is_pending = (groups.c.state == "pending").label("is_pending")
    query = sa.select(groups.c.id, is_pending, groups.c.runner).where(_TRAINING, ~done)
    return [
        UntrainedGroup(row.id, bool(row.is_pending), row.runner)
        for row in connection.execute(query.order_by(groups.c.seq))
    ]


def runners(connection: sa.Connection) -> set[str]:
    """Return the rollout processes, of several, that play the pending training groups."""
    query = sa.select(groups.c.runner).where(groups.c.split == "train", groups.c.state == "pending")
    return set(connection.execute(query.where(groups.c.runner.is_not(None)).distinct()).scalars())


def groups_begun(connection: sa.Connection, after: int) -> list[tuple[int, str]]:
    """Return (seq, id) of the training groups that were begun after the one with number `after`, in order."""
    query = sa.select(groups.c.seq, groups.c.id).where(groups.c.split == "train", groups.c.seq > after)
    return [(seq, group_id) for seq, group_id in connection.execute(query.order_by(groups.c.seq))]


def abandoned_groups(connection: sa.Connection) -> list[str]:
    """Return the pending training groups that no runner submitted and that have no active episode.

    An episode is active if it is open or waits for its reward. The order is that of submission.
    """
    is_of_runner = sa.and_(
        *(episodes.c.metadata[key].as_string() == value for key, value in OPENED_BY_RUNNER.items())
    )
    is_rewarded = sa.exists().where(rewards.c.episode_id == episodes.c.id)
    is_active = (episodes.c.status == "open") | (episodes.c.status.in_(SCORED) & ~is_rewarded)
    query = sa.select(groups.c.id).where(
        groups.c.split == "train",
        groups.c.state == "pending",
        groups.c.runner.is_(None),
        ~sa.exists().where(episodes.c.group_id == groups.c.id, is_of_runner | is_active),
    )
    return list(connection.execute(query.order_by(groups.c.seq)).scalars())
