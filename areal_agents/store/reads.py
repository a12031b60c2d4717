"""Reads of rollout, trainer, proxy and views. Each takes a fixed number of queries, never one per turn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from areal_agents.core.rollout import (
    RecordedEpisode,
    Reward,
    Rollout,
    RolloutGroup,
    Split,
    Task,
    task_and_epoch,
)
from areal_agents.core.trajectory import Turn
from areal_agents.store.chunks import chunks
from areal_agents.store.codec import IMPORTED, decode_turn
from areal_agents.store.errors import NotFound
from areal_agents.store.retention import is_emptied
from areal_agents.store.rows import (
    GROUP_STATES,
    SCORED,
    Activity,
    EpisodeRow,
    EpisodeSummary,
    GroupHistory,
    GroupUse,
    OpenEpisode,
    OpenGroup,
    TaskGroup,
    TrainedStep,
    TurnTime,
)
from areal_agents.store.schema import episodes, groups, leases, rewards, tasks, turns

_EPISODES = sa.select(episodes, tasks.c.id.label("task_id"), tasks.c.input).join(
    tasks, tasks.c.uid == episodes.c.task_uid
)
# The rollout processes count groups at every episode; building a statement costs more than its execution.
_GROUPS_BY_STATE = (
    sa.select(groups.c.state, sa.func.count())
    .where(groups.c.split == sa.bindparam("split"))
    .group_by(groups.c.state)
)
_LEASES_BY_STATE = (
    sa.select(leases.c.state, sa.func.count()).where(leases.c.use == 0).group_by(leases.c.state)
)
_ROW_COLUMNS = EpisodeRow.__slots__
_SUMMARY_COLUMNS = (
    "id", "task_id", "group_id", "index", "status", "split", "error", "metadata", "created_at", "ended_at"
)  # fmt: skip


def episode_row(
    connection: sa.Connection, *, id: str | None = None, key_hash: str | None = None
) -> EpisodeRow:
    """Return an episode by its id or by its key's hash. Raises NotFound if there is none."""
    condition = episodes.c.id == id if id is not None else episodes.c.key_hash == key_hash
    row = connection.execute(_EPISODES.where(condition)).one_or_none()
    if row is None:
        raise NotFound(f"no episode {id}" if id is not None else "no episode has that key")
    return _episode_row(row)


def episode_of_turn(connection: sa.Connection, turn_id: str) -> str:
    """Return the id of the episode that a completion belongs to. Raises NotFound if it is unknown."""
    found = connection.execute(
        sa.select(turns.c.episode_id).where(turns.c.id == turn_id)
    ).scalar_one_or_none()
    if found is None:
        raise NotFound(f"no completion {turn_id}")
    return found


def open_implicit_episodes(connection: sa.Connection) -> list[EpisodeRow]:
    """Return the open implicit episodes, oldest first."""
    query = _EPISODES.where(episodes.c.status == "open", episodes.c.implicit_key.is_not(None))
    return [_episode_row(row) for row in connection.execute(query.order_by(episodes.c.seq))]


def open_implicit_episode(connection: sa.Connection, implicit_key: str) -> EpisodeRow | None:
    """Return the newest open implicit episode with this key, or None if there is none."""
    query = _EPISODES.where(episodes.c.implicit_key == implicit_key, episodes.c.status == "open")
    row = connection.execute(query.order_by(episodes.c.seq.desc()).limit(1)).one_or_none()
    return _episode_row(row) if row is not None else None


def open_episodes(connection: sa.Connection) -> list[OpenEpisode]:
    """Return every open episode, oldest first."""
    query = sa.select(episodes.c.id, episodes.c.implicit_key, episodes.c.owner)
    query = query.where(episodes.c.status == "open").order_by(episodes.c.seq)
    return [OpenEpisode(row[0], row[1] is not None, row[2]) for row in connection.execute(query)]


