"""Batches of a rerun: the groups of steps that a run has already trained, in the same order.

The store of the run is only read. A token is as stale as when the run trained on it, and its behavior
logprobs are the recorded ones.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.samples import PreparedGroup, TrainingData, assemble_batch
from areal_agents.algorithms.staleness import mask_stale
from areal_agents.core.rollout import RecordedEpisode, Reward, RolloutGroup
from areal_agents.core.sample import TrainingSample
from areal_agents.errors import TrainingError
from areal_agents.store import TrainedStep, reads, versions
from areal_agents.store.read_only import ReadOnlyStore
from areal_agents.training.batches.checks import Refused, SampleLimits, prepare, refused_samples
from areal_agents.training.batches.leasing import Batch, Dropped, QueueReport, keep_samples
from areal_agents.training.batches.staleness import Lineage, StalenessBound
from areal_agents.training.checkpoint.checkpoint import TrainingProgress


@dataclass(frozen=True, slots=True)
class StoredSteps:
    """The trained steps of a run.

    Attributes:
        steps: the steps by number.
        max_staleness: η of the run, so that the same tokens are masked.
        rewards: by episode id, the rewards that replace all recorded ones; absent episodes keep theirs.
    """

    store: ReadOnlyStore
    steps: Mapping[int, TrainedStep]
    max_staleness: int | None
    rewards: Mapping[str, tuple[Reward, ...]]

    @classmethod
    def read(
        cls,
        store: ReadOnlyStore,
        *,
        max_staleness: int | None,
        rewards: Mapping[str, tuple[Reward, ...]] | None = None,
    ) -> StoredSteps:
        """Find the trained steps in a store. Raises StoreError if it cannot be read."""
        with store.read() as connection:
            return cls(store, reads.trained_steps(connection), max_staleness, rewards or {})

    def groups(self, step: TrainedStep) -> list[RolloutGroup]:
        """Load the groups of a step, ordered by id, with comparable versions and their new rewards.

        Raises:
            TrainingError: a new reward is for a turn that its episode does not have.
        """
        with self.store.read() as connection:
            found = reads.load_groups(connection, sorted(step.uses))
            lineage = Lineage.behind(step.version, versions.steps_behind(connection, step.version))
        try:
            return [self._with_rewards(lineage.of_group(group)) for group in found]
        except ValueError as error:
            raise TrainingError(
                f"step {step.step} cannot be trained with the new rewards: {error}"
            ) from error

    def with_rewards(self, episode: RecordedEpisode) -> RecordedEpisode:
        """Return an episode with its new rewards if it has any, else with the recorded ones."""
        return replace(episode, rewards=self.rewards.get(episode.id, episode.rewards))

    def _with_rewards(self, group: RolloutGroup) -> RolloutGroup:
        rollouts = (
            replace(rollout, episode=self.with_rewards(rollout.episode)) for rollout in group.rollouts
        )
        return replace(group, rollouts=tuple(rollouts))


@dataclass(frozen=True, slots=True)
class RerunBatches:
    """The source of a rerun's batches.

    A batch has the groups that the run trained on in its step. A group that is equal or cannot be trained on
    under the settings of the rerun is not replaced by another one.
    """

    stored: StoredSteps
    algorithm: AlgorithmConfig
    limits: SampleLimits
    stop: threading.Event

    def next(self, progress: TrainingProgress) -> Batch | None:
        """Return the batch of the step after `progress`; None if a stop is requested.

        Raises:
            TrainingError: the run has no such step, or too many of its groups cannot be trained on.
        """
        if self.stop.is_set():
            return None
        began = time.monotonic()
        step = self.stored.steps.get(progress.step + 1)
        if step is None:
            raise TrainingError(f"the run has trained no step {progress.step + 1}")
        replayed = {group_id: use for group_id, use in step.uses.items() if use}
        dropped = Dropped(step=step.step, groups=len(step.uses))
        taken: list[PreparedGroup] = []
        for group in self.stored.groups(step):
            prepared = prepare(group, self.algorithm)
            if isinstance(prepared, Refused):
                dropped.note(group.id, prepared)
            else:
                taken.append(prepared)
        while True:
            data = self._assembled(taken, replayed, step)
            refused = refused_samples(data, self.algorithm, limits=self.limits, version=step.version)
            if not refused:
                break
            for group_id, why in refused.items():
                dropped.note(group_id, why)
            taken = [known for known in taken if known.group.id not in refused]
        bound = self.stored.max_staleness
        kept, staleness = mask_stale(data.samples, version=step.version, max_staleness=bound)
        trained = [known.group.id for known in taken]
        return Batch(
            tuple(group_id for group_id in trained if group_id not in replayed),
            keep_samples(data, _with_shifted_versions(kept, progress.version - step.version)),
            replace(staleness, share_by_length=self._stale_share(taken, replayed, step)),
            QueueReport(0, 0, 0.0, 0.0, 0),
            0,
            time.monotonic() - began,
            bad_groups=dropped.bad,
            replayed=tuple((group_id, replayed[group_id]) for group_id in trained if group_id in replayed),
        )

    def _assembled(
        self, taken: Sequence[PreparedGroup], replayed: Mapping[str, int], step: TrainedStep
    ) -> TrainingData:
        if not any(known.group.id not in replayed for known in taken):
            raise TrainingError(
                f"step {step.step}: none of its {len(step.uses)} groups can be trained on with these "
                "settings; the log names why"
            )
        own = {known.group.id for known in taken}
        uses = {group_id: use for group_id, use in replayed.items() if group_id in own}
        return assemble_batch(taken, self.algorithm, replayed=uses)

    def _stale_share(
        self, taken: Sequence[PreparedGroup], replayed: Mapping[str, int], step: TrainedStep
    ) -> dict[str, float]:
        bound = StalenessBound(step.version, self.stored.max_staleness, "mask", len(taken), Lineage({}))
        for known in taken:
            if known.group.id not in replayed:
                bound.note_taken(known.group, self.algorithm)
        return bound.share_by_length()

    def wait_for_swap(self) -> None:
        """Return at once, since nothing is swapped."""

    def mark_trained(self, batch: Batch, progress: TrainingProgress) -> None:
        """Do nothing: the store of the run is only read."""


def _with_shifted_versions(samples: Iterable[TrainingSample], shift: int) -> list[TrainingSample]:
    """Return samples whose versions are `shift` larger, except those of tokens that have none.

    Where the run was resumed, its versions skip numbers, and those of the rerun do not. The shift keeps the
    distance of each token's version from the trainer's.
    """
    if not shift:
        return list(samples)
    return [
        replace(sample, versions=np.where(sample.versions < 0, sample.versions, sample.versions + shift))
        for sample in samples
    ]
