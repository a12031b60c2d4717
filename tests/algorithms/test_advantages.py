"""Advantages against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from areal_agents.algorithms.advantages import all_equal, group_advantages


def test_grpo_with_the_sample_deviation() -> None:
    (advantages,) = group_advantages([[0.0, 1.0, 1.0]], [[0.0, 1.0, 1.0]])
    std = math.sqrt(((2 / 3) ** 2 + 2 * (1 / 3) ** 2) / 2)
    assert advantages == pytest.approx([-2 / 3 / (std + 1e-5), 1 / 3 / (std + 1e-5), 1 / 3 / (std + 1e-5)])


def test_the_population_deviation_divides_by_n() -> None:
    (advantages,) = group_advantages([[0.0, 2.0]], [[0.0, 2.0]], std_estimator="population")
    assert advantages == pytest.approx([-1 / (1 + 1e-5), 1 / (1 + 1e-5)])


def test_statistics_are_over_episodes_however_many_turns_they_have() -> None:
    few = group_advantages([[0.0, 1.0]], [[0.0, 1.0]])[0]
    many = group_advantages([[0.0, 1.0, 1.0, 1.0, 1.0]], [[0.0, 1.0]])[0]
    assert many[:2] == pytest.approx(few) and many[4] == pytest.approx(few[1])


@pytest.mark.parametrize(
    ("mean", "std", "expected"),
    [
        ("group", "none", [[-1.0, 1.0], [-2.0, 2.0]]),  # Dr.GRPO
        ("batch", "none", [[-3.0, -1.0], [0.0, 4.0]]),
        ("none", "none", [[0.0, 2.0], [3.0, 7.0]]),
        ("group", "batch", [[-1 / 2.943920, 1 / 2.943920], [-2 / 2.943920, 2 / 2.943920]]),  # LitePPO
        ("batch", "batch", [[-3 / 2.943920, -1 / 2.943920], [0.0, 4 / 2.943920]]),
    ],
)
def test_mean_and_deviation_are_chosen_apart(mean, std, expected) -> None:  # type: ignore[no-untyped-def]
    scores = [[0.0, 2.0], [3.0, 7.0]]  # sample deviation of the batch: sqrt(26 / 3)
    advantages = group_advantages(scores, scores, mean=mean, std=std)
    for got, wanted in zip(advantages, expected, strict=True):
        assert got == pytest.approx(wanted, rel=1e-4, abs=1e-9)


def test_an_all_equal_group_has_zero_advantages_even_with_turn_rewards() -> None:
    equal, other = group_advantages([[0.9, 0.3, 0.3], [0.0, 1.0]], [[0.3, 0.1 + 0.2], [0.0, 1.0]])
    assert equal.tolist() == [0.0, 0.0, 0.0]
    assert other[1] > 0


def test_a_group_of_one_has_zero_advantage() -> None:
    assert group_advantages([[5.0]], [[5.0]])[0].tolist() == [0.0]


def test_all_equal_ignores_rounding_only() -> None:
    assert all_equal([0.3, 0.1 + 0.2]) and all_equal([1e9, 1e9 + 1e-3])
    assert not all_equal([0.0, 1e-6])


@pytest.mark.parametrize("bad", [[[math.nan, 1.0]], [[math.inf, 1.0]], [[]], []])
def test_scores_that_are_not_finite_or_missing_are_refused(bad: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="group"):
        group_advantages([np.ones(2) for _ in bad], bad)
