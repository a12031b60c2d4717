"""The batches of steps that a run has already trained, for a rerun: the same groups in the same order.

The store of that run is only read. Its versions stay what they were: a token is as stale as it was when the
run trained on it, and its behavior logprobs are those that were recorded.
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
        steps: by their number.
        max_staleness: η of the run, which masked the same tokens.
        rewards: by episode id the rewards that take the place of all recorded ones; episodes that are absent
            keep theirs.
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
        """Load the groups of a step, ordered by id, with comparable versions and the rewards that count."""
        with self.store.read() as connection:
            found = reads.load_groups(connection, sorted(step.uses))
            lineage = Lineage.behind(step.version, versions.steps_behind(connection, step.version))
        try:
            return [self._of_rewards(lineage.of_group(group)) for group in found]
        except ValueError as error:  # a reward for a turn that the episode does not have
            raise TrainingError(
                f"step {step.step} cannot be trained with the new rewards: {error}"
            ) from error

    def with_rewards(self, episode: RecordedEpisode) -> RecordedEpisode:
        """Return an episode with the rewards that count."""
        return replace(episode, rewards=self.rewards.get(episode.id, episode.rewards))

    def _of_rewards(self, group: RolloutGroup) -> RolloutGroup:
        rollouts = (
            replace(rollout, episode=self.with_rewards(rollout.episode)) for rollout in group.rollouts
        )
        return replace(group, rollouts=tuple(rollouts))


@dataclass(frozen=True, slots=True)
class Again:
    """The source of the batches of a rerun.

    Groups that the run dropped when it collected a batch are not part of it, and no other group takes the
    place of one that is equal or cannot be trained on under the settings of the rerun.
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
            keep_samples(data, _counted_to(kept, progress.version - step.version)),
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


def _counted_to(samples: Iterable[TrainingSample], shift: int) -> list[TrainingSample]:
    """Return samples whose versions are `shift` larger.

    A rerun counts its versions on where the run was resumed under a larger number, so that the distances of
    the tokens' versions from its own are those of the run.
    """
    if not shift:
        return list(samples)
    return [
        replace(sample, versions=np.where(sample.versions < 0, sample.versions, sample.versions + shift))
        for sample in samples
    ]
