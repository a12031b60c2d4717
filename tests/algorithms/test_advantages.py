"""Advantages, compared with values computed by hand and with their definitions."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

import numpy as np
import pytest
from algorithms_support import began, defined_to_go, episode, random_episode, random_groups, turn
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_agents.algorithms.credit.advantages import all_equal, compare, step_advantages, whitened
from areal_agents.algorithms.credit.estimators import GroupEstimator
from areal_agents.algorithms.credit.returns import EpisodeCredit, RewardToGo
from areal_agents.algorithms.credit.rewards import EpisodeRewards, RewardShaping, episode_rewards
from areal_agents.core.rollout import RecordedEpisode


def rewards_of(recorded: RecordedEpisode) -> EpisodeRewards:
    return episode_rewards(recorded, group_id="g", shaping=RewardShaping())


def chain(own: Sequence[float], whole: float | None = None) -> EpisodeRewards:
    """An episode of one conversation, whose turns have the rewards `own`."""
    turns = [turn(f"{i}", f"{i - 1}" if i else None) for i in range(len(own))]
    return rewards_of(episode(turns, whole, by_turn={f"{i}": value for i, value in enumerate(own)}))


def ended(score: float, *, turns: int = 1) -> EpisodeRewards:
    """An episode whose only reward is a score at its end."""
    made = [turn(f"{i}", f"{i - 1}" if i else None) for i in range(turns)]
    return EpisodeRewards(
        "g", np.zeros(turns), score, rewards_of(episode(made)).recorded_before, np.zeros(turns, bool), True
    )


def advantages(groups, credit=None, **options):  # type: ignore[no-untyped-def]
    """The advantages of the turns of each episode, by group, as lists."""
    comparisons = compare(groups, credit or EpisodeCredit(), **options)
    return [[values.tolist() for values in comparison.advantages()] for comparison in comparisons]


def plain(scores, **options):  # type: ignore[no-untyped-def]
    """The advantages of episodes of one turn, whose return is the score."""
    made = advantages([[ended(score) for score in group] for group in scores], **options)
    return [[values[0] for values in group] for group in made]


def test_grpo_divides_by_the_sample_deviation() -> None:
    got = plain([[0.0, 1.0, 1.0]])[0]
    std = math.sqrt(((2 / 3) ** 2 + 2 * (1 / 3) ** 2) / 2)
    assert got == pytest.approx([-2 / 3 / (std + 1e-5), 1 / 3 / (std + 1e-5), 1 / 3 / (std + 1e-5)])


def test_the_population_deviation_divides_by_n() -> None:
    got = plain([[0.0, 2.0]], std_estimator="population")[0]
    assert got == pytest.approx([-1 / (1 + 1e-5), 1 / (1 + 1e-5)])


def test_statistics_count_each_episode_once_whatever_its_number_of_turns() -> None:
    few = advantages([[ended(0.0), ended(1.0)]])[0]
    many = advantages([[ended(0.0), ended(1.0, turns=4)]])[0]
    assert many[0] == few[0] and many[1] == few[1] * 4


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
def test_mean_and_deviation_are_independent(mean, std, expected) -> None:  # type: ignore[no-untyped-def]
    scores = [[0.0, 2.0], [3.0, 7.0]]  # sample deviation of the batch: sqrt(26 / 3)
    for got, wanted in zip(plain(scores, mean=mean, std=std), expected, strict=True):
        assert got == pytest.approx(wanted, rel=1e-4, abs=1e-9)


def test_an_all_equal_group_has_zero_advantages_even_with_turn_rewards() -> None:
    groups = [[chain([0.1, 0.2]), chain([0.3])], [ended(0.0), ended(1.0)]]
    equal, other = advantages(groups, RewardToGo())
    assert equal == [[0.0, 0.0], [0.0]]
    assert other[1][0] > 0


def test_a_group_of_one_has_zero_advantage() -> None:
    assert plain([[5.0]]) == [[0.0]]


def test_all_equal_ignores_rounding_only() -> None:
    assert all_equal([0.3, 0.1 + 0.2]) and all_equal([1e9, 1e9 + 1e-3])
    assert not all_equal([0.0, 1e-6])


@pytest.mark.parametrize("bad", [[[math.nan, 1.0]], [[math.inf, 1.0]], [[]], []])
def test_scores_that_are_not_finite_or_missing_are_refused(bad: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="group"):
        advantages([[ended(score, turns=2) for score in scores] for scores in bad])


def test_an_episode_without_turns_counts_in_the_statistics() -> None:
    assert advantages([[ended(0.0, turns=0), ended(3.0)]], std="none") == [[[], [1.5]]]


STEPS = [[0.5] * 4, [0.5] * 4, [0.5] * 4, [0.0] * 4]  # three perfect episodes and one without any success


def test_rewards_to_go_are_compared_at_the_same_k_in_every_episode() -> None:
    """The group's mean of D(k) is 1.5, 1.125, 0.75 and 0.375, three quarters of D(k) of a perfect episode."""
    got = advantages([[chain(own) for own in STEPS]], RewardToGo(), std="none")[0]
    assert got == [[0.5, 0.375, 0.25, 0.125]] * 3 + [[-1.5, -1.125, -0.75, -0.375]]
    # with a deviation, advantages are divided by that of the scores 2, 2, 2 and 0, which is 1
    divided = advantages([[chain(own) for own in STEPS]], RewardToGo())[0]
    assert divided == [pytest.approx([a / (1 + 1e-5) for a in values]) for values in got]


