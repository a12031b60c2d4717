"""Writes of the trainer: which groups it holds, has trained or has dropped, and its checkpoints.

A lease row stands over the group's own state. Deleting it makes the group complete again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import sqlalchemy as sa

from areal_agents.store.chunks import chunks
from areal_agents.store.errors import Conflict
from areal_agents.store.groups import lock_group
from areal_agents.store.retention import TURNS_GIVEN_UP, is_emptied
from areal_agents.store.schema import checkpoints, groups, leases


def take_groups(connection: sa.Connection, count: int, *, step: int, holder: str) -> list[str]:
    """Lease the `count` oldest complete training groups, all or none; their ids.

    One trainer lives at a time (`TrainerLock`), so a lease of another holder is one of the dead: it is
    void, and its group can be taken again.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    connection.execute(sa.delete(leases).where(leases.c.state == "leased", leases.c.holder != holder))
    ids = list(
        connection.execute(
            sa.select(groups.c.id)
            .where(
                groups.c.state == "complete",
                groups.c.split == "train",
                ~sa.exists().where(leases.c.group_id == groups.c.id),
            )
            .order_by(groups.c.seq)  # not by a time: clocks jump
            .limit(count)
            .with_for_update()
        ).scalars()
    )
    if len(ids) < count:
        return []
    lease = {"state": "leased", "step": step, "holder": holder}
    connection.execute(sa.insert(leases), [{"group_id": group_id, **lease} for group_id in ids])
    return ids


def mark_trained(connection: sa.Connection, group_ids: Iterable[str], *, step: int, version: int) -> None:
    """Note that leased groups were trained in `step` into `version`. Conflict if one is not leased."""
    ids = list(dict.fromkeys(group_ids))
    mark = sa.update(leases).where(leases.c.state == "leased", leases.c.step == step)
    changed = sum(
        connection.execute(
            mark.where(leases.c.group_id.in_(chunk)).values(state="trained", version=version)
        ).rowcount
        for chunk in chunks(ids)
    )
    if changed != len(ids):
        raise Conflict(f"of {len(ids)} groups only {changed} are leased for step {step}: {ids}")


def drop_leased(connection: sa.Connection, group_id: str, reason: str, *, step: int) -> None:
    """Drop a group that is complete or leased. Conflict if it is pending, trained or dropped."""
    group = lock_group(connection, group_id)
    state = connection.execute(
        sa.select(leases.c.state).where(leases.c.group_id == group_id)
    ).scalar_one_or_none()
    if state == "leased":
        connection.execute(
            sa.update(leases)
            .where(leases.c.group_id == group_id)
            .values(state="dropped", step=step, reason=reason)
        )
        return
    if state is not None or group.state != "complete":
        raise Conflict(f"group {group_id} is {state or group.state}, so the trainer cannot drop it")
    connection.execute(
        sa.insert(leases).values(group_id=group_id, state="dropped", step=step, holder="", reason=reason)
    )


def write_checkpoint(connection: sa.Connection, step: int) -> None:
    """Note that the trainer can resume from after `step`. Idempotent."""
    if connection.execute(sa.select(checkpoints.c.step).where(checkpoints.c.step == step)).first() is None:
        connection.execute(sa.insert(checkpoints).values(step=step, created_at=time.time()))


def return_leases(connection: sa.Connection, after_step: int) -> int:
    """Make every group that a later step leased, trained or dropped complete again; how many.

    For a trainer that resumes: what was trained after its checkpoint is lost with its weights, and what
    is only leased was leased by a trainer that is no more. A group whose turns were given up
    (`store.retain`) cannot be trained again: it is dropped.
    """
    connection.execute(sa.delete(checkpoints).where(checkpoints.c.step > after_step))
    lost = sa.or_(leases.c.step > after_step, leases.c.state == "leased")
    connection.execute(
        sa.update(leases)
        .where(lost, is_emptied(leases.c.group_id))
        .values(state="dropped", step=after_step, version=None, reason=TURNS_GIVEN_UP)
    )
    return connection.execute(sa.delete(leases).where(lost)).rowcount