def turns_of(connection: sa.Connection, episode_id: str) -> list[Turn]:
    """Return the turns of one episode, in the order in which they were recorded, without routed experts.

    Routed experts are large, and only the trainer uses them; it reads whole groups.
    """
    columns = [column for column in turns.c if column is not turns.c.routed_experts]
    return _turns(connection, [episode_id], columns)[episode_id]


def summaries(
    connection: sa.Connection,
    *,
    split: str | None = None,
    status: str | None = None,
    group_id: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    after: str | None = None,
    limit: int | None = None,
) -> list[EpisodeSummary]:
    """Return the episodes that match every given condition, in the order in which they were opened.

    With `after`, only those that were opened after that episode; NotFound if it is unknown.
    """
    query = _EPISODES.order_by(episodes.c.seq)
    if after is not None:
        seq = connection.execute(sa.select(episodes.c.seq).where(episodes.c.id == after)).scalar_one_or_none()
        if seq is None:
            raise NotFound(f"no episode {after}")
        query = query.where(episodes.c.seq > seq)
    if limit is not None:
        query = query.limit(limit)
    if split is not None:
        query = query.where(episodes.c.split == split)
    if status is not None:
        query = query.where(episodes.c.status == status)
    if group_id is not None:
        query = query.where(episodes.c.group_id == group_id)
    for key, value in (metadata or {}).items():
        query = query.where(_json_equals(episodes.c.metadata[key], value))
    return _summaries(connection, query)


def load_episodes(connection: sa.Connection, ids: Sequence[str]) -> list[RecordedEpisode]:
    """Return episodes with turns and rewards, in the order of `ids`. Raises NotFound if one is unknown."""
    return [episode for chunk in chunks(ids) for episode in _load_episodes(connection, chunk)]


def _load_episodes(connection: sa.Connection, ids: Sequence[str]) -> list[RecordedEpisode]:
    rows = {row.id: row for row in connection.execute(_EPISODES.where(episodes.c.id.in_(ids)))}
    missing = [episode_id for episode_id in ids if episode_id not in rows]
    if missing:
        raise NotFound(f"no episode {missing[0]}")
    turns_by_episode = _turns(connection, ids)
    rewards_by_episode = _rewards(connection, ids)
    return [
        RecordedEpisode(
            id=row.id,
            task=Task(row.task_id, row.input),
            turns=tuple(turns_by_episode[row.id]),
            status=row.status,
            rewards=tuple(rewards_by_episode[row.id]),
        )
        for row in (rows[episode_id] for episode_id in ids)
    ]


def load_groups(connection: sa.Connection, ids: Sequence[str]) -> list[RolloutGroup]:
    """Return groups with their scored episodes by index, in the order of `ids`. Raises NotFound."""
    return [group for chunk in chunks(ids) for group in _load_groups(connection, chunk)]


def _load_groups(connection: sa.Connection, ids: Sequence[str]) -> list[RolloutGroup]:
    group_rows = {
        row.id: row
        for row in connection.execute(
            sa.select(groups.c.id, tasks.c.id.label("task_id"), tasks.c.input)
            .join(tasks, tasks.c.uid == groups.c.task_uid)
            .where(groups.c.id.in_(ids))
        )
    }
    members: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for row in connection.execute(
        sa.select(episodes.c.group_id, episodes.c["index"], episodes.c.id)
        .where(episodes.c.group_id.in_(ids), episodes.c.status.in_(SCORED))
        .order_by(episodes.c["index"])
    ):
        members[row[0]].append((row[1], row[2]))
    wanted = [episode_id for group_id in ids for _, episode_id in members[group_id]]
    loaded = {episode.id: episode for episode in load_episodes(connection, wanted)}
    out = []
    for group_id in ids:
        if group_id not in group_rows:
            raise NotFound(f"no group {group_id}")
        task = Task(group_rows[group_id].task_id, group_rows[group_id].input)
        rollouts = tuple(
            Rollout(task, index, loaded[episode_id], None) for index, episode_id in members[group_id]
        )
        out.append(RolloutGroup(group_id, task, rollouts))
    return out