def test_an_episode_that_has_ended_contributes_its_episode_reward_to_the_baseline() -> None:
    short, long = chain([1.0], 5.0), chain([1.0, 2.0, 4.0], 3.0)
    (got,) = advantages([[short, long]], RewardToGo(), std="none")
    # D(k) of the long episode is 10, 9 and 7; that of the short one is 6, and then its episode reward, 5
    assert got == [[6 - 8.0], [10 - 8.0, 9 - 7.0, 7 - 6.0]]
    (alone,) = advantages([[short, long]], RewardToGo(), std="none", leave_one_out=True)
    assert alone == [[6 - 10.0], [10 - 6.0, 9 - 5.0, 7 - 5.0]]


def test_a_reward_of_a_first_turn_does_not_change_the_advantages_of_later_turns() -> None:
    """The later turns cannot have caused this reward, in either episode."""
    (low,) = advantages([[chain([0.0, 1.0, 0.0]), chain([0.0, 0.0, 0.0])]], RewardToGo(), std="none")
    (high,) = advantages([[chain([9.0, 1.0, 0.0]), chain([0.0, 0.0, 0.0])]], RewardToGo(), std="none")
    assert [values[1:] for values in high] == [values[1:] for values in low]
    assert high[0][0] == low[0][0] + 4.5


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(["group", "batch", "none"]),
    st.sampled_from(["group", "batch", "none"]),
    st.booleans(),
    st.sampled_from([None, 0.5, 1.0]),
)
def test_advantages_equal_their_definition(
    seed: int, mean: str, std: str, leave_one_out: bool, discount: float | None
) -> None:
    """(D_i(k) − mean_j D_j(k))/(std of the scores + 1e-5) on forests, turn by turn, in plain Python."""
    groups = [[r.episode for r in g.rollouts] for g in random_groups(seed, groups=2)]
    batch = [e for g in groups for e in g]
    leave_one_out = leave_one_out and mean != "none"

    def earned(recorded: RecordedEpisode, k: int) -> float:
        return recorded.score if discount is None else defined_to_go(recorded, k, discount=discount)

    def expected(own: RecordedEpisode, k: int, group: list[RecordedEpisode]) -> float:
        pools = {"group": group, "batch": batch, "none": []}
        others = [e for e in pools[mean] if not (leave_one_out and e is own)]
        over = earned(own, k) - (statistics.fmean(earned(e, k) for e in others) if others else 0.0)
        return over if std == "none" else over / (statistics.stdev(e.score for e in pools[std]) + 1e-5)

    got = advantages(
        [[rewards_of(e) for e in g] for g in groups],
        EpisodeCredit() if discount is None else RewardToGo(turn_discount=discount),
        mean=mean, std=std, leave_one_out=leave_one_out,
    )  # fmt: skip
    for group, of_group in zip(groups, got, strict=True):
        for own, values in zip(group, of_group, strict=True):
            assert values == pytest.approx([expected(own, k, group) for k in began(own)], abs=1e-9)


