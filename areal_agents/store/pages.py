"""Reads for pages that show a run: episodes by cursor, the groups of a step, and what happened when.

A page never depends on the size of the store. It is found by the position of its first episode, and a filter
that no index answers looks at the episodes before that position, the newest first, until the page is full or
its time is up; the answer then says where to go on.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import orjson
import sqlalchemy as sa

from areal_agents.core.rollout import FINGERPRINT, EpisodeStatus, Reward, Split, Task
from areal_agents.core.trajectory import Turn
from areal_agents.errors import RequestError
from areal_agents.store.codec import EMPTIED, decode_turn
from areal_agents.store.errors import NotFound
from areal_agents.store.schema import checkpoints, episodes, groups, leases, rewards, tasks, turns, versions

_CHUNK_S = 0.03  # wanted time of one query of a search
_FIRST_EPISODES, _FIRST_EPISODES_OF_TEXTS = 1024, 32  # of the first query of a search
_LONGEST_SEARCH = 1_000  # characters; SQLite refuses patterns of more than 50,000 bytes
_PREVIEW = 160  # characters of a task's input in a list


@dataclass(frozen=True, slots=True)
class EpisodeFilter:
    """Conditions on episodes, all of which must hold; None and "" are no condition.

    Attributes:
        step: the training step that took the episode's group first.
        evaluation: the label of an evaluation, for example "before" or "step-20".
        has_error: whether the episode has an error message.
        tool: the name of a tool that the episode called.
        text: a string in its messages, its tool calls or its error; the case of ASCII letters is ignored.

    Raises:
        RequestError: a string is too long to be searched for.
    """

    split: Split | None = None
    status: EpisodeStatus | None = None
    group: str = ""
    task: str = ""
    min_reward: float | None = None
    max_reward: float | None = None
    step: int | None = None
    evaluation: str = ""
    has_error: bool | None = None
    tool: str = ""
    text: str = ""

    def __post_init__(self) -> None:
        for name, value in (("tool", self.tool), ("text", self.text)):
            if len(value) > _LONGEST_SEARCH:
                raise RequestError(
                    f"{name} must have at most {_LONGEST_SEARCH} characters, got {len(value)}", param=name
                )


@dataclass(frozen=True, slots=True)
class ListedEpisode:
    """An episode in a list. `seq` is its position: later episodes have greater ones."""

    seq: int
    id: str
    task_id: str
    task_preview: str
    group_id: str | None
    index: int
    split: Split
    status: EpisodeStatus
    error: str | None
    limit_reached: str | None
    evaluation: str | None
    created_at: float
    ended_at: float | None
    score: float | None
    turns: int
    sampled_tokens: int
    version_min: int | None
    version_max: int | None
    step: int | None


@dataclass(frozen=True, slots=True)
class EpisodePage:
    """A part of a list, the newest episode first.

    Attributes:
        next: the position to continue before; None if there are no further episodes.
        searched: the number of positions that this page looked at.
        newest: the position of the newest episode of the store.
    """

    episodes: list[ListedEpisode]
    next: int | None
    searched: int
    newest: int


_STEP = (
    sa.select(leases.c.step)
    .where(leases.c.group_id == episodes.c.group_id, leases.c.use == 0)
    .scalar_subquery()
)
_SCORE = (
    sa.select(sa.func.sum(rewards.c.value)).where(rewards.c.episode_id == episodes.c.id).scalar_subquery()
)
_EVALUATION = episodes.c.metadata["eval"].as_string()
_LISTED = sa.select(
    episodes.c.seq, episodes.c.id, tasks.c.id.label("task_id"),
    sa.func.substr(sa.cast(tasks.c.input, sa.Text), 1, _PREVIEW).label("task_preview"),
    episodes.c.group_id, episodes.c["index"], episodes.c.split, episodes.c.status, episodes.c.error,
    episodes.c.limit_reached, _EVALUATION.label("evaluation"), episodes.c.created_at, episodes.c.ended_at,
    _SCORE.label("score"), _STEP.label("step"),
).join(tasks, tasks.c.uid == episodes.c.task_uid)  # fmt: skip


def episode_page(
    connection: sa.Connection,
    wanted: EpisodeFilter,
    *,
    before: int | None = None,
    limit: int = 50,
    budget_s: float = 0.12,
    clock: Callable[[], float] = time.perf_counter,
) -> EpisodePage:
    """Return the newest episodes that match, of those before the position `before` (None: of all)."""
    newest = connection.execute(sa.select(sa.func.max(episodes.c.seq))).scalar_one() or 0
    first = newest + 1 if before is None else min(before, newest + 1)
    end, began = first, clock()
    width = _FIRST_EPISODES_OF_TEXTS if wanted.tool or wanted.text else _FIRST_EPISODES
    found: list[int] = []
    while end > 1 and len(found) < limit:
        chunk_began = clock()
        start = max(1, end - width)
        for seq in _matching(connection, wanted, start, end):
            found.append(seq)
            if len(found) == limit:
                start = seq
                break
        end = start
        now = clock()
        if now - began > budget_s:
            break
        width = max(16, int(width * min(4.0, _CHUNK_S / max(now - chunk_began, 1e-4))))
    return EpisodePage(
        episodes=_listed(connection, episodes.c.seq.in_(found)),
        next=end if end > 1 else None,
        searched=first - end,
        newest=newest,
    )


def _matching(connection: sa.Connection, wanted: EpisodeFilter, start: int, end: int) -> Iterator[int]:
    """Yield the positions from `start` to before `end` whose episodes match, the newest first."""
    query = (
        sa.select(episodes.c.seq, episodes.c.id, episodes.c.error)
        .where(episodes.c.seq >= start, episodes.c.seq < end)
        .order_by(episodes.c.seq.desc())
    )
    for condition in _conditions(wanted):
        query = query.where(condition)
    for seq, episode_id, error in connection.execute(query):
        if (not wanted.tool and not wanted.text) or _has_texts(connection, episode_id, error, wanted):
            yield seq


def _conditions(wanted: EpisodeFilter) -> Iterator[sa.ColumnElement[bool]]:
    if wanted.split is not None:
        yield episodes.c.split == wanted.split
    if wanted.status is not None:
        yield episodes.c.status == wanted.status
    if wanted.group:
        yield episodes.c.group_id == wanted.group
    if wanted.task:
        yield episodes.c.task_uid.in_(sa.select(tasks.c.uid).where(tasks.c.id == wanted.task))
    if wanted.min_reward is not None:
        yield wanted.min_reward <= _SCORE
    if wanted.max_reward is not None:
        yield wanted.max_reward >= _SCORE
    if wanted.step is not None:
        yield episodes.c.group_id.in_(
            sa.select(leases.c.group_id).where(leases.c.step == wanted.step, leases.c.use == 0)
        )
    if wanted.evaluation:
        yield wanted.evaluation == _EVALUATION
    if wanted.has_error is not None:
        yield episodes.c.error.is_not(None) if wanted.has_error else episodes.c.error.is_(None)
    # The records are JSON, in which the strings may be part of a name; what is found is read and compared.
    record = sa.cast(turns.c.record, sa.Text)
    of_episode = sa.exists().where(turns.c.episode_id == episodes.c.id, turns.c.codec != EMPTIED)
    if wanted.tool:
        name = orjson.dumps(wanted.tool).decode()
        yield of_episode.where(record.contains(f'"name":{name}', autoescape=True))
    if wanted.text:
        text = orjson.dumps(wanted.text).decode()[1:-1]
        yield sa.or_(
            of_episode.where(record.contains(text, autoescape=True)),
            episodes.c.error.contains(wanted.text, autoescape=True),
        )


def _has_texts(connection: sa.Connection, episode_id: str, error: str | None, wanted: EpisodeFilter) -> bool:
    """Whether an episode called the wanted tool, and has the wanted string in one of its texts."""
    records = connection.execute(
        sa.select(turns.c.record).where(turns.c.episode_id == episode_id, turns.c.codec != EMPTIED)
    ).scalars()
    needs_tool, text = bool(wanted.tool), _folded(wanted.text)
    needs_text = bool(text) and text not in _folded(error or "")
    for record in map(orjson.loads, records):
        for message in (*record["messages"], record["reply"]):
            calls = message.get("tool_calls", ())
            needs_tool = needs_tool and all(call["name"] != wanted.tool for call in calls)
            needs_text = needs_text and not any(text in _folded(part) for part in _texts(message))
        if not needs_tool and not needs_text:
            return True
    return not needs_tool and not needs_text


def _folded(text: str) -> str:
    return "".join(c.lower() if c.isascii() else c for c in text) if not text.isascii() else text.lower()


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    yield message["content"]
    yield message.get("reasoning", "")
    for call in message.get("tool_calls", ()):
        yield call["name"]
        yield call["arguments"]


def _listed(connection: sa.Connection, condition: sa.ColumnElement[bool]) -> list[ListedEpisode]:
    """Return the episodes that a condition selects, the newest first."""
    rows = connection.execute(_LISTED.where(condition).order_by(episodes.c.seq.desc())).mappings().all()
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
            .where(turns.c.episode_id.in_([row["id"] for row in rows]))
            .group_by(turns.c.episode_id)
        )
    }
    out = []
    for row in rows:
        count, sampled, version_min, version_max = calls.get(row["id"], (0, 0, None, None))
        out.append(
            ListedEpisode(
                **row, turns=count, sampled_tokens=sampled, version_min=version_min, version_max=version_max
            )
        )
    return out


def has_episode(connection: sa.Connection, episode_id: str) -> bool:
    """Whether there is an episode with this id."""
    query = sa.select(sa.exists().where(episodes.c.id == episode_id))
    return bool(connection.execute(query).scalar_one())


def listed_episode(connection: sa.Connection, episode_id: str) -> ListedEpisode:
    """Return one episode in the form of a list. Raises NotFound if there is none with this id."""
    found = _listed(connection, episodes.c.id == episode_id)
    if not found:
        raise NotFound(f"no episode {episode_id}")
    return found[0]


def neighbours(connection: sa.Connection, seq: int) -> tuple[str | None, str | None]:
    """Return the ids of the episodes opened before and after a position."""

    def nearest(condition: sa.ColumnElement[bool], order: sa.ColumnElement[Any]) -> str | None:
        query = sa.select(episodes.c.id).where(condition).order_by(order).limit(1)
        return connection.execute(query).scalar_one_or_none()

    return (
        nearest(episodes.c.seq < seq, episodes.c.seq.desc()),
        nearest(episodes.c.seq > seq, episodes.c.seq.asc()),
    )


def turn_marks(connection: sa.Connection, episode_id: str) -> list[tuple[str, float, bool]]:
    """Return (id, when it was recorded, whether its texts are there) of each turn of an episode, in order."""
    query = sa.select(turns.c.id, turns.c.created_at, turns.c.codec != EMPTIED)
    return [
        (turn_id, created_at, bool(kept))
        for turn_id, created_at, kept in connection.execute(
            query.where(turns.c.episode_id == episode_id).order_by(turns.c.seq)
        )
    ]


def kept_turns(connection: sa.Connection, episode_id: str) -> dict[str, Turn]:
    """Return by id the turns of an episode whose texts are there, in order, without routed experts."""
    columns = [column for column in turns.c if column is not turns.c.routed_experts]
    query = sa.select(*columns).where(turns.c.episode_id == episode_id, turns.c.codec != EMPTIED)
    return {row["id"]: decode_turn(row) for row in connection.execute(query.order_by(turns.c.seq)).mappings()}


def rewards_of(connection: sa.Connection, episode_id: str) -> list[Reward]:
    """Return the rewards of an episode, in the order in which they were given."""
    query = sa.select(rewards).where(rewards.c.episode_id == episode_id)
    return [
        Reward(row.scope, row.target, row.name, row.value)
        for row in connection.execute(query.order_by(rewards.c.created_at, rewards.c.target, rewards.c.name))
    ]


def task_of(connection: sa.Connection, episode_id: str) -> Task:
    """Return the task of an episode. Raises NotFound."""
    query = sa.select(tasks.c.id, tasks.c.input).join(episodes, episodes.c.task_uid == tasks.c.uid)
    row = connection.execute(query.where(episodes.c.id == episode_id)).one_or_none()
    if row is None:
        raise NotFound(f"no episode {episode_id}")
    return Task(row.id, row.input)


def batch_version(connection: sa.Connection, group_id: str) -> int | None:
    """Return the trainer's version when it began the batch that a group was trained in first.

    None: the group is not trained.
    """
    trained_into = (
        sa.select(leases.c.version).where(leases.c.group_id == group_id, leases.c.use == 0).scalar_subquery()
    )
    query = sa.select(sa.func.max(versions.c.version)).where(versions.c.version < trained_into)
    return connection.execute(query).scalar_one_or_none()


def steps_of_group(connection: sa.Connection, group_id: str) -> list[int]:
    """Return the training steps that took a group, the first one first."""
    query = sa.select(leases.c.step).where(leases.c.group_id == group_id).order_by(leases.c.use)
    return list(connection.execute(query).scalars())


@dataclass(frozen=True, slots=True)
class ListedGroup:
    """A group with its episodes, by index.

    Attributes:
        state: pending, complete, leased, trained or dropped.
        step: the training step that took it first; None if none has.
        uses: how often it was leased.
    """

    id: str
    task_id: str
    task: Any
    split: Split
    size: int
    state: Literal["pending", "complete", "leased", "trained", "dropped"]
    reason: str | None
    step: int | None
    version: int | None
    uses: int
    created_at: float
    completed_at: float | None
    episodes: list[ListedEpisode]


def group_of(connection: sa.Connection, group_id: str) -> ListedGroup:
    """Return a group. Raises NotFound if there is none with this id."""
    found = _groups(connection, groups.c.id == group_id)
    if not found:
        raise NotFound(f"no group {group_id}")
    return found[0]


def groups_of_step(connection: sa.Connection, step: int) -> list[ListedGroup]:
    """Return the groups that a training step took for the first time, in the order of their creation."""
    taken = sa.select(leases.c.group_id).where(leases.c.step == step, leases.c.use == 0)
    return _groups(connection, groups.c.id.in_(taken))


def _groups(connection: sa.Connection, condition: sa.ColumnElement[bool]) -> list[ListedGroup]:
    query = (
        sa.select(groups, tasks.c.id.label("task_id"), tasks.c.input)
        .join(tasks, tasks.c.uid == groups.c.task_uid)
        .where(condition)
        .order_by(groups.c.seq)
    )
    rows = connection.execute(query).all()
    ids = [row.id for row in rows]
    uses: dict[str, list[sa.Row]] = {group_id: [] for group_id in ids}
    for lease in connection.execute(
        sa.select(leases).where(leases.c.group_id.in_(ids)).order_by(leases.c.use)
    ):
        uses[lease.group_id].append(lease)
    members: dict[str, list[ListedEpisode]] = {group_id: [] for group_id in ids}
    for episode in _listed(connection, episodes.c.group_id.in_(ids)):
        members[str(episode.group_id)].append(episode)
    return [
        ListedGroup(
            id=row.id,
            task_id=row.task_id,
            task=row.input,
            split=row.split,
            size=row.size,
            state=uses[row.id][0].state if uses[row.id] else row.state,
            reason=(uses[row.id][0].reason if uses[row.id] else None) or row.reason,
            step=uses[row.id][0].step if uses[row.id] else None,
            version=uses[row.id][0].version if uses[row.id] else None,
            uses=len(uses[row.id]),
            created_at=row.created_at,
            completed_at=row.completed_at,
            episodes=sorted(members[row.id], key=lambda episode: (episode.index, episode.seq)),
        )
        for row in rows
    ]


def counts(connection: sa.Connection) -> dict[str, dict[str, int]]:
    """Return the number of episodes by split and status."""
    query = sa.select(episodes.c.split, episodes.c.status, sa.func.count()).group_by(
        episodes.c.status, episodes.c.split
    )
    out: dict[str, dict[str, int]] = {"train": {}, "eval": {}}
    for split, status, count in connection.execute(query):
        out[split][status] = count
    return out


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The last attempts at the tasks of an evaluation that began after training step `step`.

    Attributes:
        reward: their mean score, in which a failed episode counts as 0.
        fingerprint: a name of what they were played with; "" if that was not recorded.
    """

    label: str
    step: int
    episodes: int
    failed: int
    reward: float
    began: float
    ended: float | None
    fingerprint: str = ""


