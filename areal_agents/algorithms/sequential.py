"""A sequential test of two means that may be looked at after every observation.

Each mean gets a confidence sequence: intervals that all contain it at the same time, at every number of
observations, with the stated probability. So looking often, and stopping because of what is seen, costs
nothing. Scores are not paired, and the two sides may have any numbers of them: a canary has few.

Invariant: a side's observations have one mean, given those before them. It holds if conversations are
assigned to sides at random, and if when a score is counted does not depend on the score.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Verdict = Literal["promote", "roll_back", "go_on"]

_LARGEST_BET = 0.5  # c in the paper


def confidence_sequence(
    values: npt.ArrayLike, *, alpha: float
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the lower and upper bounds of the mean after each of `values`, two arrays of their length.

    The predictable plug-in empirical Bernstein confidence sequence, Theorem 2 of Waudby-Smith and Ramdas,
    "Estimating means of bounded random variables by betting" (JRSS B 86, 2024; arXiv 2010.09686). With
    probability 1 - alpha / 2 every lower bound is below the mean, and with the same probability every upper
    bound is above it. The intervals are not intersected with earlier ones: where users change, and the mean
    of both sides with them, the bounds of both sides follow.

    Args:
        values: numbers from 0 to 1, in the order of their observation.
        alpha: the probability that some interval misses the mean.
    """
    x = np.asarray(values, np.float64)
    if x.ndim != 1 or not ((x >= 0) & (x <= 1)).all():
        raise ValueError("expected a list of numbers from 0 to 1")
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must be between 0 and 1, got {alpha}")
    count = np.arange(1, len(x) + 1)
    mean = (0.5 + np.cumsum(x)) / (count + 1)
    variance = (0.25 + np.cumsum((x - mean) ** 2)) / (count + 1)
    # Every bet is made before its observation.
    mean_before, variance_before = np.r_[0.5, mean][:-1], np.r_[0.25, variance][:-1]
    log_level = math.log(2 / alpha)
    bets = np.sqrt(2 * log_level / (variance_before * count * np.log1p(count)))
    bets = np.minimum(bets, _LARGEST_BET)
    spread = np.cumsum((x - mean_before) ** 2 * (-np.log1p(-bets) - bets))
    total = np.cumsum(bets)
    center, radius = np.cumsum(bets * x) / total, (log_level + spread) / total
    return np.clip(center - radius, 0, 1), np.clip(center + radius, 0, 1)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is known of the difference of two means, of scores from `low` to `high`.

    Attributes:
        candidate, stable: the number of scores of each side.
        candidate_mean, stable_mean: their means; None without scores.
        least, most: bounds of the candidate's mean minus the stable one's.
    """

    candidate: int
    stable: int
    candidate_mean: float | None
    stable_mean: float | None
    least: float
    most: float

    def verdict(self, least_gain: float = 0.0) -> Verdict:
        """Return "promote" if the candidate's mean exceeds the stable one's by more than `least_gain`,
        "roll_back" if it does not, and "go_on" while neither is known."""
        if self.least > least_gain:
            return "promote"
        return "roll_back" if self.most < least_gain else "go_on"


def compare(
    candidate: Sequence[float], stable: Sequence[float], *, low: float, high: float, alpha: float
) -> Comparison:
    """Compare the means of two independent lists of scores, each in the order of its observation.

    However often it is called while the lists grow, the probability that `least` ever exceeds the true
    difference is at most alpha, and so is the probability that `most` ever is below it. Each of them fails
    only if a bound of one of the two means does, which has a probability of alpha / 2.

    Args:
        low, high: the range of scores; a score outside it counts as its nearest end.
    """
    if not low < high:
        raise ValueError(f"scores need a range, got {low} to {high}")
    lowers, uppers = [], []
    for scores in (candidate, stable):
        unit = (np.clip(np.asarray(scores, np.float64), low, high) - low) / (high - low)
        lower, upper = confidence_sequence(unit, alpha=alpha)
        lowers.append(low + (high - low) * (lower[-1] if len(unit) else 0.0))
        uppers.append(low + (high - low) * (upper[-1] if len(unit) else 1.0))
    return Comparison(
        len(candidate),
        len(stable),
        float(np.mean(candidate)) if len(candidate) else None,
        float(np.mean(stable)) if len(stable) else None,
        float(lowers[0] - uppers[1]),
        float(uppers[0] - lowers[1]),
    )