def test_reductions_are_subtracted_from_baselines_and_scores() -> None:
    groups = [[ended(1.0), ended(3.0)], [ended(5.0)]]
    (first, second) = compare(
        groups, EpisodeCredit(), mean="batch", std="group", reductions=[[0.5, 1.0], [2.0]]
    )
    # The mean is over 0.5, 2 and 3. The deviation is over 0.5 and 2 for the first group, and over all three
    # for the second group, which has one episode.
    assert [b.tolist() for b in first.baselines] == [[5.5 / 3]] * 2 and second.baselines[0] == 5.5 / 3
    assert second.scale == pytest.approx(1 / (statistics.stdev([0.5, 2, 3]) + 1e-5))
    assert [r.tolist() for r in first.returns] == [[1.0], [3.0]]
    assert first.scale == pytest.approx(1 / (1.5 / math.sqrt(2) + 1e-5))


def test_normalised_steps_equal_those_of_deepseekmath() -> None:
    """arXiv 2402.03300, section 4.1.3: the mean over all sixteen steps is 0.375, and their sample deviation
    is sqrt(0.05)."""
    (got,) = step_advantages(
        [[chain(own) for own in STEPS]], mean="group", std="group", std_estimator="sample"
    )
    unit = 0.125 / (math.sqrt(0.05) + 1e-5)
    assert [values.tolist() for values in got[:3]] == [
        pytest.approx([4 * unit, 3 * unit, 2 * unit, unit])
    ] * 3
    assert got[0].tolist() == pytest.approx([2.24, 1.68, 1.12, 0.56], abs=0.005)
    assert got[3].tolist() == pytest.approx([-12 * unit, -9 * unit, -6 * unit, -3 * unit])
    by_estimator = GroupEstimator.model_validate({"credit": {"kind": "step_normalized"}})
    assert [v.tolist() for v in by_estimator.turn_advantages([[chain(own) for own in STEPS]])[0]] == [
        v.tolist() for v in got
    ]


@settings(derandomize=True, max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(["group", "batch", "none"]),
    st.sampled_from(["group", "batch", "none"]),
)
def test_normalised_steps_on_forests_equal_their_definition(seed: int, mean: str, std: str) -> None:
    groups = [[r.episode for r in g.rollouts] for g in random_groups(seed, groups=2)]

    def steps(recorded: RecordedEpisode) -> list[tuple[float, float]]:
        """The index after which each step ends, and its reward; the episode's reward comes at the end."""
        ids = [t.id for t in recorded.turns]
        found: dict[float, float] = {}
        for reward in recorded.rewards:
            place = math.inf if reward.scope == "episode" else ids.index(reward.target)
            found[place] = found.get(place, 0.0) + reward.value
        return sorted(found.items())

    batch = [value for g in groups for e in g for _, value in steps(e)]
    got = step_advantages(
        [[rewards_of(e) for e in g] for g in groups], mean=mean, std=std, std_estimator="population"
    )  # type: ignore[arg-type]
    for group, of_group in zip(groups, got, strict=True):
        pools = {"group": [value for e in group for _, value in steps(e)], "batch": batch}
        centre = 0.0 if mean == "none" else statistics.fmean(pools[mean])
        scale = 1.0 if std == "none" else 1 / (statistics.pstdev(pools[std]) + 1e-5)
        for own, values in zip(group, of_group, strict=True):
            expected = [
                sum((value - centre) * scale for place, value in steps(own) if place >= k) for k in began(own)
            ]
            assert values.tolist() == pytest.approx(expected, abs=1e-9)


