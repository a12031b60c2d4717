"""Where a run with a canary starts or resumes: from what the rows of versions and the checkpoints say.

A candidate without a verdict is compared further, under its number. Otherwise the run continues from the
stable version, and nothing is published anew. The checkpoint of a candidate that was rolled back is never
continued.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_agents.errors import TrainingError
from areal_agents.store import ServedVersions, Store, VersionRow
from areal_agents.training.checkpoint.checkpoint import (
    Parts,
    TrainingProgress,
    load_checkpoint,
    read_facts,
)
from areal_agents.training.checkpoint.files import complete_steps
from areal_agents.training.distributed import Ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CanaryStart:
    """Where the run starts.

    Attributes:
        progress: the step and the version of the weights.
        stable_step: the step of the stable version.
        candidate: the version that is being compared; None if there is none.
        is_new: whether no version was published yet.
        load: the step of the checkpoint to be loaded; None: the initial weights.
        is_saved: whether `stable_step` has a checkpoint.
    """

    progress: TrainingProgress
    stable_step: int
    candidate: VersionRow | None
    is_new: bool
    load: int | None
    is_saved: bool


def resume_canary(folder: Path, parts: Parts, ranks: Ranks, store: Store | None) -> CanaryStart:
    """Load the weights that the run continues from, and return the leases of later steps. Collective.

    Args:
        folder: the folder of the checkpoints.
        store: the store of the run, on the first rank only.

    Raises:
        TrainingError: a checkpoint that is needed is missing or damaged.
        StoreError: the store is unusable.
    """

    def find() -> CanaryStart:
        assert store is not None
        steps = complete_steps(folder)
        return find_start(
            store.served_versions(), store.published_versions(), steps, lambda step: _progress(folder, step)
        )

    start = ranks.from_first(find)
    if start.load is not None:
        load_checkpoint(folder / f"step-{start.load}", parts, ranks)
        logger.info("resuming after step %d, with the weights of step %d", start.progress.step, start.load)
    if store is not None:
        if start.load is not None:
            store.commit_checkpoint(start.load)  # the trainer may have died before it wrote the row
        if returned := store.return_leases(start.progress.step):
            logger.info("%d groups leased by later steps are complete again", returned)
    return start


def _progress(folder: Path, step: int) -> TrainingProgress:
    facts = read_facts(folder / f"step-{step}")
    return TrainingProgress(facts["step"], facts["version"], facts["position"])


def find_start(
    served: ServedVersions | None,
    published: Sequence[VersionRow],
    steps: Sequence[int],
    progress_of: Callable[[int], TrainingProgress],
) -> CanaryStart:
    """Return where a run starts; `steps` are those of its checkpoints, in order."""
    latest = steps[-1] if steps else None
    if served is None:
        if latest is not None:
            raise TrainingError(
                f"there are checkpoints up to step {latest}, and the store has no version: the run lost its "
                "store; start over with --fresh, or with model= one of its folders"
            )
        return CanaryStart(TrainingProgress(0, 0), 0, None, True, None, False)
    stable, candidate = served.stable, served.candidate
    if candidate is not None:
        if candidate.step not in steps or stable.step not in steps:
            missing = candidate.step if candidate.step not in steps else stable.step
            raise TrainingError(
                f"version {candidate.version} is a candidate, and the checkpoint of step {missing} is missing"
            )
        return CanaryStart(progress_of(candidate.step), stable.step, candidate, False, candidate.step, True)
    if latest is None and stable.step == 0:
        return CanaryStart(TrainingProgress(0, stable.version), 0, None, False, None, False)
    if latest is not None and latest > stable.step and stable.step in steps:
        # Weights that were saved to become a candidate, and whose row was not written.
        return CanaryStart(progress_of(latest), stable.step, None, False, latest, True)
    if stable.step in steps:
        return CanaryStart(
            TrainingProgress(stable.step, stable.version, progress_of(stable.step).position),
            stable.step, None, False, stable.step, True,
        )  # fmt: skip
    # A rollback whose checkpoint was not written: its weights are those of the stable version before it.
    earlier = [row for row in published if row.version < stable.version]
    before = next((row.step for row in reversed(earlier) if row.canary in (None, "promoted")), None)
    if before not in steps or earlier[-1].canary != "rolled_back":
        raise TrainingError(
            f"the checkpoint of version {stable.version}, step {stable.step}, is missing; if the run had no "
            "canary until now, start it once more without rollout.canary and stop it with Ctrl-C, which "
            "writes a checkpoint; else start over with --fresh"
        )
    assert before is not None
    position = progress_of(before).position
    return CanaryStart(
        TrainingProgress(stable.step, stable.version, position), stable.step, None, False, before, False
    )
