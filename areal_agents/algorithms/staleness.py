"""Enforces the bound on staleness when tokens are trained on.

The submission gate bounds only the mean: a long episode can span more versions than the bound, and a slow
episode is overtaken by others. Under each of these rules no token older than η versions carries a gradient:

    mask        tokens beyond the bound have loss mask 0; the rest of their group is trained
    drop        a group with any token beyond the bound is dropped, and another one takes its place
    wait        the trainer takes no batch that leaves out a group which could then not be trained in time,
                but waits until the older groups are complete. Tokens beyond the bound are masked
    downweight  as mask, and the loss of a token of staleness a within the bound is multiplied by
                1 / (1 + a); the denominator of the loss does not change

Versions are counted in trained batches here. `training.batches.staleness` converts the versions from before
a resume.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.credit.rewards import sampled_tokens
from areal_agents.core.rollout import RolloutGroup
from areal_agents.core.sample import TrainingSample
from areal_agents.errors import TrainingError


@dataclass(frozen=True, slots=True, eq=False)
class StalenessReport:
    """The tokens that remain to be trained under the bound, and counts of those that it removed.

    Attributes:
        staleness: [N] trainer's version − token's version, of the tokens that are trained. It is computed
            from the returned masks, so it includes every trained token.
        masked_tokens: tokens that exceeded the bound.
        dropped_samples: samples that had no other trained token.
        share_by_length: see `stale_share_by_length`.
    """

    staleness: npt.NDArray[np.int32]
    masked_tokens: int
    dropped_samples: int
    share_by_length: Mapping[str, float] = field(default_factory=dict)


def mask_stale(
    samples: Sequence[TrainingSample], *, version: int, max_staleness: int | None
) -> tuple[list[TrainingSample], StalenessReport]:
    """Mask the tokens that are more than `max_staleness` versions older than `version`.

    Observations have no version. They stay if a trained token of their sample still follows them.

    Args:
        version: the trainer's version when the batch begins.
        max_staleness: η; 0 trains only tokens of this version. None: no bound, as for episodes that were
            recorded under another run's versions; their staleness is reported unchanged, even below 0.

    Raises:
        TrainingError: a trained token has a version that does not exist yet.
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
                f"group {sample.group_id}, episode {sample.episode_id}: a trained token is of version "
                f"{version - trained.min()}, but the trainer is at version {version}"
            )
        stale = sample.policy_mask & (staleness > max_staleness)
        masked += int((stale & sample.loss_mask).sum())
        if not stale.any():
            kept.append(sample)
        elif (sample.loss_mask & ~stale).any():
            mask, prefix = sample.loss_mask & ~stale, sample.prefix_mask
            observed = sample.observed.copy()
            observed[np.flatnonzero(mask)[-1] :] = False
            kept.append(
                replace(
                    sample,
                    loss_mask=mask,
                    prefix_mask=None if prefix is None else prefix & ~stale,
                    observation_mask=observed if observed.any() else None,
                    advantages=np.where(mask, sample.advantages, np.float32(0)),
                )
            )
    return kept, StalenessReport(
        staleness=_ages(kept, version), masked_tokens=masked, dropped_samples=len(samples) - len(kept)
    )


def _ages(samples: Sequence[TrainingSample], version: int) -> npt.NDArray[np.int32]:
    ages = [version - sample.versions[sample.loss_mask] for sample in samples]
    return np.concatenate([*ages, np.empty(0, np.int32)]).astype(np.int32)


def age_weights(versions: npt.NDArray[np.int32], *, version: int) -> npt.NDArray[np.float32]:
    """[N] the factor 1 / (1 + staleness) of each token of these versions, under `downweight`."""
    return (1.0 / (1.0 + (version - versions))).astype(np.float32)


def leaves_in_time(versions: Sequence[int], *, version: int, groups: int, max_staleness: int | None) -> bool:
    """Whether the groups that the batch of `version` leaves out can all be trained within the bound.

    Every later version trains `groups` of them, and a group that began at version o is in time up to
    version o + η. In the order in which they began, the i-th is trained at version + 1 + ⌊i / groups⌋; if
    this order is not in time, no other order is.

    Args:
        versions: for each group left out, a version such that none of its tokens is older.
        version: the trainer's version.
        groups: the number of groups in a batch.
        max_staleness: η; None: no bound.
    """
    if max_staleness is None:
        return True
    return all(
        version + 1 + place // groups <= began + max_staleness for place, began in enumerate(sorted(versions))
    )


def is_stale(
    group: RolloutGroup, algorithm: AlgorithmConfig, *, version: int, max_staleness: int | None, drop: bool
) -> bool:
    """Whether a group is too stale to be trained on at `version`.

    A group is too stale if all tokens that would be trained are beyond the bound or, with `drop`, if any is.
    """
    rule = algorithm.trained_turns
    trained = [t.completion.versions for rollout in group.rollouts for t in rule.of(rollout.episode)]
    versions = np.concatenate([*trained, np.empty(0, np.int32)])
    if max_staleness is None or not versions.size:
        return False
    return version - int(versions.min() if drop else versions.max()) > max_staleness


@dataclass(frozen=True, slots=True)
class EpisodeTokens:
    """Token counts of one episode.

    Attributes:
        sampled: tokens that the policy sampled.
        trainable: of these, tokens that could be trained.
        stale: of the trainable tokens, those that are not trained because of their staleness.
    """

    sampled: int
    trainable: int
    stale: int


def episode_tokens(
    group: RolloutGroup, algorithm: AlgorithmConfig, *, version: int, max_staleness: int | None, dropped: bool
) -> list[EpisodeTokens]:
    """The token counts of each episode of a group; every trainable token is stale if it was `dropped`."""
    counted = []
    for rollout in group.rollouts:
        versions = [turn.completion.versions for turn in algorithm.trained_turns.of(rollout.episode)]
        trainable = sum(map(len, versions))
        beyond = 0
        if max_staleness is not None:
            beyond = sum(int((version - of_turn > max_staleness).sum()) for of_turn in versions)
        sampled = sampled_tokens(rollout.episode)
        counted.append(EpisodeTokens(sampled, trainable, trainable if dropped else beyond))
    return counted


def stale_share_by_length(episodes: Sequence[EpisodeTokens]) -> dict[str, float]:
    """The share of trainable tokens that were not trained because of staleness, by decile of the episodes'
    sampled tokens.

    "1" is the shortest tenth of the episodes, "10" the longest; a decile without a trainable token is
    absent. If the bound takes effect, the share is larger for long episodes, so dropping and masking favour
    short ones.
    """
    ordered = sorted(episodes, key=lambda episode: episode.sampled)
    trainable, stale = [0] * 10, [0] * 10
    for rank, episode in enumerate(ordered):
        decile = rank * 10 // len(ordered)
        trainable[decile] += episode.trainable
        stale[decile] += episode.stale
    return {str(d + 1): stale[d] / trainable[d] for d in range(10) if trainable[d]}
