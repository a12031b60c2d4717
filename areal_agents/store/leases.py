"""Writes of the trainer: the groups that it has leased, trained or dropped, and its checkpoints.

The lease row of use 0 takes precedence over the group's own state. Deleting it makes the group complete
again. The rows of further uses belong to the replay buffer: each (group, use) is leased and trained at most
once, and a reuse does not affect the group's state.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence

import sqlalchemy as sa

from areal_agents.store.chunks import chunks
from areal_agents.store.codec import EMPTIED
from areal_agents.store.deletion import DELETED, is_cut
from areal_agents.store.errors import Conflict
from areal_agents.store.groups import group_row
from areal_agents.store.retention import TURNS_GIVEN_UP, is_emptied, is_last_use
from areal_agents.store.rows import SCORED
from areal_agents.store.schema import checkpoints, episodes, groups, leases, turns, versions


def take_groups(connection: sa.Connection, count: int, *, step: int, holder: str) -> list[str]:
    """Lease the `count` oldest complete training groups, or none if there are fewer; return their ids.

    There is one trainer at a time (`TrainerLock`), so a lease of another holder belongs to a trainer that has
    ended: it is void, and its group can be leased again.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    _void_leases_of_others(connection, holder)
    ids = list(
        connection.execute(
            sa.select(groups.c.id)
            .where(
                groups.c.state == "complete",
                groups.c.split == "train",
                ~sa.exists().where(leases.c.group_id == groups.c.id, leases.c.use == 0),
            )
            .order_by(groups.c.seq)  # not by a time, because clocks can jump
            .limit(count)
        ).scalars()
    )
    if len(ids) < count:
        return []
    _insert_leases(connection, [(group_id, 0) for group_id in ids], step=step, holder=holder)
    return ids


def take_replays(
    connection: sa.Connection, count: int, *, step: int, min_version: int, max_uses: int, holder: str
) -> list[tuple[str, int]]:
    """Lease up to `count` trained groups once more; return their (group, use). See `Store.lease_replays`."""
    if count < 1 or max_uses < 1:
        raise ValueError(f"count and max_uses must be at least 1, got {count} and {max_uses}")
    _void_leases_of_others(connection, holder)
    turn_of_group = (
        episodes.c.group_id == leases.c.group_id,
        episodes.c.status.in_(SCORED),
        turns.c.episode_id == episodes.c.id,
    )
    is_stale = sa.exists().where(*turn_of_group, turns.c.version_min < min_version)
    is_held = sa.exists().where(*turn_of_group, turns.c.version_min >= min_version, turns.c.codec != EMPTIED)
    # A group is trained after a version above those of all its tokens was published. This bound therefore
    # excludes stale groups only, and does so by an index.
    earliest = sa.select(sa.func.min(versions.c.step)).where(versions.c.version > min_version)
    found = connection.execute(
        sa.select(leases.c.group_id, leases.c.use + 1)
        .join(groups, groups.c.id == leases.c.group_id)
        .where(
            leases.c.step >= earliest.scalar_subquery(),
            leases.c.step < step,
            leases.c.state.not_in(("leased", "dropped")),  # with "==", another index would be used
            leases.c.use + 1 < max_uses,
            is_last_use(),
            is_held,
            ~is_stale,
        )
        .order_by(groups.c.seq.desc())
        .limit(count)
    )
    taken = [(group_id, use) for group_id, use in found]
    _insert_leases(connection, taken, step=step, holder=holder)
    return taken


def mark_trained(
    connection: sa.Connection, trained: Iterable[str | tuple[str, int]], *, step: int, version: int
) -> None:
    """Record that leased groups were trained in `step` into `version`; each is (group, use), or an id for use
    0.

    Raises Conflict if one is not leased for `step`.
    """
    pairs = list(dict.fromkeys((item, 0) if isinstance(item, str) else item for item in trained))
    by_use: dict[int, list[str]] = defaultdict(list)
    for group_id, use in pairs:
        by_use[use].append(group_id)
    mark = sa.update(leases).where(leases.c.state == "leased", leases.c.step == step)
    changed = sum(
        connection.execute(
            mark.where(leases.c.use == use, leases.c.group_id.in_(chunk)).values(
                state="trained", version=version
            )
        ).rowcount
        for use, ids in by_use.items()
        for chunk in chunks(ids)
    )
    if changed != len(pairs):
        raise Conflict(f"only {changed} of {len(pairs)} groups are leased for step {step}: {pairs}")


def drop_leased(connection: sa.Connection, group_id: str, reason: str, *, step: int, use: int = 0) -> None:
    """Drop a group that is complete or leased. Conflict if it is pending, trained or dropped.

    With a `use` above 0, end a reuse that is leased: the group stays trained and is not reused again.
    """
    group = group_row(connection, group_id)
    of_use = sa.and_(leases.c.group_id == group_id, leases.c.use == use)
    state = connection.execute(sa.select(leases.c.state).where(of_use)).scalar_one_or_none()
    if state == "leased":
        connection.execute(sa.update(leases).where(of_use).values(state="dropped", step=step, reason=reason))
        return
    if use:
        raise Conflict(f"use {use} of group {group_id} is {state or 'not leased'}, so it cannot be dropped")
    if state is not None or group.state != "complete":
        raise Conflict(f"group {group_id} is {state or group.state}, so the trainer cannot drop it")
    connection.execute(
        sa.insert(leases).values(
            group_id=group_id, use=0, state="dropped", step=step, holder="", reason=reason
        )
    )


def write_checkpoint(connection: sa.Connection, step: int) -> None:
    """Record that the trainer can resume after `step`. Idempotent."""
    if connection.execute(sa.select(checkpoints.c.step).where(checkpoints.c.step == step)).first() is None:
        connection.execute(sa.insert(checkpoints).values(step=step, created_at=time.time()))


def return_leases(connection: sa.Connection, after_step: int) -> int:
    """Make every group that a later step leased, trained or dropped complete again; return how many.

    A trainer calls this when it resumes: what was trained after its checkpoint is lost with the weights, and
    a group that is only leased was leased by a trainer that has ended. A group whose turns were deleted
    (`store.retain`), or of which an episode was deleted, cannot be trained again and is dropped. The rows of
    lost reuses are deleted, so they may be leased again under the same number; they are not counted.
    """
    connection.execute(sa.delete(checkpoints).where(checkpoints.c.step > after_step))
    lost = sa.or_(leases.c.step > after_step, leases.c.state == "leased")
    # A later use is of a later step, so the remaining uses of a group have no gap.
    connection.execute(sa.delete(leases).where(lost, leases.c.use > 0))
    connection.execute(
        sa.update(leases)
        .where(lost, is_emptied(leases.c.group_id))
        .values(state="dropped", step=after_step, version=None, reason=TURNS_GIVEN_UP)
    )
    connection.execute(
        sa.update(leases)
        .where(lost, is_cut(leases.c.group_id))
        .values(state="dropped", step=after_step, version=None, reason=DELETED)
    )
    return connection.execute(sa.delete(leases).where(lost)).rowcount


def _void_leases_of_others(connection: sa.Connection, holder: str) -> None:
    """Delete the leases of trainers that have ended: their groups become complete, and their reuses void."""
    connection.execute(sa.delete(leases).where(leases.c.state == "leased", leases.c.holder != holder))


def _insert_leases(
    connection: sa.Connection, taken: Sequence[tuple[str, int]], *, step: int, holder: str
) -> None:
    lease = {"state": "leased", "step": step, "holder": holder}
    if taken:
        connection.execute(
            sa.insert(leases), [{"group_id": group_id, "use": use, **lease} for group_id, use in taken]
        )
