"""The hard bound on staleness, checked where tokens are consumed.

The submission gate bounds only the mean: a long episode can span more versions than the bound.
Tokens beyond it carry no gradient here, whatever the gate let through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from areal_agents.core.rollout import RolloutGroup
from areal_agents.core.sample import TrainingSample
from areal_agents.errors import TrainingError


@dataclass(frozen=True, slots=True, eq=False)
class StalenessReport:
    """What the bound let through.

    Attributes:
        staleness: [N] trainer's version − token's version, of the tokens that are trained: read off the
            returned masks, so that no token in them escapes it.
        masked_tokens: tokens that exceeded the bound.
        dropped_samples: samples that had no other trained token.
    """

    staleness: npt.NDArray[np.int32]
    masked_tokens: int
    dropped_samples: int


def mask_stale(
    samples: Sequence[TrainingSample], *, version: int, max_staleness: int | None
) -> tuple[list[TrainingSample], StalenessReport]:
    """Mask the tokens that are more than `max_staleness` versions older than `version`.

    Args:
        version: the trainer's version when the batch begins.
        max_staleness: η; 0 trains tokens of this very version only. None: no bound, as for episodes that
            were recorded under another run's versions; their staleness is reported as it is, even below 0.

    Raises:
        TrainingError: a trained token claims a version that does not exist yet.
    """
    if max_staleness is None:
        return list(samples), StalenessReport(_ages(samples, version), masked_tokens=0, dropped_samples=0)
    kept: list[TrainingSample] = []
    masked = 0
    for sample in samples:
        staleness = version - sample.versions
        trained = staleness[sample.loss_mask]
        if trained.size and trained.min() < 0:
            raise TrainingError(
                f"group {sample.group_id}, episode {sample.episode_id}: a token of version "
                f"{version - trained.min()}, but the trainer is at version {version}"
            )
        stale = sample.loss_mask & (staleness > max_staleness)
        masked += int(stale.sum())
        if not stale.any():
            kept.append(sample)
        elif (sample.loss_mask & ~stale).any():
            mask = sample.loss_mask & ~stale
            kept.append(
                replace(sample, loss_mask=mask, advantages=np.where(mask, sample.advantages, np.float32(0)))
            )
    return kept, StalenessReport(
        staleness=_ages(kept, version), masked_tokens=masked, dropped_samples=len(samples) - len(kept)
    )


def _ages(samples: Sequence[TrainingSample], version: int) -> npt.NDArray[np.int32]:
    ages = [version - sample.versions[sample.loss_mask] for sample in samples]
    return np.concatenate([*ages, np.empty(0, np.int32)]).astype(np.int32)


def wholly_stale(group: RolloutGroup, *, version: int, max_staleness: int | None) -> bool:
    """Whether every sampled token of a group is beyond the bound, so that nothing of it can be trained."""
    if max_staleness is None:
        return False
    newest = max(
        (int(turn.completion.versions.max()) for rollout in group.rollouts for turn in rollout.episode.turns
         if len(turn.completion)),
        default=version,
    )  # fmt: skip
    return version - newest > max_staleness