def group_history(connection: sa.Connection, group_id: str) -> GroupHistory:
    """Return a group with what the trainer did with it. Raises NotFound."""
    group = connection.execute(sa.select(groups).where(groups.c.id == group_id)).one_or_none()
    if group is None:
        raise NotFound(f"no group {group_id}")
    scored = connection.execute(
        sa.select(sa.func.count())
        .select_from(episodes)
        .where(
            episodes.c.group_id == group_id,
            episodes.c.status.in_(SCORED),
            sa.exists().where(rewards.c.episode_id == episodes.c.id),
        )
    ).scalar_one()
    taken = connection.execute(
        sa.select(leases).where(leases.c.group_id == group_id).order_by(leases.c.use)
    ).all()
    uses = tuple(GroupUse(row.use, row.state, row.step, row.version, row.reason) for row in taken)
    state = uses[0].state if uses else group.state
    return GroupHistory(group.id, group.split, group.size, scored, state, group.reason, uses)


def groups_of_step(connection: sa.Connection, step: int) -> dict[str, int]:
    """Return the groups that a step was trained on, by id, each with its use."""
    rows = connection.execute(
        sa.select(leases.c.group_id, leases.c.use).where(leases.c.step == step, leases.c.state == "trained")
    )
    return {row[0]: row[1] for row in rows}


def trained_steps(connection: sa.Connection) -> dict[int, TrainedStep]:
    """Return every step that is trained, in order, with its groups."""
    found: dict[int, tuple[int, dict[str, int]]] = {}
    query = sa.select(leases.c.step, leases.c.version, leases.c.group_id, leases.c.use)
    for step, version, group_id, use in connection.execute(
        query.where(leases.c.state == "trained").order_by(leases.c.step, leases.c.group_id)
    ):
        found.setdefault(step, (version - 1, {}))[1][group_id] = use
    return {step: TrainedStep(step, version, uses) for step, (version, uses) in found.items()}


def emptied_groups(connection: sa.Connection, ids: Sequence[str]) -> set[str]:
    """Return those of the groups of which turns were deleted (`store.retain`)."""
    query = sa.select(groups.c.id).where(is_emptied(groups.c.id))
    return {
        group_id
        for chunk in chunks(ids)
        for group_id in connection.execute(query.where(groups.c.id.in_(chunk))).scalars()
    }


def groups_ended_at(connection: sa.Connection, ids: Sequence[str]) -> dict[str, float | None]:
    """By group id, when the last of its episodes ended; None if none has."""
    query = sa.select(episodes.c.group_id, sa.func.max(episodes.c.ended_at)).group_by(episodes.c.group_id)
    return {
        group_id: ended_at
        for chunk in chunks(ids)
        for group_id, ended_at in connection.execute(query.where(episodes.c.group_id.in_(chunk)))
    }


def open_groups(connection: sa.Connection) -> list[OpenGroup]:
    """Return the pending groups with every attempt at each index, oldest group first."""
    pending = connection.execute(
        sa.select(groups, tasks.c.id.label("task_id"), tasks.c.input)
        .join(tasks, tasks.c.uid == groups.c.task_uid)
        .where(groups.c.state == "pending")
        .order_by(groups.c.seq)
    ).all()
    ids = sa.select(groups.c.id).where(groups.c.state == "pending")
    attempts: dict[str, dict[int, list[EpisodeSummary]]] = defaultdict(lambda: defaultdict(list))
    for summary in _summaries(
        connection, _EPISODES.where(episodes.c.group_id.in_(ids)).order_by(episodes.c.seq)
    ):
        attempts[str(summary.group_id)][summary.index].append(summary)
    return [
        OpenGroup(
            id=row.id,
            task=Task(row.task_id, row.input),
            size=row.size,
            surplus=row.surplus or 0,
            split=row.split,
            attempts={index: tuple(tried) for index, tried in attempts[row.id].items()},
            runner=row.runner,
            seq=row.seq,
        )
        for row in pending
    ]


