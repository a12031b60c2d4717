"""Writes of the proxy to the tables of episodes and turns. Each function runs in one job of the writer."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Sequence
from typing import Any, Literal

import orjson
import sqlalchemy as sa
from sqlalchemy.dialects import sqlite
from sqlalchemy.dialects.postgresql import psycopg

from areal_agents.core.rollout import RUNNER, Reward, Split, Task
from areal_agents.store.chunks import chunks
from areal_agents.store.database import driver_of
from areal_agents.store.errors import Conflict, NotFound, NoTurn, SessionTaken
from areal_agents.store.groups import complete_if_scored
from areal_agents.store.ownership import refuse_other_owner
from areal_agents.store.reads import group_counts
from areal_agents.store.rewards import write_default_reward, write_rewards
from areal_agents.store.rows import (
    LIVE,
    Admission,
    EpisodeRow,
    EpisodeState,
    NewEpisode,
    NewGroup,
    opened_row,
)
from areal_agents.store.schema import episodes, groups, leases, rewards, tasks, turns
from areal_agents.store.versions import latest_version, oldest_served

SealedStatus = Literal["finished", "truncated", "failed", "aborted"]

_TURN_COLUMNS = [column for column in turns.c if column.name != "seq"]
_IS_OPEN = sa.and_(
    episodes.c.id == sa.bindparam("episode_id"), episodes.c.status == sa.literal_column("'open'")
)


def _insert_turn_if(condition: sa.ColumnElement[bool]) -> dict[str, str]:
    """Return the statement that inserts a turn if its episode fulfils a condition, by dialect."""
    statement = sa.insert(turns).from_select(
        _TURN_COLUMNS,
        sa.select(*(sa.bindparam(column.name, type_=column.type) for column in _TURN_COLUMNS))
        .select_from(episodes)
        .where(condition),
        include_defaults=False,
    )
    return {
        "sqlite": str(statement.compile(dialect=sqlite.dialect(paramstyle="named"))),
        "postgresql": str(statement.compile(dialect=psycopg.dialect())),
    }


# The check and the write are one statement, compiled once, because this is the hot path of a run.
_INSERT_TURN_IN = _insert_turn_if(_IS_OPEN)
_INSERT_OWN_TURN_IN = _insert_turn_if(sa.and_(_IS_OPEN, episodes.c.owner == sa.bindparam("owner")))


_UNREWARDED = sa.and_(
    episodes.c.status == "finished",
    episodes.c.group_id.is_not(None),
    ~sa.exists().where(rewards.c.episode_id == episodes.c.id),
    ~sa.exists().where(leases.c.group_id == episodes.c.group_id, leases.c.use == 0),
)


def insert_episode(connection: sa.Connection, new: NewEpisode) -> EpisodeRow:
    """Open an episode, and create its group and task if they are new.

    Raises Conflict if the group is full, no longer pending, of another size, task or split, or of another
    rollout process, if the index is taken by an episode that did not fail, or if an episode `is_named` so;
    SessionTaken if `only_one` and the implicit key has an open episode.
    """
    now = time.time()
    if new.is_named and connection.execute(sa.select(episodes.c.id).where(episodes.c.id == new.id)).first():
        raise Conflict(f"there is an episode {new.id} already")
    if new.only_one:
        _refuse_second(connection, new)
    if new.group_id is None:
        index = new.index or 0
        task = new.task or Task(id=new.id, input={})
        task_uid = _ensure_task(connection, task)
    else:
        task_uid, task = _join_group(connection, new, now)
        index = _free_index(connection, new)
    row = opened_row(new, index=index, task_id=task.id, created_at=now)
    values = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    del values["task_id"]
    connection.execute(sa.insert(episodes).values(**values, task_uid=task_uid))
    return row


def begin_group(connection: sa.Connection, new: NewGroup) -> Admission:
    """Begin a training group if the gate admits it and no other process has it, see `NewGroup`."""
    found = connection.execute(
        sa.select(groups.c.seq, groups.c.state, groups.c.runner).where(groups.c.id == new.id)
    ).one_or_none()
    if found is not None:
        is_own = found.state == "pending" and found.runner == new.runner
        return Admission("begun", found.seq) if is_own else Admission("taken")
    if new.at_step is not None:
        latest = latest_version(connection)
        if new.at_step != (latest.step if latest is not None else 0):
            return Admission("full")
    counts = group_counts(connection, "train")
    if counts["pending"] + counts["complete"] + counts["leased"] >= new.at_most:
        return Admission("full")
    seq = _insert_group(connection, new.id, new.task, "train", new.size, new.surplus, time.time(), new.runner)
    return Admission("begun", seq)


def insert_if_missing(connection: sa.Connection, new: NewEpisode) -> None:
    """Open an episode unless the store has it, in any state. Raises what `insert_episode` raises."""
    if connection.execute(sa.select(episodes.c.id).where(episodes.c.id == new.id)).first() is None:
        insert_episode(connection, new)


def insert_turn(connection: sa.Connection, row: dict[str, Any], *, owner: str | None = None) -> None:
    """Add an encoded turn. Raises NotFound or Conflict unless its episode is open.

    Raises OwnedElsewhere if `owner` is given and is not the owner of the episode.
    """
    if owner is None:
        statements = _INSERT_TURN_IN
    else:
        statements, row = _INSERT_OWN_TURN_IN, {**row, "owner": owner}
    if driver_of(connection).execute(statements[connection.dialect.name], row).rowcount:
        return
    found = connection.execute(
        sa.select(episodes.c.status, episodes.c.owner).where(episodes.c.id == row["episode_id"])
    ).one_or_none()
    if found is None:
        raise NotFound(f"no episode {row['episode_id']}")
    refuse_other_owner(row["episode_id"], found.status, found.owner, owner)
    raise Conflict(f"episode {row['episode_id']} is {found.status}: it takes no more model calls")


def discard_turn(
    connection: sa.Connection, turn_id: str, reason: str | None, *, owner: str | None = None
) -> None:
    """Record why a turn never reached its client; None clears it, when a retry fetches the turn after all.

    Has no effect if `owner` is given and is not the owner of the episode: another proxy may have delivered
    the turn.
    """
    change = sa.update(turns).where(turns.c.id == turn_id)
    if owner is not None:
        change = change.where(turns.c.episode_id == episodes.c.id, episodes.c.owner == owner)
    connection.execute(change.values(discarded=reason))


def mark_limit(connection: sa.Connection, episode_id: str, limit: str, *, owner: str | None = None) -> None:
    """Record that the policy ran into a limit, so that finishing makes the episode truncated.

    Has no effect if `owner` is given and is not the owner of the episode.
    """
    change = sa.update(episodes).where(
        episodes.c.id == episode_id, episodes.c.status == "open", episodes.c.limit_reached.is_(None)
    )
    if owner is not None:
        change = change.where(episodes.c.owner == owner)
    connection.execute(change.values(limit_reached=limit))


def seal_episode(
    connection: sa.Connection,
    episode_id: str,
    status: SealedStatus,
    *,
    given: Sequence[Reward] = (),
    error: str | None = None,
    truncated_reward: float = 0.0,
    require_turn: bool = False,
    owner: str | None = None,
) -> EpisodeState:
    """End an open episode, with its last rewards if there are any; return its state.

    "finished" becomes "truncated" if a limit was reached; a truncated episode without a reward gets
    `truncated_reward`. Sealing again in the same way changes nothing, and in another way raises Conflict.
    Raises NoTurn if `require_turn` and the model was never called, and OwnedElsewhere if `owner` is given and
    is not the owner of the open episode.
    """
    found = connection.execute(
        sa.select(episodes.c.status, episodes.c.limit_reached, episodes.c.group_id, episodes.c.owner).where(
            episodes.c.id == episode_id
        )
    ).one_or_none()
    if found is None:
        raise NotFound(f"no episode {episode_id}")
    refuse_other_owner(episode_id, found.status, found.owner, owner)
    if status == "finished" and found.limit_reached is not None:
        status = "truncated"
    is_repeated = found.status == status or (status == "finished" and found.status == "truncated")
    if found.status != "open" and not is_repeated:
        raise Conflict(f"episode {episode_id} is {found.status}, so it cannot become {status}")
    if require_turn and not state_of(connection, episode_id).turns:
        raise NoTurn(f"episode {episode_id} has no model call")
    if given:
        write_rewards(connection, episode_id, given)
    if not is_repeated:
        if error is not None:
            error = error.replace("\0", "\N{REPLACEMENT CHARACTER}")  # PostgreSQL's texts have no NUL
        connection.execute(
            sa.update(episodes)
            .where(episodes.c.id == episode_id)
            .values(status=status, error=error, ended_at=(now := time.time()))
        )
        if status == "truncated":
            write_default_reward(connection, episode_id, truncated_reward, now=now)
        if found.group_id is not None and status in LIVE:
            complete_if_scored(connection, found.group_id)
    return state_of(connection, episode_id)


def state_of(connection: sa.Connection, episode_id: str) -> EpisodeState:
    """Return the status of a known episode, the limit it reached, and its number of turns."""
    count = sa.select(sa.func.count()).select_from(turns).where(turns.c.episode_id == episode_id)
    row = connection.execute(
        sa.select(episodes.c.status, episodes.c.limit_reached, count.scalar_subquery()).where(
            episodes.c.id == episode_id
        )
    ).one()
    return EpisodeState(*row)


def unrewarded(connection: sa.Connection, *, of_ended_groups: bool) -> list[str]:
    """Return the ids of finished episodes in groups that have no reward yet, in the order of opening.

    With `of_ended_groups`, episodes of groups of which another episode is still open are left out.
    """
    query = sa.select(episodes.c.id).where(_UNREWARDED).order_by(episodes.c.seq)
    if of_ended_groups:
        mates = episodes.alias("mates")
        query = query.where(
            ~sa.exists().where(mates.c.group_id == episodes.c.group_id, mates.c.status == "open")
        )
    return list(connection.execute(query).scalars())


def fail_unrewarded(connection: sa.Connection, ids: Sequence[str]) -> list[str]:
    """Mark the given episodes that have no reward yet as failed; return their ids."""
    failed: list[str] = []
    for chunk in chunks(ids):
        due = list(
            connection.execute(
                sa.select(episodes.c.id).where(episodes.c.id.in_(chunk), _UNREWARDED)
            ).scalars()
        )
        connection.execute(
            sa.update(episodes).where(episodes.c.id.in_(due)).values(status="failed", error="no_reward")
        )
        failed += due
    return failed


def _refuse_second(connection: sa.Connection, new: NewEpisode) -> None:
    found = connection.execute(
        sa.select(episodes.c.id).where(
            episodes.c.implicit_key == new.implicit_key, episodes.c.status == "open"
        )
    ).first()
    if found is not None:
        raise SessionTaken(f"episode {found.id} is open for the same session")


def _ensure_task(connection: sa.Connection, task: Task) -> str:
    uid = _uid(task)
    if connection.execute(sa.select(tasks.c.uid).where(tasks.c.uid == uid)).first() is None:
        connection.execute(sa.insert(tasks).values(uid=uid, id=task.id, input=dict(task.input)))
    return uid


def _uid(task: Task) -> str:
    payload = orjson.dumps(dict(task.input), option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(task.id.encode() + b"\0" + payload, digest_size=16).hexdigest()


def _join_group(connection: sa.Connection, new: NewEpisode, now: float) -> tuple[str, Task]:
    """Create the group, or check that the episode fits into it; return the group's task."""
    group = connection.execute(
        sa.select(groups, tasks.c.id.label("task_id"), tasks.c.input)
        .join(tasks, tasks.c.uid == groups.c.task_uid)
        .where(groups.c.id == new.group_id)
    ).one_or_none()
    if group is None:
        return _create_group(connection, new, now)
    if new.group_size is not None and new.group_size != group.size:
        raise Conflict(f"group {new.group_id} has group_size {group.size}, got group_size {new.group_size}")
    if new.surplus is not None and new.surplus != (group.surplus or 0):
        raise Conflict(f"group {new.group_id} has surplus {group.surplus or 0}, got surplus {new.surplus}")
    if group.runner is not None and new.metadata.get(RUNNER) != group.runner:
        raise Conflict(f"group {new.group_id} is played by {group.runner}, and only that may add episodes")
    if new.split != group.split:
        raise Conflict(f"group {new.group_id} has split {group.split!r}, got {new.split!r}")
    if new.task is not None and new.task.id != group.task_id:
        raise Conflict(f"group {new.group_id} attempts task {group.task_id!r}, got {new.task.id!r}")
    if group.state != "pending":
        raise Conflict(f"group {new.group_id} is {group.state}: it accepts no more episodes")
    return group.task_uid, Task(group.task_id, group.input)


