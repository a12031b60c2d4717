"""Publishes trained weights as candidates, waits for the verdict on each, and carries it out.

Training stops while a candidate is compared: the next batch begins from weights that are known to be served.
Weights are in a checkpoint before they become a candidate, and those of the stable version stay in one, so
both verdicts can be carried out after any death. A rollback is a step without a batch: the weights and the
optimizer's state before the candidate are published as the next version of the next step. The batches of the
candidate are not trained on again.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path

from areal_agents.store import Store, VersionRow
from areal_agents.training.canary.judging import CanaryRules, Judgement, judge
from areal_agents.training.checkpoint.checkpoint import (
    Checkpoints,
    Parts,
    TrainingProgress,
    load_checkpoint,
)
from areal_agents.training.distributed import Ranks
from areal_agents.training.publish.publisher import Publisher

logger = logging.getLogger(__name__)

_POLL_S = 1.0  # longest interval between evaluations of the comparison, and checks for a stop
_LEAST_POLL_S = 0.2  # the shortest one, because each evaluation reads all conversations of the comparison


@dataclass(eq=False)
class Canary:
    """The candidates of one run. Every rank has one; only the first rank's has the store.

    Attributes:
        rules: see CanaryRules.
        folder: the folder of the checkpoints.
        stable_step: the step of the version that all replicas serve; its checkpoint exists.
        candidate: the version that is compared; None if there is none. Only known on the first rank, whereas
            `is_comparing` is known on all.
        is_saved: whether there is a checkpoint of `stable_step`.
    """

    rules: CanaryRules
    ranks: Ranks
    store: Store | None
    publisher: Publisher
    checkpoints: Checkpoints
    folder: Path
    parts: Parts
    stop: threading.Event
    stable_step: int
    candidate: VersionRow | None
    is_comparing: bool
    is_saved: bool

    def __post_init__(self) -> None:
        self.checkpoints.protect(self.stable_step)

    def serve_again(self) -> None:
        """Swap in what the store says once more, after a resume: the trainer may have died before a swap.

        Collective.
        """
        served = self.ranks.broadcast(self.store.served_versions() if self.store is not None else None)
        assert served is not None
        beside = served.candidate or served.stable
        if served.candidate is None:
            self.publisher.deliver_again(served.stable, "all")
            return
        self.publisher.deliver_again(served.stable, "stable")
        self.publisher.deliver_again(beside, "canary")
        self._begin(beside)

    def save_stable(self, progress: TrainingProgress) -> None:
        """Write the checkpoint of the stable version unless there is one. Collective."""
        if not self.is_saved:
            self._save(progress)
            self.is_saved = True

    def decide(self, progress: TrainingProgress, *, is_last: bool) -> TrainingProgress | None:
        """Publish a candidate if it is due, wait for the verdict on it, and carry it out. Collective.

        Args:
            is_last: whether no batch will follow, so that fewer steps than usual make a candidate.

        Returns:
            The progress from which training continues; None if a stop is requested before there is a verdict.
        """
        trained = progress.step - self.stable_step
        if not self.is_comparing:
            if not trained or (trained < self.rules.steps and not is_last):
                return progress
            self._save(progress)
            if not self.ranks.from_first(self._may_publish):
                return None
            self.publisher.publish_candidate(
                version=progress.version, step=progress.step, share=self.rules.share
            )
            served = self.ranks.broadcast(self.store.served_versions() if self.store is not None else None)
            assert served is not None and served.candidate is not None
            self._begin(served.candidate)
        judgement = self.ranks.from_first(self._wait)
        if judgement is None:
            return None
        if judgement.verdict == "promote":
            self._promote(judgement)
        else:
            progress = self._roll_back(judgement, progress)
        self.stable_step, self.candidate, self.is_comparing = progress.step, None, False
        self.checkpoints.protect(self.stable_step)
        return progress

    def _begin(self, candidate: VersionRow) -> None:
        self.candidate, self.is_comparing = candidate, True
        if self.store is not None:
            self.store.begin_comparison(candidate.version)
            logger.info(
                "version %d is a candidate, for %g of the conversations", candidate.version, self.rules.share
            )

    def _may_publish(self) -> bool:
        """Wait while the run is frozen; return False if a stop is requested."""
        assert self.store is not None
        while self.store.is_frozen():
            if self.stop.wait(_POLL_S):
                return False
        return not self.stop.is_set()

    def _wait(self) -> Judgement | None:
        """Return the first verdict that is not to go on; None if a stop is requested before."""
        assert self.store is not None and self.candidate is not None
        version = self.candidate.version
        while not self.stop.is_set():
            cursor = self.store.cursor()
            served = self.store.served_versions()
            assert served is not None and served.candidate is not None
            judgement = judge(self.store, served.candidate, self.rules)
            if judgement.verdict != "go_on":
                logger.info("version %d: %s, because %s: %s", version, judgement.verdict, judgement.reason,
                            judgement.comparison)  # fmt: skip
                return judgement
            self.stop.wait(_LEAST_POLL_S)
            self.store.wait(cursor, _POLL_S)
        return None

    def _promote(self, judgement: Judgement) -> None:
        assert self.candidate is not None
        self.publisher.promote(self.candidate, judgement.facts(self.rules))

    def _roll_back(self, judgement: Judgement, progress: TrainingProgress) -> TrainingProgress:
        assert self.candidate is not None
        path = self.folder / f"step-{self.stable_step}"
        load_checkpoint(path, self.parts, self.ranks)
        restored = TrainingProgress(progress.step + 1, progress.version + 1, progress.position)
        self.publisher.roll_back(
            self.candidate, judgement.facts(self.rules), version=restored.version, step=restored.step
        )
        self._save(restored)
        return restored

    def _save(self, progress: TrainingProgress) -> None:
        """Write a checkpoint, and return when it is complete."""
        self.checkpoints.save(self.parts, progress)
        self.checkpoints.finish()