def group_counts(connection: sa.Connection, split: Split) -> dict[str, int]:
    """Return how many groups of the split are in each state, including states without groups."""
    found = connection.execute(_GROUPS_BY_STATE, {"split": split})
    counts = {**dict.fromkeys(GROUP_STATES, 0), **{row[0]: row[1] for row in found}}
    if split == "train":  # the groups that the trainer took are complete in `groups`
        for state, count in connection.execute(_LEASES_BY_STATE):
            counts["complete"] -= count
            counts[state] += count
    return counts


def episode_counts(connection: sa.Connection, split: Split) -> dict[str, int]:
    """Return how many episodes of the split have each status that any has."""
    query = sa.select(episodes.c.status, sa.func.count()).where(episodes.c.split == split)
    return {row[0]: row[1] for row in connection.execute(query.group_by(episodes.c.status))}


def failed_episodes(connection: sa.Connection, split: Split) -> int:
    """Return how many episodes of the split have failed."""
    failed = (episodes.c.split == split) & (episodes.c.status == "failed")
    return int(connection.execute(sa.select(sa.func.count()).where(failed)).scalar_one())


def constrained_turns(connection: sa.Connection, split: Split, latest: int) -> tuple[int, int]:
    """Return how many of the latest turns of the split are constrained, and how many these turns are."""
    found = sa.select(turns.c.constrained).join(episodes, episodes.c.id == turns.c.episode_id)
    of_split = found.where(episodes.c.split == split).order_by(turns.c.seq.desc()).limit(latest).subquery()
    counts = sa.select(sa.func.count(of_split.c.constrained), sa.func.count()).select_from(of_split)
    constrained, total = connection.execute(counts).one()
    return int(constrained), int(total)


def activity(connection: sa.Connection, unrewarded: int) -> Activity:
    """Return what goes on in the store."""
    is_open = episodes.c.status == "open"
    training = sa.select(episodes.c.id, episodes.c.created_at).where(is_open, episodes.c.split == "train")
    running = connection.execute(training.order_by(episodes.c.seq)).all()
    held_out = sa.select(sa.func.count()).where(is_open, episodes.c.split == "eval")
    newest = sa.select(turns.c.created_at).order_by(turns.c.seq.desc()).limit(1)
    return Activity(
        open_episodes=len(running),
        oldest_id=running[0].id if running else None,
        oldest_opened_at=running[0].created_at if running else None,
        open_evaluations=int(connection.execute(held_out).scalar_one()),
        last_turn_at=connection.execute(newest).scalar_one_or_none(),
        unrewarded=unrewarded,
    )


def sampled_tokens_per_s(connection: sa.Connection, *, now: float, within_s: float, latest: int) -> float:
    """Return the tokens that were sampled per second, from the turns that were recorded a moment ago.

    Args:
        now: seconds since the epoch.
        within_s: the time that is looked at.
        latest: the most turns that are read; if they are all younger, their own time is looked at.
    """
    query = sa.select(turns.c.created_at, turns.c.sampled_tokens).order_by(turns.c.seq.desc()).limit(latest)
    found = [(at, tokens) for at, tokens in connection.execute(query) if now - at < within_s]
    if len(found) == latest:
        within_s = max(now - min(at for at, _ in found), 1e-3)
    return sum(tokens for _, tokens in found) / within_s


def episodes_with_reward(connection: sa.Connection, name: str, split: Split) -> int:
    """Return how many episodes of the split have a reward of this name."""
    query = (
        sa.select(sa.func.count(sa.distinct(rewards.c.episode_id)))
        .join(episodes, episodes.c.id == rewards.c.episode_id)
        .where(rewards.c.name == name, episodes.c.split == split)
    )
    return int(connection.execute(query).scalar_one())


