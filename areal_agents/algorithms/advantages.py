"""Group-relative advantages: how much better a turn's return is than its baseline.

The statistics are over episode scores, one per episode, whatever the number of its turns and
branches: forks never change a baseline.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    returns: Sequence[npt.ArrayLike],
    scores: Sequence[npt.ArrayLike],
    *,
    mean: NormLevel = "group",
    std: NormLevel = "group",
    std_estimator: StdEstimator = "sample",
) -> list[Floats]:
    """Advantages (return − mean)/(std + 1e-5) of the turns of each group.

    Args:
        returns: per group, the returns of its turns, [N_g].
        scores: per group, the scores of its G episodes, [G]; mean and std are over these.
        mean, std: over the group's scores, over all scores of the batch, or left out.
        std_estimator: "sample" divides by G − 1, as torch.std does and as the measured recipes
            did; "population" by G.

    Returns:
        Per group an array [N_g]. All zero where the scores that the std is taken over are all equal
        (the ratio would only amplify turn rewards by 1e5), a single episode included.

    Raises:
        ValueError: no groups, a group without scores, or a score or return that is not finite.

    Source: GRPO, arXiv 2402.03300 eq. 3; Dr.GRPO (arXiv 2503.20783) is std="none".
    """
    if len(returns) != len(scores) or not scores:
        raise ValueError(
            f"expected as many groups of returns as of scores, got {len(returns)}, {len(scores)}"
        )
    returns_g = [np.asarray(values, np.float64) for values in returns]
    scores_g = [np.asarray(values, np.float64) for values in scores]
    for index, (group_returns, group_scores) in enumerate(zip(returns_g, scores_g, strict=True)):
        if not group_scores.size:
            raise ValueError(f"group {index} of the batch has no scores")
        if not (np.isfinite(group_scores).all() and np.isfinite(group_returns).all()):
            raise ValueError(f"group {index} of the batch has a score or return that is not finite")
    batch = np.concatenate(scores_g)
    out = []
    for group_returns, group_scores in zip(returns_g, scores_g, strict=True):
        centre = {"group": group_scores, "batch": batch, "none": np.zeros(1)}[mean].mean()
        advantages = group_returns - centre
        if std != "none":
            spread_of = {"group": group_scores, "batch": batch}[std]
            if all_equal(spread_of):
                advantages = np.zeros_like(group_returns)
            else:
                ddof = 1 if std_estimator == "sample" else 0
                advantages = advantages / (spread_of.std(ddof=ddof) + STD_EPSILON)
        out.append(advantages)
    return out
