"""Trains on episodes that a store already contains, without an engine: each group once per epoch.

The order is a function of seed and epoch, so a checkpoint only needs the position in it. The store is only
read: the run's checkpoints, not marks on the groups, record what was trained.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.credit.estimators import GdpoEstimator, MaxRlEstimator
from areal_agents.algorithms.samples import PreparedGroup, assemble_batch, needs_behavior
from areal_agents.algorithms.staleness import StalenessReport
from areal_agents.core.rollout import RecordedEpisode, Rollout, RolloutGroup, Split
from areal_agents.core.sample import TrainingSample
from areal_agents.errors import TrainingError
from areal_agents.store import Store
from areal_agents.store.urls import shown_store
from areal_agents.training.batches.checks import (
    Refused,
    SampleLimits,
    equal_refusal,
    prepare,
    read_groups,
    refused_samples,
)
from areal_agents.training.batches.leasing import Batch, Dropped, QueueReport, keep_samples

_NOTHING = {  # by loss, why a valid group may contain nothing to train on
    "sft": "none of its episodes is good enough (algorithm.sft_min_score; without it, scores must differ)",
    "dpo": "its episodes all have the same score, so no better episode can be paired with a worse one",
}
_ALONE = (
    "it is a single episode, and the algorithm compares the episodes of one task: send the header "
    "X-Episode-Task with the calls of each task, or choose an algorithm with estimator: group or gae"
)
_NOTHING_ELSE = "its episodes all have one score (algorithm.drop_equal_groups), or none of its turns counts"


def recorded_store(path_or_url: str) -> str | Path:
    """Return the store that `data.episodes` names: a store, or the folder of a run."""
    folder = Path(path_or_url)
    return folder / "store.db" if folder.is_dir() else path_or_url


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """A group to train on.

    Attributes:
        id: the id of a group in the store, or the task id of `episodes`.
        episodes: the ids of the episodes of one task that have no group in the store; () for a stored group.
    """

    id: str
    episodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RecordedGroups:
    """The groups of a store, in the order of their recording.

    Attributes:
        groups: the groups that were completed and not dropped, and then the rewarded episodes without a
            group, those of one task together.
        split: the split of the episodes. The sampling of "eval" was not pinned when they were recorded, so
            their turns count as constrained if they were not sampled from the policy itself.
    """

    store: Store
    groups: tuple[RecordedGroup, ...]
    seed: int
    split: Split = "train"

    @classmethod
    def read(cls, store: Store, *, seed: int, split: Split = "train") -> RecordedGroups:
        """Read the groups of a split. Raises TrainingError if it has nothing to train on."""
        by_task: dict[str, list[str]] = {}
        for episode_id, task_id in store.recorded_alone(split):
            by_task.setdefault(task_id, []).append(episode_id)
        groups = (
            *(RecordedGroup(group_id) for group_id in store.recorded_groups(split)),
            *(RecordedGroup(task_id, tuple(members)) for task_id, members in by_task.items()),
        )
        if not groups:
            raise TrainingError(
                f"{shown_store(store.url)} holds nothing to train on: {_why_nothing(store, split)}"
            )
        return cls(store, groups, seed, split)

    def refuse_imported(self, algorithm: AlgorithmConfig) -> None:
        """Raise TrainingError if there are imported episodes and the algorithm needs behavior logprobs."""
        count = self.store.imported_episodes(self.split)
        if count and not algorithm.is_supervised:
            raise TrainingError(
                f"{shown_store(self.store.url)} has {count} imported episodes: {needs_behavior(algorithm)}; "
                "or import into a store of its own, and leave these episodes out"
            )

    def fewer_than(self, groups: int) -> str | None:
        """Say that there are fewer groups than a batch of `groups` has; None if there are enough."""
        if len(self.groups) >= groups:
            return None
        return (
            f"{shown_store(self.store.url)} has {len(self.groups)} groups to train on, fewer than "
            f"rollout.groups ({groups}): each batch has at most {len(self.groups)}"
        )

    def group_at(self, position: int) -> RecordedGroup:
        """Return the group at a position; each epoch is a different permutation."""
        epoch, index = divmod(position, len(self.groups))
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.groups))
        return self.groups[int(order[index])]

    def following(self, position: int, most: int, *, without: Collection[str]) -> list[RecordedGroup]:
        """Return at most `most` groups from a position on, up to the first that would occur twice."""
        found: list[RecordedGroup] = []
        for at in range(position, position + most):
            group = self.group_at(at)
            if group in found or group.id in without:
                break
            found.append(group)
        return found

    def load(self, groups: Sequence[RecordedGroup]) -> list[RolloutGroup | Refused]:
        """Load groups, in their order; each is refused if its rows in the store are invalid."""
        stored = iter(read_groups(self.store, [group.id for group in groups if not group.episodes]))
        return [
            self._load_episodes(group) if group.episodes else self._with_pins(next(stored))
            for group in groups
        ]

    def _with_pins(self, group: RolloutGroup | Refused) -> RolloutGroup | Refused:
        """Return a stored group whose turns are constrained as they would be in split train."""
        if isinstance(group, Refused) or self.split == "train":
            return group
        unpinned = (replace(r, episode=_with_constrained_turns(r.episode)) for r in group.rollouts)
        return replace(group, rollouts=tuple(unpinned))

    def _load_episodes(self, group: RecordedGroup) -> RolloutGroup | Refused:
        try:
            episodes = self.store.load_episodes(group.episodes)
        except (ValueError, KeyError, TypeError) as error:  # rows that hold no episode
            return Refused("bad", f"it cannot be read: {error}")
        # An implicit episode is trained on as far as it has been recorded.
        episodes = [replace(e, status="finished") if e.status == "open" else e for e in episodes]
        if self.split == "eval":
            episodes = [_with_constrained_turns(episode) for episode in episodes]
        rollouts = tuple(Rollout(episode.task, n, episode, None) for n, episode in enumerate(episodes))
        return RolloutGroup(group.id, episodes[0].task, rollouts)


def _with_constrained_turns(episode: RecordedEpisode) -> RecordedEpisode:
    """Return an episode whose sampling was not pinned, with `constrained` as it is for split train."""
    turns = (
        replace(turn, constrained=turn.constrained or turn.sampling.changes_the_policy)
        for turn in episode.turns
    )
    return replace(episode, turns=tuple(turns))


def _why_nothing(store: Store, split: Split) -> str:
    """Describe what a store holds instead of groups and rewarded episodes of the split."""
    episodes = store.episodes()
    if not episodes:
        return "it has no episodes"
    counts = Counter((episode.split, episode.score is not None) for episode in episodes)
    if split == "train" and not counts["train", True] and (scored := counts["eval", True]):
        return (
            f"its {scored} rewarded episodes are of split eval, for which the agent chooses the sampling; "
            "data.split=eval trains on their turns at temperature 1 without truncation or penalty, and serve "
            "records split train unless it is started with --split eval"
        )
    if not counts[split, True]:
        if split == "eval" and counts["train", True]:
            return f"its {counts['train', True]} rewarded episodes are of split train; leave data.split out"
        return (
            f"none of its {len(episodes)} episodes has a reward; reward completions (POST /rewards) or "
            "episodes (POST /episodes/ID/reward)"
        )
    return (
        f"its {counts[split, True]} rewarded episodes of split {split} are still open, or in groups that are "
        "not complete; finish them (POST /episodes/ID/finish)"
    )


def next_recorded_batch(
    source: RecordedGroups,
    algorithm: AlgorithmConfig,
    *,
    groups: int,
    step: int,
    position: int,
    limits: SampleLimits,
    stop: threading.Event,
) -> Batch | None:
    """Return the batch of `groups` groups starting at `position`; None if a stop is requested.

    A group that cannot be trained on or has nothing to train on is skipped. Tokens keep the logprobs of the
    policy that sampled them, but not its version numbers, which belong to another run.

    Raises:
        TrainingError: a whole epoch has nothing to train on, or as in `next_batch`.
    """
    started, first = time.monotonic(), position
    taken: list[PreparedGroup] = []
    dropped = Dropped(step=step, groups=groups)
    reason = ""
    while len(taken) < groups:
        if stop.is_set():
            return None
        if position - first >= len(source.groups) and not taken:
            raise TrainingError(
                f"step {step}: none of the {len(source.groups)} recorded groups has anything to train on; "
                f"the last reason: {reason}"
            )
        known_ids = {known.group.id for known in taken}
        most = groups - len(taken) if taken else min(groups, first + len(source.groups) - position)
        following = source.following(position, most, without=known_ids)
        if not following:
            break  # with fewer groups than a batch, none occurs twice in one batch
        position += len(following)
        for recorded, group in zip(following, source.load(following), strict=True):
            judged = _judge(group, algorithm, limits)
            if isinstance(judged, Refused):
                dropped.note(recorded.id, judged)
                reason = judged.reason
            else:
                taken.append(judged)
    dropped.log()
    data = assemble_batch(taken, algorithm)
    data = keep_samples(data, map(_without_version, data.samples))
    return Batch(
        tuple(known.group.id for known in taken),
        data,
        StalenessReport(np.empty(0, np.int32), 0, 0),
        QueueReport(len(source.groups), 0, 0.0, 0.0, 0),
        0,
        time.monotonic() - started,
        equal_groups=dropped.equal,
        bad_groups=dropped.bad,
        position=position,
    )


def _judge(
    group: RolloutGroup | Refused, algorithm: AlgorithmConfig, limits: SampleLimits
) -> PreparedGroup | Refused:
    """The prepared group, or a refusal if it cannot be trained on or has nothing to train on."""
    prepared = group if isinstance(group, Refused) else prepare(group, algorithm)
    if isinstance(prepared, Refused):
        return prepared
    if len(prepared.group.rollouts) == 1:
        if _compares_episodes_of_a_task(algorithm):
            return Refused("equal", _ALONE)
        # The baseline of a single episode is the mean of its batch, which is not known yet.
        algorithm = algorithm.model_copy(update={"drop_equal_groups": False, "refill_equal_groups": False})
    data = assemble_batch([prepared], algorithm)
    if bad := refused_samples(data, algorithm, limits=limits, version=None):
        return bad[prepared.group.id]
    if algorithm.refill_equal_groups and data.report.equal_groups:
        return equal_refusal(algorithm)
    if not data.samples:
        return Refused("equal", _NOTHING.get(algorithm.policy_loss.kind, _NOTHING_ELSE))
    return prepared


def _compares_episodes_of_a_task(algorithm: AlgorithmConfig) -> bool:
    """Whether a single episode of a task has nothing to learn from, even in a batch of others."""
    within_task = isinstance(algorithm.estimator, MaxRlEstimator | GdpoEstimator)
    return within_task or algorithm.policy_loss.kind == "dpo" or algorithm.teacher == "self"


def _without_version(sample: TrainingSample) -> TrainingSample:
    return replace(sample, versions=np.full_like(sample.versions, -1))
