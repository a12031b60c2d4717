"""The records that the store takes and returns: frozen dataclasses, one per kind of query."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from areal_agents.core.rollout import EpisodeStatus, Reward, Split, Task
from areal_agents.core.trajectory import Turn

GroupState = Literal["pending", "complete", "leased", "trained", "dropped"]
CanaryState = Literal["candidate", "promoted", "rolled_back"]
GROUP_STATES: tuple[GroupState, ...] = ("pending", "complete", "leased", "trained", "dropped")


@dataclass(frozen=True, slots=True)
class NewEpisode:
    """An episode to be opened.

    Attributes:
        id: the episode's id, which is unique.
        key_hash: sha256 of the key that the agent calls with, in hex.
        task: the task; None: the group's task, or an empty task for a new group.
        group_id: the id of the group; None for an episode outside any group, which only training on recorded
            episodes uses.
        group_size: the size of the group. None: the size of an existing group, or `default_group_size` for
            a new one.
        default_group_size: the size of a new group whose first episode names none; without it that episode
            needs a `group_size`.
        surplus: the number of episodes that the group may have beyond its size. The group is complete, and
            its surplus episodes are aborted, as soon as as many episodes as its size are scored. None: the
            surplus of an existing group, or 0 for a new one.
        index: the index in the group; None: the first free one.
        limits, sampling, metadata: JSON objects, stored unchanged.
        implicit_key: the key of an episode that a call without an episode opened; None otherwise.
        only_one: refuse (Conflict) while another episode with this `implicit_key` is open.
        owner: the proxy worker that opens the episode; None if there is a single one.
        is_named: the caller chose the id, so another episode may have it.
    """

    id: str
    key_hash: str
    task: Task | None = None
    group_id: str | None = None
    group_size: int | None = None
    default_group_size: int | None = None
    surplus: int | None = None
    index: int | None = None
    split: Split = "train"
    metadata: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    implicit_key: str | None = None
    only_one: bool = False
    owner: str | None = None
    is_named: bool = False


@dataclass(frozen=True, slots=True)
class NewGroup:
    """A training group that one of several rollout processes would begin.

    Attributes:
        size, surplus: see `NewEpisode`.
        runner: the process, which alone may open episodes of the group.
        at_most: the gate, as the number of groups that may be submitted and not trained, with this one.
        at_step: the step for which that number was computed; None: it does not depend on the step.
    """

    id: str
    task: Task
    size: int
    surplus: int
    runner: str
    at_most: int
    at_step: int | None = None


@dataclass(frozen=True, slots=True)
class Admission:
    """What became of a `NewGroup`.

    Attributes:
        state: "begun"; "taken": the group exists, and is that of another process or has ended; "full": the
            gate admits no group now.
        seq: groups with smaller numbers were begun before; None unless it was begun.
    """

    state: Literal["begun", "taken", "full"]
    seq: int | None = None


@dataclass(frozen=True, slots=True)
class EndedEpisode:
    """An episode that has ended elsewhere, with everything that the store keeps of it."""

    new: NewEpisode
    turns: tuple[Turn, ...]
    rewards: tuple[Reward, ...]


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """An episode without its turns."""

    id: str
    key_hash: str
    task_id: str
    group_id: str | None
    index: int
    split: Split
    status: EpisodeStatus
    limit_reached: str | None
    error: str | None
    metadata: dict[str, Any]
    limits: dict[str, Any]
    sampling: dict[str, Any]
    implicit_key: str | None
    created_at: float  # seconds since the epoch
    ended_at: float | None
    owner: str | None  # the proxy worker that has the episode in memory


def opened_row(new: NewEpisode, *, index: int, task_id: str, created_at: float) -> EpisodeRow:
    """Return the row of an episode that has just been opened, with index `index` in its group."""
    return EpisodeRow(
        id=new.id,
        key_hash=new.key_hash,
        task_id=task_id,
        group_id=new.group_id,
        index=index,
        split=new.split,
        status="open",
        limit_reached=None,
        error=None,
        metadata=dict(new.metadata),
        limits=dict(new.limits),
        sampling=dict(new.sampling),
        implicit_key=new.implicit_key,
        created_at=created_at,
        ended_at=None,
        owner=new.owner,
    )


@dataclass(frozen=True, slots=True)
class OpenEpisode:
    """An open episode, as housekeeping needs it."""

    id: str
    is_implicit: bool
    owner: str | None


@dataclass(frozen=True, slots=True)
class EpisodeState:
    """The state of an episode after a write; `turns` is the number of its model calls."""

    status: EpisodeStatus
    limit_reached: str | None
    turns: int


@dataclass(frozen=True, slots=True)
class EpisodeSummary:
    """An episode in a list.

    Attributes:
        score: the sum of its rewards; None if it has none.
        turns: the number of recorded model calls.
        sampled_tokens: the number of sampled tokens over all turns.
        version_min, version_max: the range of policy versions of its tokens; None if it has none.
    """

    id: str
    task_id: str
    group_id: str | None
    index: int
    status: EpisodeStatus
    split: Split
    score: float | None
    turns: int
    sampled_tokens: int
    error: str | None
    version_min: int | None
    version_max: int | None
    metadata: dict[str, Any]
    created_at: float
    ended_at: float | None


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """A pending group: for each index its attempts, oldest first (the last one counts).

    It is complete with `size` scored episodes, and may have `surplus` episodes more than that. `runner` is
    the rollout process that plays it, if there are several; groups are begun in the order of `seq`.
    """

    id: str
    task: Task
    size: int
    surplus: int
    split: Split
    attempts: Mapping[int, tuple[EpisodeSummary, ...]]
    runner: str | None
    seq: int


@dataclass(frozen=True, slots=True)
class TurnTime:
    """When a turn was recorded, which is when its generation ended; in seconds since the epoch."""

    episode_id: str
    opened_at: float  # when the episode was opened
    recorded_at: float
    sampled_tokens: int


@dataclass(frozen=True, slots=True)
class Activity:
    """What goes on in a store; times are in seconds since the epoch.

    Attributes:
        open_episodes: the number of open training episodes.
        oldest_id, oldest_opened_at: the one of them that was opened first; None without one.
        open_evaluations: the number of open held-out episodes.
        last_turn_at: when the newest turn was recorded; None without one.
        unrewarded: the number of ended training episodes that wait for a reward.
    """

    open_episodes: int
    oldest_id: str | None
    oldest_opened_at: float | None
    open_evaluations: int
    last_turn_at: float | None
    unrewarded: int


@dataclass(frozen=True, slots=True)
class UntrainedGroup:
    """A training group that is neither trained nor dropped.

    It is `is_pending` if it is not complete yet; `runner` is the rollout process that plays it, if there are
    several.
    """

    id: str
    is_pending: bool
    runner: str | None = None


@dataclass(frozen=True, slots=True)
class WaitingGroup:
    """A training group that was submitted and not yet taken by the trainer.

    Attributes:
        state: "pending" or "complete".
        version: no token of the group is of an earlier step; 0 if an earlier release did not record it.
    """

    id: str
    state: GroupState
    version: int


@dataclass(frozen=True, slots=True)
class TaskGroup:
    """A group of a task.

    Attributes:
        version: the newest policy version that sampled one of its tokens; None if it has none.
    """

    id: str
    task_id: str
    version: int | None


@dataclass(frozen=True, slots=True)
class GroupUse:
    """One time that the trainer took a group; `use` 0 is the first.

    Attributes:
        state: "leased", "trained" or "dropped".
        version: the version that it was trained into, None if it was not (yet).
        reason: why it was dropped.
    """

    use: int
    state: GroupState
    step: int
    version: int | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """What the trainer was given in a step that it completed.

    Attributes:
        version: the trainer's version when the batch began.
        uses: the groups of the batch by id, each with how often earlier steps had trained on it.
    """

    step: int
    version: int
    uses: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class GroupHistory:
    """A group, and what the trainer did with it.

    Attributes:
        size: the number of episodes that it needs; scored: how many are finished or truncated and rewarded.
        state: as in `Store.group_counts`: the trainer's state of its first use, else that of the group.
        reason: why it was dropped, before the trainer took it.
        uses: in order.
    """

    id: str
    split: Split
    size: int
    scored: int
    state: GroupState
    reason: str | None
    uses: tuple[GroupUse, ...]


@dataclass(frozen=True, slots=True)
class VersionRow:
    """A published policy version; `step` is the number of batches that were trained into it.

    `folder_pending` is set while the folder at `path` is not complete: the weights were sent to the engines
    first, and the folder is written behind them, or not at all. `object_folder` is the version's folder in an
    object storage, from which engines get it, and `checksum` that of its manifest; None: they get it in
    another way.

    With `rollout.canary`, `canary` is the state of a version that was published for a `share` of the
    conversations. Those opened after the one with number `canary_after` are compared, and `verdict` says why
    it was promoted or rolled back; these are None before that.
    """

    version: int
    step: int
    path: str
    checksum: str | None
    published_at: float
    folder_pending: bool = False
    object_folder: str | None = None
    canary: CanaryState | None = None
    share: float | None = None
    canary_after: int | None = None
    verdict: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ServedVersions:
    """What replicas serve: `stable`, and those of the canary `candidate`, if there is one."""

    stable: VersionRow
    candidate: VersionRow | None


@dataclass(frozen=True, slots=True)
class ScoredConversation:
    """A rewarded implicit episode that has ended; `version_min` is the oldest version of its tokens."""

    id: str
    score: float
    version_min: int


LIVE: tuple[EpisodeStatus, ...] = ("open", "finished", "truncated")
SCORED: tuple[EpisodeStatus, ...] = ("finished", "truncated")
