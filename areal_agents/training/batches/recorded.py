"""Trains on episodes that a store already contains, without an engine: each group once per epoch.

The order is a function of seed and epoch, so a checkpoint only needs the position in it. The store is only
read: the run's checkpoints, not marks on the groups, record what was trained.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.samples import PreparedGroup, assemble_batch
from areal_agents.algorithms.staleness import StalenessReport
from areal_agents.core.rollout import Rollout, RolloutGroup
from areal_agents.core.sample import TrainingSample
from areal_agents.errors import TrainingError
from areal_agents.store import Store
from areal_agents.training.batches.checks import (
    Refused,
    SampleLimits,
    equal_refusal,
    prepare,
    read_groups,
    refused_samples,
)
from areal_agents.training.batches.leasing import Batch, Dropped, QueueReport, keep_samples

_SCORED = ("finished", "truncated")
_NOTHING = {  # why a valid group may contain nothing to train on, by loss
    "sft": "none of its episodes is good enough (algorithm.sft_min_score; without it, scores must differ)",
    "dpo": "its episodes all have the same score, so no better episode can be paired with a worse one",
}
_NOTHING_ELSE = (
    "its episodes all have the same score (algorithm.drop_equal_groups), or none of its turns is trained"
)


def recorded_store(path_or_url: str) -> str | Path:
    """Return the store that `data.episodes` names: a store, or the folder of a run."""
    folder = Path(path_or_url)
    return folder / "store.db" if folder.is_dir() else path_or_url


@dataclass(frozen=True, slots=True)
class RecordedGroups:
    """The training groups of a store, in the order of their recording.

    Attributes:
        units: pairs (id, whether it is a group) of groups that were completed and not dropped, and of scored
            episodes without a group, each of which is a unit of its own.
    """

    store: Store
    units: tuple[tuple[str, bool], ...]
    seed: int

    @classmethod
    def read(cls, store: Store, *, seed: int) -> RecordedGroups:
        """Read the groups of a store. Raise TrainingError if there is nothing to train on."""
        alone = [
            (episode.id, False)
            for episode in store.episodes(split="train")
            if episode.group_id is None and episode.status in _SCORED and episode.score is not None
        ]
        units = (*((group_id, True) for group_id in store.recorded_groups()), *alone)
        if not units:
            raise TrainingError(
                f"{store.url} contains no complete group and no scored episode with split train"
            )
        return cls(store, units, seed)

    def unit_at(self, position: int) -> tuple[str, bool]:
        """Return the unit at a position; each epoch is a different permutation."""
        epoch, index = divmod(position, len(self.units))
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.units))
        return self.units[int(order[index])]

    def load(self, unit: tuple[str, bool]) -> RolloutGroup | Refused:
        """Load a group; it is refused if its rows in the store are invalid."""
        name, is_group = unit
        if is_group:
            return read_groups(self.store, [name])[0]
        try:
            episode = self.store.load_episode(name)
        except (ValueError, KeyError, TypeError) as error:  # rows that contain no valid episode
            return Refused("bad", f"it cannot be read: {error}")
        return RolloutGroup(name, episode.task, (Rollout(episode.task, 0, episode, None),))


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
        if position - first >= len(source.units) and not taken:
            raise TrainingError(
                f"step {step}: none of the {len(source.units)} recorded groups has anything to train on; "
                f"the last reason: {reason}"
            )
        unit = source.unit_at(position)
        if unit[0] in {known.group.id for known in taken}:
            break  # even with fewer groups than a batch needs, no group occurs twice in one batch
        position += 1
        judged = _judge(source.load(unit), algorithm, limits)
        if isinstance(judged, Refused):
            dropped.note(unit[0], judged)
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
        QueueReport(len(source.units), 0, 0.0, 0.0, 0),
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
    data = assemble_batch([prepared], algorithm)
    if bad := refused_samples(data, algorithm, limits=limits, version=None):
        return bad[prepared.group.id]
    if algorithm.refill_equal_groups and data.report.equal_groups:
        return equal_refusal(algorithm)
    if not data.samples:
        return Refused("equal", _NOTHING.get(algorithm.policy_loss.kind, _NOTHING_ELSE))
    return prepared


def _without_version(sample: TrainingSample) -> TrainingSample:
    return replace(sample, versions=np.full_like(sample.versions, -1))