def _create_group(connection: sa.Connection, new: NewEpisode, now: float) -> tuple[str, Task]:
    size = new.default_group_size if new.group_size is None else new.group_size
    if new.group_id is None or size is None or size < 1:
        raise ValueError(f"a new group needs a size of at least 1, got {size}")
    task = new.task or Task(id=new.group_id, input={})
    _insert_group(connection, new.group_id, task, new.split, size, new.surplus or 0, now)
    return _uid(task), task


def _insert_group(
    connection: sa.Connection,
    group_id: str,
    task: Task,
    split: Split,
    size: int,
    surplus: int,
    now: float,
    runner: str | None = None,
) -> int:
    """Add a pending group, and its task if that is new; return the group's seq."""
    inserted = connection.execute(
        sa.insert(groups).values(
            id=group_id,
            task_uid=_ensure_task(connection, task),
            split=split,
            size=size,
            surplus=surplus or None,
            version=oldest_served(connection),
            state="pending",
            created_at=now,
            runner=runner,
        )
    )
    assert inserted.inserted_primary_key is not None
    return int(inserted.inserted_primary_key[0])


def _free_index(connection: sa.Connection, new: NewEpisode) -> int:
    capacity = sa.select(groups.c.size + sa.func.coalesce(groups.c.surplus, 0))
    size = connection.execute(capacity.where(groups.c.id == new.group_id)).scalar_one()
    taken = set(
        connection.execute(
            sa.select(episodes.c["index"]).where(
                episodes.c.group_id == new.group_id, episodes.c.status.in_(LIVE)
            )
        ).scalars()
    )
    free = [index for index in range(size) if index not in taken]
    if not free:
        raise Conflict(f"group {new.group_id} has {size} live episodes already, and may have no more")
    if new.index is None:
        return free[0]
    if not 0 <= new.index < size:
        raise Conflict(f"group {new.group_id} has indices 0 to {size - 1}, got {new.index}")
    if new.index in taken:
        raise Conflict(f"index {new.index} of group {new.group_id} has an episode that did not fail")
    return new.index
