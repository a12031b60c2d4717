"""Where a resumed run starts: at its latest checkpoint, under a version that was never used.

The step comes from the checkpoint. The version is above every earlier one, because the later steps, which are
lost, also had versions. A rerun starts at a checkpoint of another run, under the version that its weights had
there.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from areal_agents.store import Store
from areal_agents.training.checkpoint.checkpoint import (
    Parts,
    TrainingProgress,
    latest_checkpoint,
    load_checkpoint,
)
from areal_agents.training.distributed import Ranks

logger = logging.getLogger(__name__)


def resume(
    folder: Path, parts: Parts, ranks: Ranks, store: Store | None, *, publishes: bool
) -> TrainingProgress:
    """Load the latest checkpoint of `folder`, if any, and return the leases of later steps. Collective.

    Args:
        parts: the trained models, which are loaded in place.
        store: the store of the run, on the first rank only.
        publishes: whether the run publishes versions; one that does not keeps the checkpoint's.

    Returns:
        The last trained step, and the version under which its weights must be published.

    Raises:
        TrainingError: the checkpoint cannot be used.
        StoreError: the store is unusable.
    """
    path = ranks.broadcast(latest_checkpoint(folder))
    progress = TrainingProgress(step=0, version=0)
    if path is not None:
        progress = load_checkpoint(path, parts, ranks)
        logger.info("resuming after step %d from %s", progress.step, path)
    version = progress.version
    if store is not None:
        if path is not None:
            # the trainer may have died after it wrote the folder and before it wrote the row
            store.commit_checkpoint(progress.step)
        returned = store.return_leases(progress.step)
        if returned:
            logger.info("%d groups leased by later steps are complete again", returned)
        if publishes:
            # Also above the checkpoint's version, in case the store was replaced; engines start with version
            # 0.
            trained = version if path is not None else -1
            version = max(store.max_version(), trained) + 1
    return replace(progress, version=ranks.broadcast(version))


@dataclass(frozen=True, slots=True)
class Start:
    """Where a rerun starts and ends.

    Attributes:
        checkpoint: the checkpoint of `step`; None: the initial weights, and `step` is 0.
        version: the version that the weights of `step` had.
        until: the last step of the rerun.
    """

    checkpoint: Path | None
    step: int
    version: int
    until: int

    def load(self, parts: Parts, ranks: Ranks) -> TrainingProgress:
        """Load the checkpoint into the trained models; a critic that it lacks stays untrained. Collective.

        Raises:
            TrainingError: the checkpoint cannot be used.
        """
        if self.checkpoint is not None:
            load_checkpoint(self.checkpoint, parts, ranks, shared=True)
        return TrainingProgress(step=self.step, version=self.version)
