"""Group-relative advantages: how much better a return is than its baseline.

The statistics are over episode scores, one per episode, whatever the number of its turns and
branches: forks never change a baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from areal_agents.algorithms.config import NormLevel, StdEstimator

Floats = npt.NDArray[np.float64]

STD_EPSILON = 1e-5
_EQUAL = 1e-9  # scores closer than this, relative to their size, are one score


def all_equal(scores: npt.ArrayLike) -> bool:
    """Whether all scores [G] are the same number, up to rounding."""
    values = np.asarray(scores, np.float64)
    return bool(np.ptp(values) <= _EQUAL * max(1.0, float(np.abs(values).max())))


def group_advantages(
    returns: Sequence[Sequence[npt.ArrayLike]],
    scores: Sequence[npt.ArrayLike],
    *,
    mean: NormLevel = "group",
    std: NormLevel = "group",
    std_estimator: StdEstimator = "sample",
    leave_one_out: bool = False,
) -> list[list[Floats]]:
    """Advantages (return − mean)/(std + 1e-5) of the turns, or tokens, of each episode of each group.

    Args:
        returns: per group and episode, the returns of its turns, [N_ge].
        scores: per group, the scores of its G episodes, [G]; mean and std are over these.
        mean, std: over the group's scores, over all scores of the batch, or left out.
        std_estimator: "sample" divides by G − 1, as torch.std does and as the measured recipes
            did; "population" by G.
        leave_one_out: the mean is over the other episodes' scores: (Σ_j s_j − s_i)/(n − 1).

    Returns:
        Per group and episode an array [N_ge]. All zero where the scores that the std is taken over are
        all equal (the ratio would only amplify turn rewards by 1e5), a single episode included.

    Raises:
        ValueError: no groups; a group without scores, or with other than one array of returns per
            score; a score or return that is not finite; no other episode to take the mean over.

    Source: GRPO, arXiv 2402.03300 eq. 3; Dr.GRPO (arXiv 2503.20783) is std="none"; leave-one-out is
    RLOO, arXiv 2402.14740.
    """
    if len(returns) != len(scores) or not scores:
        raise ValueError(
            f"expected as many groups of returns as of scores, got {len(returns)}, {len(scores)}"
        )
    returns_g = [[np.asarray(values, np.float64) for values in group] for group in returns]
    scores_g = [np.asarray(values, np.float64) for values in scores]
    for index, (group_returns, group_scores) in enumerate(zip(returns_g, scores_g, strict=True)):
        if not group_scores.size or len(group_returns) != len(group_scores):
            raise ValueError(
                f"group {index} of the batch has {group_scores.size} scores and {len(group_returns)} episodes"
            )
        if not all(np.isfinite(values).all() for values in (group_scores, *group_returns)):
            raise ValueError(f"group {index} of the batch has a score or return that is not finite")
    batch = np.concatenate(scores_g)
    out = []
    for index, (group_returns, group_scores) in enumerate(zip(returns_g, scores_g, strict=True)):
        among = {"group": group_scores, "batch": batch}
        centres = np.zeros_like(group_scores)
        if mean != "none" and leave_one_out:
            if among[mean].size < 2:
                raise ValueError(
                    f"group {index} of the batch has no second episode to leave the first out of"
                )
            centres = (among[mean].sum() - group_scores) / (among[mean].size - 1)
        elif mean != "none":
            centres = centres + among[mean].mean()
        scale = 1.0 if std == "none" else _scale(among[std], std_estimator)
        out.append([(values - centre) * scale for values, centre in zip(group_returns, centres, strict=True)])
    return out


def whitened(
    advantages: Sequence[Floats],
    group_ids: Sequence[str],
    *,
    mean: NormLevel,
    std: NormLevel,
    std_estimator: StdEstimator,
) -> list[Floats]:
    """Advantages of single tokens, (A − mean)/(std + 1e-5), the statistics over tokens.

    Args:
        advantages: per sample, of its trained tokens, [N_s].
        group_ids: each sample's group.
        mean, std: over the tokens of the group, of the batch, or left out.

    Source: the advantages of a critic are normalised over the batch's tokens since PPO (arXiv
    1707.06347); the baseline is the critic's, so no group has one here.
    """
    pools = {"group": list(group_ids), "batch": [""] * len(group_ids)}
    centres = [0.0] * len(group_ids)
    scales = [1.0] * len(group_ids)
    if mean != "none":
        centres = _over_pools(advantages, pools[mean], lambda values: float(values.mean()))
    if std != "none":
        scales = _over_pools(advantages, pools[std], lambda values: _scale(values, std_estimator))
    return [(a - c) * s for a, c, s in zip(advantages, centres, scales, strict=True)]


def _over_pools(
    arrays: Sequence[Floats], pools: Sequence[str], statistic: Callable[[Floats], float]
) -> list[float]:
    """Per array the statistic of its pool, the arrays of one name together."""
    members: dict[str, list[Floats]] = {}
    for array, pool in zip(arrays, pools, strict=True):
        members.setdefault(pool, []).append(array)
    found = {pool: statistic(np.concatenate(of_pool)) for pool, of_pool in members.items()}
    return [found[pool] for pool in pools]


def _scale(values: Floats, std_estimator: StdEstimator) -> float:
    """1/(std + 1e-5), and 0 where all values are equal."""
    if all_equal(values):
        return 0.0
    return float(1 / (values.std(ddof=1 if std_estimator == "sample" else 0) + STD_EPSILON))
