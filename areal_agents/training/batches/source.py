"""The source of batches on the first rank: a running rollout, or the recorded groups of another store.

The wait of `loop: one_step_off`: weights are swapped only while no training episode is being generated.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.core.rollout import OnStale
from areal_agents.errors import TrainingError
from areal_agents.store import Store
from areal_agents.training.batches.checks import SampleLimits
from areal_agents.training.batches.leasing import Batch, next_batch
from areal_agents.training.batches.recorded import RecordedGroups, next_recorded_batch
from areal_agents.training.checkpoint.checkpoint import TrainingProgress


class BatchSource(Protocol):
    """The source of a run's batches."""

    def next(self, progress: TrainingProgress) -> Batch | None:
        """Return the batch after `progress`; None if a stop is requested.

        Raises the errors of `next_batch` and `next_recorded_batch`.
        """

    def wait_for_swap(self) -> None:
        """Return when the weights of the batch in training may be swapped in, or if a stop is requested.

        TrainingError if that takes too long.
        """

    def mark_trained(self, batch: Batch, progress: TrainingProgress) -> None:
        """Record that a batch was trained and led to `progress`."""


@dataclass(frozen=True, slots=True)
class RolledOut:
    """Groups that a rollout writes to the run's store; the names are as in `training.run`.

    Attributes:
        lag: how many further batches must be complete before one is taken, so that its tokens are so many
            versions old.
        timeout_s: the longest wait for a batch, and, with swaps between batches only, for the next one to be
            complete.
        of_traffic: whether the groups are conversations of users; the operator may freeze the run then.
    """

    store: Store
    algorithm: AlgorithmConfig
    groups: int
    max_staleness: int | None
    on_stale: OnStale
    lag: int
    swap_between_batches: bool
    data_ended: Callable[[], bool]
    limits: SampleLimits
    timeout_s: float
    stop: threading.Event
    of_traffic: bool = False

    def next(self, progress: TrainingProgress) -> Batch | None:
        """Lease the groups of the batch."""
        return next_batch(
            self.store,
            self.algorithm,
            groups=self.groups,
            step=progress.step + 1,
            version=progress.version,
            max_staleness=self.max_staleness,
            on_stale=self.on_stale,
            ahead=self.lag * self.groups,
            limits=self.limits,
            timeout_s=self.timeout_s,
            stop=self.stop,
            held=lambda: self.of_traffic and self.store.is_frozen(),
        )

    def wait_for_swap(self) -> None:
        """With swaps between batches only: wait until no training episode is being generated."""
        if self.swap_between_batches:
            wait_until_whole(
                self.store,
                groups=self.groups,
                data_ended=self.data_ended,
                timeout_s=self.timeout_s,
                stop=self.stop,
            )

    def mark_trained(self, batch: Batch, progress: TrainingProgress) -> None:
        """Mark the groups as no longer leased, so that others may be submitted."""
        self.store.mark_trained(
            [*batch.group_ids, *batch.replayed], step=progress.step, version=progress.version
        )


@dataclass(frozen=True, slots=True)
class Recorded:
    """Groups of another store, which this source only reads."""

    recorded: RecordedGroups
    algorithm: AlgorithmConfig
    groups: int
    limits: SampleLimits
    stop: threading.Event

    def next(self, progress: TrainingProgress) -> Batch | None:
        """The next batch in the order of the epochs."""
        return next_recorded_batch(
            self.recorded,
            self.algorithm,
            groups=self.groups,
            step=progress.step + 1,
            position=progress.position,
            limits=self.limits,
            stop=self.stop,
        )

    def wait_for_swap(self) -> None:
        """Return at once, since nothing is swapped."""

    def mark_trained(self, batch: Batch, progress: TrainingProgress) -> None:
        """Do nothing, since checkpoints record the position."""


_POLL_S = 1.0  # interval between checks for a stop


def wait_until_whole(
    store: Store,
    *,
    groups: int,
    data_ended: Callable[[], bool],
    timeout_s: float,
    stop: threading.Event,
) -> None:
    """Return once the next batch is complete and no group is in progress, or at once if a stop is requested.

    Weights swapped at that time interrupt no generation of a training episode, so every batch has a single
    version. While the batch that was trained is still leased and η is 1, the gate admits only one more batch.

    Args:
        groups: number of groups in a batch.
        data_ended: whether every group of the data has started. The last batch may then stay incomplete, for
            example because a group was dropped, and is not waited for.

    Raises:
        TrainingError: the next batch was not complete within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    no_more = False
    while not stop.is_set():
        cursor = store.cursor()
        counts = store.group_counts()
        # Groups beyond the gate, left by a resume or a larger batch, are held back, so they are not in
        # progress.
        admitted = store.untrained_groups()[: 2 * groups]
        if not any(group.is_pending for group in admitted):
            if no_more or counts["complete"] >= groups:
                return
            if data_ended():
                no_more = True
                continue  # the last group may have started after the groups were counted
        left = deadline - time.monotonic()
        if left <= 0:
            raise TrainingError(
                f"the batch being generated was not complete within the time limit "
                f"(trainer.batch_timeout_s); "
                f"one_step_off swaps weights between batches only; the store has {counts}"
            )
        store.wait(cursor, min(_POLL_S, left))