def last_failure(connection: sa.Connection, split: Split) -> str | None:
    """Return why the episode of the split failed that ended last; None if none has failed."""
    failed = (episodes.c.split == split) & (episodes.c.status == "failed")
    query = sa.select(episodes.c.error).where(failed).order_by(episodes.c.ended_at.desc()).limit(1)
    return connection.execute(query).scalar_one_or_none()


def recorded_groups(connection: sa.Connection, split: Split) -> list[str]:
    """Return the ids of the groups of the split that were completed and not dropped, oldest first."""
    dropped = sa.exists().where(
        leases.c.group_id == groups.c.id, leases.c.use == 0, leases.c.state == "dropped"
    )
    query = sa.select(groups.c.id).where(groups.c.state == "complete", groups.c.split == split, ~dropped)
    return list(connection.execute(query.order_by(groups.c.seq)).scalars())


def recorded_alone(connection: sa.Connection, split: Split) -> list[tuple[str, str]]:
    """Return (id, task id) of the rewarded episodes of the split without a group, oldest first.

    An implicit episode counts before it has ended, because only its idleness shows that it has.
    """
    has_ended = episodes.c.status.in_(SCORED) | (
        (episodes.c.status == "open") & episodes.c.implicit_key.is_not(None)
    )
    query = (
        sa.select(episodes.c.id, tasks.c.id)
        .join(tasks, tasks.c.uid == episodes.c.task_uid)
        .where(episodes.c.group_id.is_(None), episodes.c.split == split, has_ended)
        .where(sa.exists().where(rewards.c.episode_id == episodes.c.id))
        .order_by(episodes.c.seq)
    )
    return [(episode_id, task_id) for episode_id, task_id in connection.execute(query)]


def imported_episodes(connection: sa.Connection, split: Split) -> int:
    """Return how many episodes of the split have imported turns."""
    is_imported = sa.exists().where(turns.c.episode_id == episodes.c.id, turns.c.codec == IMPORTED)
    query = sa.select(sa.func.count()).select_from(episodes).where(episodes.c.split == split, is_imported)
    return int(connection.execute(query).scalar_one())


def turn_times(connection: sa.Connection, split: Split) -> list[TurnTime]:
    """Return when the turns of the scored episodes of a split were recorded, by episode and in order."""
    query = (
        sa.select(turns.c.episode_id, episodes.c.created_at, turns.c.created_at, turns.c.sampled_tokens)
        .join(episodes, episodes.c.id == turns.c.episode_id)
        .where(episodes.c.split == split, episodes.c.status.in_(SCORED))
        .order_by(episodes.c.seq, turns.c.seq)
    )
    return [TurnTime(*row) for row in connection.execute(query)]


def tasks_started(connection: sa.Connection, split: Split) -> list[tuple[str, int]]:
    """Return (task id, epoch) of each group of the split, oldest first.

    The epoch is 0 if the group's id is not "<task id>@<epoch>".
    """
    ids = connection.execute(
        sa.select(groups.c.id).where(groups.c.split == split).order_by(groups.c.seq)
    ).scalars()
    return [task_and_epoch(group_id) for group_id in ids]


def task_groups(connection: sa.Connection, split: Split) -> list[TaskGroup]:
    """Return every group of the split with its task, oldest first."""
    query = (
        sa.select(groups.c.id, tasks.c.id, sa.func.max(turns.c.version_max))
        .join(tasks, tasks.c.uid == groups.c.task_uid)
        .outerjoin(episodes, episodes.c.group_id == groups.c.id)
        .outerjoin(turns, turns.c.episode_id == episodes.c.id)
        .where(groups.c.split == split)
        .group_by(groups.c.seq, tasks.c.uid)
        .order_by(groups.c.seq)
    )
    return [TaskGroup(*row) for row in connection.execute(query)]


