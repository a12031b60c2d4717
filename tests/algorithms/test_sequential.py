"""The sequential test of two means, compared with a scalar oracle and simulated."""

from __future__ import annotations

import math

import numpy as np
import pytest

from areal_agents.algorithms.sequential import compare, confidence_sequence


def oracle(values: list[float], alpha: float) -> list[tuple[float, float]]:
    """Theorem 2 of Waudby-Smith and Ramdas, one observation at a time, with exact sums."""
    bets: list[float] = []
    spreads: list[float] = []
    squares: list[float] = []
    mean, variance = 0.5, 0.25
    bounds: list[tuple[float, float]] = []
    for t, x in enumerate(values, 1):
        bet = min(math.sqrt(2 * math.log(2 / alpha) / (variance * t * math.log(1 + t))), 0.5)
        bets.append(bet)
        spreads.append(4 * (x - mean) ** 2 * (-math.log(1 - bet) - bet) / 4)
        total = math.fsum(bets)
        center = math.fsum(b * v for b, v in zip(bets, values, strict=False)) / total
        radius = (math.log(2 / alpha) + math.fsum(spreads)) / total
        bounds.append((max(0.0, center - radius), min(1.0, center + radius)))
        mean = (0.5 + math.fsum(values[:t])) / (t + 1)
        squares.append((x - mean) ** 2)
        variance = (0.25 + math.fsum(squares)) / (t + 1)
    return bounds


@pytest.mark.parametrize("alpha", [0.05, 0.2])
def test_the_bounds_equal_those_of_the_theorem(alpha: float) -> None:
    values = np.random.default_rng(0).beta(0.4, 0.9, 200).tolist()
    lower, upper = confidence_sequence(values, alpha=alpha)
    np.testing.assert_allclose(np.c_[lower, upper], oracle(values, alpha), rtol=1e-12)


def test_rescaled_scores_rescale_the_bounds() -> None:
    rng = np.random.default_rng(1)
    candidate, stable = rng.random(50), rng.random(300)
    unit = compare(candidate, stable, low=0, high=1, alpha=0.1)
    scaled = compare(4 * candidate - 1, 4 * stable - 1, low=-1, high=3, alpha=0.1)
    assert scaled.least == pytest.approx(4 * unit.least)
    assert scaled.most == pytest.approx(4 * unit.most)


def test_without_scores_the_bounds_are_the_whole_range() -> None:
    nothing = compare([], [], low=0, high=1, alpha=0.05)
    assert (nothing.least, nothing.most, nothing.verdict()) == (-1, 1, "go_on")


def verdicts(candidate: float, stable: float, *, share: float, runs: int, alpha: float) -> dict[str, int]:
    """Count the verdicts of `runs` comparisons of 2000 thumbs each, evaluated after every thumb."""
    rng = np.random.default_rng(7)
    counts = {"promote": 0, "roll_back": 0, "go_on": 0}
    for _ in range(runs):
        on_canary = rng.random(2000) < share
        thumbs = (rng.random(2000) < np.where(on_canary, candidate, stable)).astype(float)
        seen = [np.cumsum(side) for side in (on_canary, ~on_canary)]
        bounds = [
            [np.r_[start, bound][count] for bound, start in zip(sequence, (0, 1), strict=True)]
            for sequence, count in zip(
                (confidence_sequence(thumbs[side], alpha=alpha) for side in (on_canary, ~on_canary)),
                seen,
                strict=True,
            )
        ]
        least, most = bounds[0][0] - bounds[1][1], bounds[0][1] - bounds[1][0]
        promoted, rolled_back = (least > 0).any(), (most < 0).any()
        assert not (promoted and rolled_back)
        counts["promote" if promoted else "roll_back" if rolled_back else "go_on"] += 1
    return counts


def test_an_equal_candidate_is_rarely_promoted_under_continuous_monitoring() -> None:
    alpha, runs = 0.1, 300
    counts = verdicts(0.5, 0.5, share=0.3, runs=runs, alpha=alpha)
    # At a false positive rate of alpha, a count above three standard errors has probability 0.001.
    most = runs * alpha + 3 * math.sqrt(runs * alpha * (1 - alpha))
    assert counts["promote"] <= most
    assert counts["roll_back"] <= most


def test_clear_differences_are_found() -> None:
    assert verdicts(0.7, 0.4, share=0.2, runs=50, alpha=0.05)["promote"] >= 48
    assert verdicts(0.4, 0.7, share=0.2, runs=50, alpha=0.05)["roll_back"] >= 48


def test_values_outside_the_range_are_refused() -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        confidence_sequence([0.5, 1.5], alpha=0.05)
    with pytest.raises(ValueError, match="range"):
        compare([1.0], [1.0], low=1, high=1, alpha=0.05)


def test_a_drift_that_both_sides_share_gives_no_verdict() -> None:
    """Users become easier to please in the middle of a comparison of two equal versions."""
    rng = np.random.default_rng(3)
    stable = np.r_[rng.random(9000) < 0.4, rng.random(9000) < 0.6].astype(float)
    candidate = np.r_[rng.random(1000) < 0.4, rng.random(1000) < 0.6].astype(float)
    for part in np.linspace(0.05, 1, 39):
        seen = compare(
            candidate[: int(2000 * part)].tolist(), stable[: int(18000 * part)].tolist(),
            low=0, high=1, alpha=0.05,
        )  # fmt: skip
        assert seen.verdict() == "go_on", (part, seen)