def evaluations(connection: sa.Connection) -> list[Evaluation]:
    """Return the evaluations in the order in which they began.

    If the weights of a step were evaluated with several fingerprints, the evaluation with that of the newest
    evaluation counts, or the last one.
    """
    of_evaluation = (episodes.c.split == "eval") & (episodes.c.status != "aborted") & _EVALUATION.is_not(None)
    step = sa.func.coalesce(episodes.c.metadata["step"].as_integer(), 0)
    fingerprint = sa.func.coalesce(episodes.c.metadata[FINGERPRINT].as_string(), "")
    attempt = sa.func.coalesce(episodes.c.metadata["attempt"].as_integer(), 0)
    # PostgreSQL groups by columns, and not by expressions with parameters.
    attempts = (
        sa.select(
            _EVALUATION.label("label"),
            step.label("step"),
            fingerprint.label("fingerprint"),
            attempt.label("attempt"),
            episodes.c.seq,
            episodes.c.task_uid,
        )
        .where(of_evaluation)
        .subquery()
    )
    last_attempts = sa.select(sa.func.max(attempts.c.seq)).group_by(
        attempts.c.label, attempts.c.step, attempts.c.fingerprint, attempts.c.attempt, attempts.c.task_uid
    )
    failed = episodes.c.status == "failed"
    query = (
        sa.select(
            attempts.c.label,
            attempts.c.step,
            sa.func.count(),
            sa.func.sum(sa.case((failed, 1), else_=0)),
            sa.func.sum(sa.case((failed, 0.0), else_=sa.func.coalesce(_SCORE, 0.0))),
            sa.func.min(episodes.c.created_at),
            sa.func.max(episodes.c.ended_at),
            attempts.c.fingerprint,
            sa.func.max(episodes.c.seq),
        )
        .join(attempts, attempts.c.seq == episodes.c.seq)
        .where(episodes.c.seq.in_(last_attempts), episodes.c.status.in_(("finished", "truncated", "failed")))
        .group_by(attempts.c.label, attempts.c.step, attempts.c.fingerprint)
        .order_by(sa.func.min(episodes.c.seq))
    )
    rows = connection.execute(query).all()
    newest = max(rows, key=lambda row: row[8])[7] if rows else ""
    by_label: dict[str, Evaluation] = {}
    for label, at, count, failures, total, began, ended, played_with, _ in rows:
        # A run that was extended evaluates "after" again; the later evaluation counts.
        earlier = by_label.get(label)
        if earlier is None or at > earlier.step or (at == earlier.step and earlier.fingerprint != newest):
            by_label[label] = Evaluation(label, at, count, failures, total / count, began, ended, played_with)
    return list(by_label.values())


