"""Writes of the proxy to the table of rewards, which are accepted until the trainer leases the group.

The check and the write are one transaction, and so is the trainer's lease: the first to commit wins, in
whichever process it runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import sqlalchemy as sa

from areal_agents.core.rollout import Reward
from areal_agents.store.chunks import chunks
from areal_agents.store.errors import Conflict, NotFound
from areal_agents.store.groups import complete_if_scored
from areal_agents.store.ownership import refuse_other_owner
from areal_agents.store.schema import episodes, leases, rewards, turns

DEFAULT_REWARD_NAME = "truncated_reward"  # reserved: the proxy refuses it as the name of a given reward


def write_rewards(
    connection: sa.Connection, episode_id: str, given: Sequence[Reward], *, owner: str | None = None
) -> None:
    """Set rewards of an episode; the last write for a (scope, target, name) wins.

    Raises NotFound for an unknown episode or turn, and Conflict if the episode failed or its group is leased.
    Raises OwnedElsewhere if the episode is open and `owner` is given and is not its owner.
    """
    episode = connection.execute(
        sa.select(episodes.c.status, episodes.c.group_id, episodes.c.owner).where(episodes.c.id == episode_id)
    ).one_or_none()
    if episode is None:
        raise NotFound(f"no episode {episode_id}")
    refuse_other_owner(episode_id, episode.status, episode.owner, owner)
    if episode.status in ("failed", "aborted"):
        raise Conflict(f"episode {episode_id} is {episode.status}: it accepts no rewards")
    if episode.group_id is not None:
        _refuse_if_leased(connection, episode.group_id)
    _check_targets(connection, episode_id, given)
    now = time.time()
    _write(connection, episode_id, given, now)
    _delete_default(connection, episode_id)
    if episode.group_id is not None:
        complete_if_scored(connection, episode.group_id)


def write_default_reward(connection: sa.Connection, episode_id: str, value: float, *, now: float) -> None:
    """Give an episode that is truncated `now` and has no reward the default one; a later one replaces it."""
    found = connection.execute(
        sa.select(rewards.c.name).where(rewards.c.episode_id == episode_id).limit(1)
    ).first()
    if found is None:
        _write(connection, episode_id, [Reward("episode", "", DEFAULT_REWARD_NAME, value)], now)


def _refuse_if_leased(connection: sa.Connection, group_id: str) -> None:
    state = connection.execute(
        sa.select(leases.c.state).where(leases.c.group_id == group_id, leases.c.use == 0)
    ).scalar_one_or_none()
    if state is not None:
        raise Conflict(
            f"group {group_id} is {state}, so its rewards can no longer change; give every reward of an "
            "episode before the call that finishes the episode, or with it"
        )


def _check_targets(connection: sa.Connection, episode_id: str, given: Sequence[Reward]) -> None:
    targets = {reward.target for reward in given if reward.target}
    of_episode = sa.select(turns.c.id).where(turns.c.episode_id == episode_id)
    unknown = set(targets)
    for chunk in chunks(targets):
        unknown.difference_update(connection.execute(of_episode.where(turns.c.id.in_(chunk))).scalars())
    if unknown:
        raise NotFound(f"episode {episode_id} has no completion {min(unknown)}")


def _write(connection: sa.Connection, episode_id: str, given: Sequence[Reward], now: float) -> None:
    """Insert or replace any number of rewards, in two statements."""
    last = {(reward.scope, reward.target, reward.name): reward.value for reward in given}
    columns = (rewards.c.scope, rewards.c.target, rewards.c.name)
    of_episode = sa.select(*columns).where(rewards.c.episode_id == episode_id)
    known = {tuple(row) for row in connection.execute(of_episode)}
    values = [
        {"at_scope": scope, "at_target": target, "at_name": name, "value": value, "created_at": now}
        for (scope, target, name), value in last.items()
    ]
    there = [row for row in values if (row["at_scope"], row["at_target"], row["at_name"]) in known]
    if there:
        matches = [column == sa.bindparam(f"at_{column.name}") for column in columns]
        connection.execute(sa.update(rewards).where(rewards.c.episode_id == episode_id, *matches), there)
    new = [
        {"episode_id": episode_id, **{name.removeprefix("at_"): value for name, value in row.items()}}
        for row in values
        if (row["at_scope"], row["at_target"], row["at_name"]) not in known
    ]
    if new:
        connection.execute(sa.insert(rewards), new)


def _delete_default(connection: sa.Connection, episode_id: str) -> None:
    connection.execute(
        sa.delete(rewards).where(
            rewards.c.episode_id == episode_id,
            rewards.c.scope == "episode",
            rewards.c.name == DEFAULT_REWARD_NAME,
        )
    )
