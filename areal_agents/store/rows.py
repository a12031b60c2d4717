"""The records that reads of the store return: frozen dataclasses, one per kind of question."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from areal_agents.core.rollout import EpisodeStatus, Split, Task

GroupState = Literal["pending", "complete", "leased", "trained", "dropped"]
GROUP_STATES: tuple[GroupState, ...] = ("pending", "complete", "leased", "trained", "dropped")


@dataclass(frozen=True, slots=True)
class NewEpisode:
    """An episode to be opened.

    Attributes:
        id: unique.
        key_hash: sha256 of the key that the agent calls with, in hex.
        task: None takes the group's task, or makes an empty one.
        group_id: None for an episode outside any group; only training on recorded episodes takes it.
        group_size: places of the group. None: of another episode's group whatever it has, of a new one
            `default_group_size`.
        default_group_size: places of a new group whose first episode names none; without it that episode
            needs a `group_size`.
        surplus: places that the group has beyond its size; it is complete, and what it has beyond is
            aborted, as soon as as many episodes as its size are scored. None: of a new group none, of
            another whatever it has.
        index: place in the group; None takes the first free one.
        limits, sampling, metadata: kept as they are, JSON.
        implicit_key: set when a bare call opened it.
        only_one: refuse (Conflict) while another episode with this `implicit_key` is open.
        owner: the proxy worker that opens it; None with a single one.
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
    owner: str | None  # the proxy worker that has it in memory


def opened_row(new: NewEpisode, *, index: int, task_id: str, created_at: float) -> EpisodeRow:
    """The row of an episode that has just been opened, at place `index` of its group."""
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
    """An open episode, as housekeeping looks at it."""

    id: str
    is_implicit: bool
    owner: str | None


@dataclass(frozen=True, slots=True)
class EpisodeState:
    """What a write left an episode in; `turns` counts its model calls."""

    status: EpisodeStatus
    limit_reached: str | None
    turns: int


@dataclass(frozen=True, slots=True)
class EpisodeSummary:
    """An episode in a list.

    Attributes:
        score: sum of its rewards, None without any.
        turns: recorded model calls.
        sampled_tokens: over all of them.
        version_min, version_max: policy versions of its tokens, None before the first.
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
    """A pending group: per index, its attempts, oldest first (the last one counts).

    It is complete with `size` scored episodes, and has `surplus` places more than that.
    """

    id: str
    task: Task
    size: int
    surplus: int
    split: Split
    attempts: Mapping[int, tuple[EpisodeSummary, ...]]


@dataclass(frozen=True, slots=True)
class TurnTime:
    """When a turn was recorded, which is when its generation had ended; seconds since the epoch."""

    episode_id: str
    opened_at: float  # the episode
    recorded_at: float
    sampled_tokens: int


@dataclass(frozen=True, slots=True)
class UntrainedGroup:
    """A training group that is neither trained nor dropped; is_pending: it is not complete yet."""

    id: str
    is_pending: bool


@dataclass(frozen=True, slots=True)
class WaitingGroup:
    """A training group that was submitted and not yet taken by the trainer.

    Attributes:
        state: "pending" or "complete".
        version: no token of it is of an earlier step; 0 where an earlier release did not note it.
    """

    id: str
    state: GroupState
    version: int


@dataclass(frozen=True, slots=True)
class VersionRow:
    """A published policy version; `step` is the number of batches that it was trained on."""

    version: int
    step: int
    path: str
    checksum: str | None
    published_at: float


LIVE: tuple[EpisodeStatus, ...] = ("open", "finished", "truncated")
SCORED: tuple[EpisodeStatus, ...] = ("finished", "truncated")