def version_times(connection: sa.Connection) -> list[tuple[int, int, float]]:
    """Return (version, step, when it was published) of every version."""
    query = sa.select(versions.c.version, versions.c.step, versions.c.published_at)
    return [(row[0], row[1], row[2]) for row in connection.execute(query.order_by(versions.c.version))]


def checkpoint_times(connection: sa.Connection) -> list[tuple[int, float]]:
    """Return (step, when it was written) of every checkpoint."""
    query = sa.select(checkpoints.c.step, checkpoints.c.created_at).order_by(checkpoints.c.step)
    return [(row[0], row[1]) for row in connection.execute(query)]


@dataclass(frozen=True, slots=True)
class OpenEpisodes:
    """How many episodes were open at equally spaced times, and when episodes failed.

    Attributes:
        start, end: when the first episode was opened, and when the last one was opened or ended.
        counts: how many were open at the end of each part of the time between.
        failed: when the newest of the failed episodes ended, the newest first.
    """

    start: float
    end: float
    counts: list[int]
    failed: list[float]


def open_episodes_by_time(connection: sa.Connection, parts: int, most_failed: int) -> OpenEpisodes | None:
    """Return how many episodes were open in each of so many parts of the run; None without an episode."""
    opened, ended = episodes.c.created_at, episodes.c.ended_at
    start, last_opened, last_ended = connection.execute(
        sa.select(sa.func.min(opened), sa.func.max(opened), sa.func.max(ended))
    ).one()
    if start is None:
        return None
    end = max(last_opened, last_ended or last_opened)
    width = (end - start) / parts or 1.0
    change = [0] * (parts + 1)
    for column, by in ((opened, 1), (ended, -1)):
        # SQLite's cast cuts the fraction off, and PostgreSQL's rounds.
        whole = sa.func.trunc if connection.dialect.name == "postgresql" else lambda number: number
        part = sa.cast(whole((column - start) / width), sa.Integer)
        query = sa.select(part, sa.func.count()).where(column.is_not(None)).group_by(part)
        for index, count in connection.execute(query):
            change[min(max(index, 0), parts)] += by * count
    counts = list(itertools.accumulate(change))[:parts]
    query = sa.select(ended).where(episodes.c.status == "failed", ended.is_not(None))
    failed = connection.execute(query.order_by(episodes.c.seq.desc()).limit(most_failed)).scalars()
    return OpenEpisodes(start, end, counts, list(failed))
