"""Tasks, recorded episodes, and the groups that are trained on together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from areal_agents.core.forest import Forest
from areal_agents.core.trajectory import Turn

Split = Literal["train", "eval"]
EpisodeStatus = Literal["open", "finished", "truncated", "failed", "aborted"]
RewardScope = Literal["episode", "turn", "branch"]
LARGEST_GROUP = 65_536  # the most episodes of a group
OnStale = Literal["mask", "wait", "drop", "downweight"]  # see algorithms/staleness.py

AGENT_ERROR = "agent_error"  # name of the reward of an episode whose agent raised
DATA_SOURCE = "data_source"  # field of a task's input: the name of the source, if there are several
FINGERPRINT = "fingerprint"  # metadata of an episode: a name of what it was played with
# Metadata of the episodes that the runner opened, by which a restarted runner recognises its own.
OPENED_BY_RUNNER: Mapping[str, str] = {"source": "rollout"}
RUNNER = "runner"  # metadata of an episode: the rollout process that opened it, if there are several


@dataclass(frozen=True, slots=True)
class Task:
    """One task for an agent. `input` is the argument of the agent function."""

    id: str
    input: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward, keyed by (scope, target, name).

    Attributes:
        scope: "episode", "turn" or "branch".
        target: the turn's id, or the id of the branch's leaf; "" for the episode.
        name: distinguishes several rewards; a function's return value is named "return".
        value: a finite number.
    """

    scope: RewardScope
    target: str
    name: str
    value: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"a reward must be a finite number, got {self.value} for {self.name!r}")
        if (self.scope == "episode") != (self.target == ""):
            raise ValueError(
                "a reward must have the target '' with scope 'episode' and the id of a turn with any other "
                f"scope, got {self.target!r} with scope {self.scope!r}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class RecordedEpisode:
    """One attempt at a task: every call of the model, and the rewards."""

    id: str
    task: Task
    turns: tuple[Turn, ...]
    status: EpisodeStatus
    rewards: tuple[Reward, ...]
    forest: Forest = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "forest", Forest(self.turns))
        for reward in self.rewards:
            if reward.target and reward.target not in self.forest:
                raise ValueError(
                    f"episode {self.id} has a reward for {reward.target}, which is not one of its turns"
                )

    @property
    def score(self) -> float:
        """The sum of all its rewards, undiscounted, each once."""
        return math.fsum(reward.value for reward in self.rewards)

    @property
    def tool_calls(self) -> Counter[str]:
        """The number of tool calls that the model made, by the name of the tool."""
        return Counter(call.name for turn in self.turns for call in turn.reply.tool_calls)


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """Member `index` of a group: an episode, and the error that ended it if it failed."""

    task: Task
    index: int
    episode: RecordedEpisode
    error: str | None


def training_group_id(task_id: str, epoch: int) -> str:
    """Return the id of the group with which training plays a task for the (epoch + 1)th time."""
    return f"{task_id}@{epoch}"


def task_and_epoch(group_id: str) -> tuple[str, int]:
    """Return the task id and the epoch of a `training_group_id`; any other id is that of a task's epoch 0."""
    task_id, at, epoch = group_id.rpartition("@")
    return (task_id, int(epoch)) if at and epoch.isdecimal() else (group_id, 0)


@dataclass(frozen=True, slots=True, eq=False)
class RolloutGroup:
    """The rollouts of one task that share a baseline. None of them failed."""

    id: str
    task: Task
    rollouts: tuple[Rollout, ...]

    def __post_init__(self) -> None:
        if not self.rollouts:
            raise ValueError(f"group {self.id} must have at least one rollout, got none")
        for rollout in self.rollouts:
            if rollout.episode.status not in ("finished", "truncated"):
                raise ValueError(
                    f"group {self.id}: every episode must be finished or truncated, got status "
                    f"{rollout.episode.status!r}"
                )
            if rollout.task.id != self.task.id:
                raise ValueError(
                    f"group {self.id}: all rollouts must be of task {self.task.id}, got {rollout.task.id}"
                )
