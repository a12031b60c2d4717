"""Advantages against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from areal_agents.algorithms.credit.advantages import all_equal, group_advantages, whitened


def plain(scores, **options):  # type: ignore[no-untyped-def]
    """The advantages of episodes of one turn, whose return is their score."""
    made = group_advantages([[[score] for score in group] for group in scores], scores, **options)
    return [[float(values[0]) for values in group] for group in made]


def test_grpo_with_the_sample_deviation() -> None:
    advantages = plain([[0.0, 1.0, 1.0]])[0]
    std = math.sqrt(((2 / 3) ** 2 + 2 * (1 / 3) ** 2) / 2)
    assert advantages == pytest.approx([-2 / 3 / (std + 1e-5), 1 / 3 / (std + 1e-5), 1 / 3 / (std + 1e-5)])


def test_the_population_deviation_divides_by_n() -> None:
    advantages = plain([[0.0, 2.0]], std_estimator="population")[0]
    assert advantages == pytest.approx([-1 / (1 + 1e-5), 1 / (1 + 1e-5)])


def test_statistics_are_over_episodes_however_many_turns_they_have() -> None:
    few = group_advantages([[[0.0], [1.0]]], [[0.0, 1.0]])[0]
    many = group_advantages([[[0.0], [1.0, 1.0, 1.0, 1.0]]], [[0.0, 1.0]])[0]
    assert many[0].tolist() == few[0].tolist() and many[1].tolist() == few[1].tolist() * 4


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
    advantages = plain(scores, mean=mean, std=std)
    for got, wanted in zip(advantages, expected, strict=True):
        assert got == pytest.approx(wanted, rel=1e-4, abs=1e-9)


def test_an_all_equal_group_has_zero_advantages_even_with_turn_rewards() -> None:
    equal, other = group_advantages([[[0.9, 0.3], [0.3]], [[0.0], [1.0]]], [[0.3, 0.1 + 0.2], [0.0, 1.0]])
    assert [values.tolist() for values in equal] == [[0.0, 0.0], [0.0]]
    assert other[1] > 0


def test_a_group_of_one_has_zero_advantage() -> None:
    assert plain([[5.0]]) == [[0.0]]


def test_all_equal_ignores_rounding_only() -> None:
    assert all_equal([0.3, 0.1 + 0.2]) and all_equal([1e9, 1e9 + 1e-3])
    assert not all_equal([0.0, 1e-6])


@pytest.mark.parametrize("bad", [[[math.nan, 1.0]], [[math.inf, 1.0]], [[]], []])
def test_scores_that_are_not_finite_or_missing_are_refused(bad: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="group"):
        group_advantages([[np.ones(2) for _ in scores] for scores in bad], bad)


def test_an_episode_without_returns_counts_all_the_same_and_a_missing_one_is_refused() -> None:
    assert [a.tolist() for a in group_advantages([[[], [3.0]]], [[0.0, 3.0]], std="none")[0]] == [[], [1.5]]
    with pytest.raises(ValueError, match="2 scores and 1 episodes"):
        group_advantages([[[3.0]]], [[0.0, 3.0]])


@pytest.mark.parametrize("seed", range(10))
def test_leave_one_out_is_the_formula_of_rloo(seed: int) -> None:
    """arXiv 2402.14740: r_i less the mean of the other k - 1 rewards."""
    rng = np.random.default_rng(seed)
    scores = [rng.normal(size=rng.integers(2, 7)).tolist() for _ in range(3)]
    got = plain(scores, std="none", leave_one_out=True)
    for of_group, rewards in zip(got, scores, strict=True):
        for place, advantage in enumerate(of_group):
            others = rewards[:place] + rewards[place + 1 :]
            assert advantage == pytest.approx(rewards[place] - sum(others) / len(others), abs=1e-12)
            k = len(rewards)  # and k/(k - 1) times the deviation from the whole group's mean
            assert advantage == pytest.approx(k / (k - 1) * (rewards[place] - sum(rewards) / k), abs=1e-12)


def test_leave_one_out_of_the_batch_and_of_a_group_of_one() -> None:
    got = plain([[1.0], [3.0, 8.0]], mean="batch", std="none", leave_one_out=True)
    assert got == [[1 - 5.5], [3 - 4.5, 8 - 2.0]]
    with pytest.raises(ValueError, match="group 0 of the batch has no second episode"):
        plain([[1.0], [3.0, 8.0]], std="none", leave_one_out=True)


def test_whitening_is_over_tokens() -> None:
    samples = [np.array([0.0, 2.0]), np.array([4.0]), np.array([10.0])]
    white = whitened(samples, ["a", "a", "b"], mean="batch", std="batch", std_estimator="population")
    flat = np.array([0.0, 2.0, 4.0, 10.0])
    assert np.concatenate(white).tolist() == pytest.approx(((flat - 4) / (flat.std() + 1e-5)).tolist())
    by_group = whitened(samples, ["a", "a", "b"], mean="group", std="none", std_estimator="sample")
    assert [values.tolist() for values in by_group] == [[-2.0, 0.0], [2.0], [0.0]]
    equal = whitened(samples, ["a", "a", "b"], mean="none", std="group", std_estimator="sample")
    assert equal[2].tolist() == [0.0] and equal[1].tolist() == pytest.approx([4 / (2 + 1e-5)])
