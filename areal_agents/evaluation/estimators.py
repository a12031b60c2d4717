"""Estimators of an evaluation and their confidence intervals: pure functions of scores.

Attempts at one task are not independent of each other, so the unit of every interval and test is the task: an
estimate is the mean of one value for each task.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev

import numpy as np

CONFIDENCE = 0.95
EXACT_UP_TO = 16  # differences other than 0 for which every assignment of signs is enumerated
PERMUTATIONS = 100_000
_CHUNK = 2**22  # random signs that are made at a time


def pass_at_k(attempts: int, passed: int, k: int) -> float:
    """Return the probability that at least one of k attempts passes, sampled from these without replacement.

    It is the unbiased estimator of equation 1 in Chen et al., "Evaluating Large Language Models Trained on
    Code" (arXiv 2107.03374): 1 - C(n - c, k) / C(n, k) for c of n attempts that passed.
    """
    if not 1 <= k <= attempts or not 0 <= passed <= attempts:
        raise ValueError(
            f"pass@k needs 1 ≤ k ≤ attempts and 0 ≤ passed ≤ attempts, got {k}, {attempts}, {passed}"
        )
    return 1.0 - math.comb(attempts - passed, k) / math.comb(attempts, k)


def pass_hat_k(attempts: int, passed: int, k: int) -> float:
    """Return the probability that all of k attempts pass, sampled from these without replacement: pass^k.

    It is the unbiased estimator C(c, k) / C(n, k) for c of n attempts that passed (Yao et al., "τ-bench",
    arXiv 2406.12045). It measures reliability: with k it falls, where pass@k rises.
    """
    if not 1 <= k <= attempts or not 0 <= passed <= attempts:
        raise ValueError(
            f"pass^k needs 1 ≤ k ≤ attempts and 0 ≤ passed ≤ attempts, got {k}, {attempts}, {passed}"
        )
    return math.comb(passed, k) / math.comb(attempts, k)


def majority_score(answers: Sequence[str | None], scores: Sequence[float]) -> float:
    """Return the expected score of the most frequent answer (self-consistency, arXiv 2203.11171).

    An attempt whose answer is None has no vote; without any vote the score is 0. One of several most frequent
    answers is chosen at random, and attempts with the same answer may differ in score, so both are averaged.
    """
    by_answer: dict[str, list[float]] = defaultdict(list)
    for answer, score in zip(answers, scores, strict=True):
        if answer is not None:
            by_answer[answer].append(score)
    most = max(map(len, by_answer.values()), default=0)
    winners = [fmean(found) for found in by_answer.values() if len(found) == most]
    return fmean(winners) if winners else 0.0


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """Return a confidence interval of the mean over tasks of one value for each task.

    If each value is 0 or 1, it is Wilson's score interval, which is not empty at means of 0 and 1; otherwise
    Student's t interval of the values, which are clustered standard errors of the attempts (Miller, "Adding
    Error Bars to Evals", arXiv 2411.00640). None if there are fewer than two values, or if all are the same
    number other than 0 and 1, from which no spread can be estimated.
    """
    if len(values) >= 2 and all(value in (0.0, 1.0) for value in values):
        return _wilson(fmean(values), len(values), confidence)
    return t_interval(values, confidence)


def t_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """Return Student's t interval of the mean; None if there are fewer than two values, or all are equal."""
    if len(set(values)) < 2:
        return None
    mean, spread = fmean(values), stdev(values) / math.sqrt(len(values))
    half = t_quantile(0.5 + confidence / 2, len(values) - 1) * spread
    return mean - half, mean + half


def sign_flip_p(differences: Sequence[float], *, seed: int = 0) -> float:
    """Return the two-sided p-value of paired differences under random signs (Fisher's permutation test).

    The statistic is the absolute sum. Up to EXACT_UP_TO differences other than 0 all signs are enumerated;
    beyond that, PERMUTATIONS random assignments are sampled and the observed one is counted too, so the
    p-value is never 0. For differences of -1, 0 and 1 it is the exact McNemar test.
    """
    other = np.array([d for d in differences if d != 0.0], dtype=np.float64)
    count = len(other)
    if count == 0:
        return 1.0
    sizes = np.abs(other)
    observed = abs(other.sum()) - 1e-9 * sizes.sum()  # sums of the same numbers differ by rounding
    if count <= EXACT_UP_TO:
        patterns = np.arange(2**count)[:, None] >> np.arange(count)[None, :]
        sums = np.abs(((patterns & 1) * 2 - 1) @ sizes)
        return float((sums >= observed).mean())
    generator = np.random.default_rng(seed)
    extreme, left = 0, PERMUTATIONS
    while left:
        rows = min(left, max(1, _CHUNK // count))
        signs = generator.integers(0, 2, size=(rows, count), dtype=np.int8) * 2 - 1
        extreme += int((np.abs(signs @ sizes) >= observed).sum())
        left -= rows
    return (extreme + 1) / (PERMUTATIONS + 1)


def mcnemar_p(only_first: int, only_second: int) -> float:
    """Return the two-sided p-value of the exact McNemar test.

    Args:
        only_first, only_second: the numbers of tasks that only one of the two passed.
    """
    count = only_first + only_second
    tail = sum(math.comb(count, i) for i in range(min(only_first, only_second) + 1))
    return min(1.0, 2 * tail / 2**count)


def t_quantile(p: float, degrees: int) -> float:
    """Return the quantile of Student's t distribution, for p from 0.5 to below 1."""
    if not 0.5 <= p < 1.0 or degrees < 1:
        raise ValueError(f"expected 0.5 ≤ p < 1 and degrees ≥ 1, got {p} and {degrees}")
    low, high = 0.0, math.pi / 2  # of the angle whose tangent is t / √degrees
    for _ in range(80):
        middle = (low + high) / 2
        if 0.5 + _t_mass(middle, degrees) / 2 < p:
            low = middle
        else:
            high = middle
    return math.tan(low) * math.sqrt(degrees)


def _t_mass(angle: float, degrees: int) -> float:
    """Return the probability of |T| < √degrees · tan(angle): Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2 == 1
    term, total = (cosine, cosine) if odd else (1.0, 1.0)
    if odd and degrees == 1:
        total = 0.0
    for number in range(2 if odd else 1, degrees - 1, 2):
        term *= cosine * cosine * number / (number + 1)
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def _wilson(share: float, count: int, confidence: float) -> tuple[float, float]:
    """Return the score interval of Wilson, "Probable Inference" (1927), without continuity correction."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    centre = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)