def test_steps_of_equal_reward_have_advantage_zero() -> None:
    (got,) = step_advantages(
        [[chain([0.5, 0.5]), chain([0.5])]], mean="group", std="group", std_estimator="sample"
    )
    assert [values.tolist() for values in got] == [[0.0, 0.0], [0.0]]


def test_an_episode_without_a_reward_has_no_step() -> None:
    silent = rewards_of(episode([turn("a")]))
    (got,) = step_advantages([[silent, chain([0.0, 1.0])]], mean="group", std="none", std_estimator="sample")
    assert [values.tolist() for values in got] == [[0.0], [0.0, 0.5]]


def test_a_single_episode_is_its_own_baseline() -> None:
    alone = rewards_of(random_episode(random.Random(0), dense=True))
    assert advantages([[alone]], RewardToGo(), std="none") == [[[0.0] * 8]]


@pytest.mark.parametrize("seed", range(10))
def test_leave_one_out_equals_the_formula_of_rloo(seed: int) -> None:
    """arXiv 2402.14740: r_i less the mean of the other k - 1 rewards."""
    rng = np.random.default_rng(seed)
    scores = [rng.normal(size=rng.integers(2, 7)).tolist() for _ in range(3)]
    got = plain(scores, std="none", leave_one_out=True)
    for of_group, rewards in zip(got, scores, strict=True):
        for place, advantage in enumerate(of_group):
            others = rewards[:place] + rewards[place + 1 :]
            assert advantage == pytest.approx(rewards[place] - sum(others) / len(others), abs=1e-12)
            k = len(rewards)  # this is k/(k - 1) times the deviation from the mean of the whole group
            assert advantage == pytest.approx(k / (k - 1) * (rewards[place] - sum(rewards) / k), abs=1e-12)


def test_leave_one_out_over_the_batch_and_in_a_group_of_one() -> None:
    got = plain([[1.0], [3.0, 8.0]], mean="batch", std="none", leave_one_out=True)
    assert got == [[1 - 5.5], [3 - 4.5, 8 - 2.0]]
    # A group of one uses the statistics of the batch instead of its own.
    assert plain([[1.0], [3.0, 8.0]], std="none", leave_one_out=True) == [[1 - 5.5], [3 - 8.0, 8 - 3.0]]
    assert plain([[1.0]], std="none", leave_one_out=True) == [[0.0]]


def test_a_group_of_one_is_compared_with_the_batch() -> None:
    scores = [[1.0], [3.0, 8.0], [0.0]]
    for std in ("none", "group"):
        alone, group, other = plain(scores, mean="group", std=std)
        over_batch = plain(scores, mean="batch", std="none" if std == "none" else "batch")
        assert alone == pytest.approx(over_batch[0]) and other == pytest.approx(over_batch[2])
        assert group == pytest.approx(plain([[3.0, 8.0]], std=std)[0])
    assert plain([[4.0]]) == [[0.0]]
    assert plain([[4.0], [4.0]]) == [[0.0], [0.0]]  # all scores of the batch are equal


def test_whitening_is_over_tokens() -> None:
    samples = [np.array([0.0, 2.0]), np.array([4.0]), np.array([10.0])]
    white = whitened(samples, ["a", "a", "b"], mean="batch", std="batch", std_estimator="population")
    flat = np.array([0.0, 2.0, 4.0, 10.0])
    assert np.concatenate(white).tolist() == pytest.approx(((flat - 4) / (flat.std() + 1e-5)).tolist())
    by_group = whitened(samples, ["a", "a", "b"], mean="group", std="none", std_estimator="sample")
    assert [values.tolist() for values in by_group] == [[-2.0, 0.0], [2.0], [0.0]]
    equal = whitened(samples, ["a", "a", "b"], mean="none", std="group", std_estimator="sample")
    assert equal[2].tolist() == [0.0] and equal[1].tolist() == pytest.approx([4 / (2 + 1e-5)])