def group_scores(connection: sa.Connection, ids: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """Return the scores of each group that has ended: by index if it is complete, () if dropped."""
    found: dict[str, list[float]] = {}
    for chunk in chunks(ids):
        ended = sa.select(groups.c.id).where(groups.c.id.in_(chunk), groups.c.state != "pending")
        found |= {group_id: [] for group_id in connection.execute(ended).scalars()}
        query = (
            sa.select(groups.c.id, sa.func.sum(rewards.c.value))
            .join(episodes, episodes.c.group_id == groups.c.id)
            .join(rewards, rewards.c.episode_id == episodes.c.id)
            .where(groups.c.id.in_(chunk), groups.c.state == "complete", episodes.c.status.in_(SCORED))
            .group_by(groups.c.id, episodes.c.seq)
            .order_by(episodes.c.index)
        )
        for group_id, score in connection.execute(query):
            found[group_id].append(score)
    return {group_id: tuple(scores) for group_id, scores in found.items()}


def _episode_row(row: sa.Row) -> EpisodeRow:
    return EpisodeRow(**{name: row._mapping[name] for name in _ROW_COLUMNS})


def _json_equals(column: Any, value: Any) -> sa.ColumnElement[bool]:
    if isinstance(value, bool):
        return column.as_boolean() == value
    if isinstance(value, int):
        return column.as_integer() == value
    if isinstance(value, float):
        return column.as_float() == value
    if isinstance(value, str):
        return column.as_string() == value
    raise ValueError(f"metadata is matched by text, number or boolean, got {value!r}")


def _summaries(connection: sa.Connection, query: sa.Select) -> list[EpisodeSummary]:
    rows = connection.execute(query).all()
    chosen = query.with_only_columns(episodes.c.id, maintain_column_froms=True).order_by(None)
    calls = {
        row[0]: row[1:]
        for row in connection.execute(
            sa.select(
                turns.c.episode_id,
                sa.func.count(),
                sa.func.sum(turns.c.sampled_tokens),
                sa.func.min(turns.c.version_min),
                sa.func.max(turns.c.version_max),
            )
            .where(turns.c.episode_id.in_(chosen))
            .group_by(turns.c.episode_id)
        )
    }
    scores = {
        row[0]: row[1]
        for row in connection.execute(
            sa.select(rewards.c.episode_id, sa.func.sum(rewards.c.value))
            .where(rewards.c.episode_id.in_(chosen))
            .group_by(rewards.c.episode_id)
        )
    }
    out = []
    for row in rows:
        turns_count, sampled, version_min, version_max = calls.get(row.id, (0, 0, None, None))
        out.append(
            EpisodeSummary(
                **{name: row._mapping[name] for name in _SUMMARY_COLUMNS},
                score=scores.get(row.id),
                turns=turns_count,
                sampled_tokens=sampled,
                version_min=version_min,
                version_max=version_max,
            )
        )
    return out


def _turns(
    connection: sa.Connection, ids: Iterable[str], columns: Iterable[sa.Column[Any]] = turns.c
) -> dict[str, list[Turn]]:
    out: dict[str, list[Turn]] = {episode_id: [] for episode_id in ids}
    query = sa.select(*columns).where(turns.c.episode_id.in_(out)).order_by(turns.c.seq)
    for row in connection.execute(query).mappings():
        out[row["episode_id"]].append(decode_turn(row))
    return out


def _rewards(connection: sa.Connection, ids: Iterable[str]) -> dict[str, list[Reward]]:
    out: dict[str, list[Reward]] = {episode_id: [] for episode_id in ids}
    query = sa.select(rewards).where(rewards.c.episode_id.in_(out))
    for row in connection.execute(query.order_by(rewards.c.created_at, rewards.c.target, rewards.c.name)):
        out[row.episode_id].append(Reward(row.scope, row.target, row.name, row.value))
    return out
