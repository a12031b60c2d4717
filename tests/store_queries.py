"""Queries of tests on a store that its public methods do not offer."""

from __future__ import annotations

import sqlalchemy as sa

from areal_agents.core.rollout import RolloutGroup
from areal_agents.store import Store
from areal_agents.store.rows import LIVE
from areal_agents.store.schema import checkpoints, episodes, groups, leases


def lease_groups(store: Store, count: int, *, step: int) -> list[RolloutGroup]:
    """Lease groups as `Store.lease_group_ids` does, and load them."""
    ids = store.lease_group_ids(count, step=step)
    return store.load_groups(ids) if ids else []


def latest_checkpoint(store: Store) -> int | None:
    """Return the step of the newest checkpoint, or None if there is none."""
    with store._database.read() as connection:
        return connection.execute(sa.select(sa.func.max(checkpoints.c.step))).scalar_one()


def in_flight_episodes(store: Store) -> int:
    """Return the number of training episodes that are submitted and not yet trained, failed or dropped."""
    untrained = sa.select(groups.c.id).where(
        groups.c.state.in_(("pending", "complete")),
        groups.c.split == "train",
        ~sa.exists().where(leases.c.group_id == groups.c.id, leases.c.use == 0, leases.c.state != "leased"),
    )
    query = sa.select(sa.func.count()).where(episodes.c.status.in_(LIVE), episodes.c.group_id.in_(untrained))
    with store._database.read() as connection:
        return connection.execute(query).scalar_one()
