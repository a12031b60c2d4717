"""Costs are distributed over ranks, the same number to each rank."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_agents.algorithms.packing.balance import balance, imbalance


def test_differencing_finds_the_even_split() -> None:
    # the pairs are (9, 8), (7, 6) and (5, 4): the first two merge to 15 and 15, with the third to 20 and 19
    dealt = balance([4, 5, 6, 7, 8, 9], 2)
    costs = [[[4, 5, 6, 7, 8, 9][i] for i in mine] for mine in dealt]
    assert sorted(map(sum, costs)) == [19, 20]
    assert costs == [sorted(mine, reverse=True) for mine in costs]


def test_the_largest_costs_go_to_different_ranks() -> None:
    dealt = balance([10, 9, 8, 1, 1, 1, 1, 1, 1], 3)
    assert sorted(sum([10, 9, 8, 1, 1, 1, 1, 1, 1][i] for i in mine) for mine in dealt) == [10, 11, 12]
    assert [len(mine) for mine in dealt] == [3, 3, 3]


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.integers(1, 5), st.integers(1, 6), st.randoms(use_true_random=False))
def test_each_rank_gets_the_same_number_and_sums_differ_no_more_than_the_costs(
    ranks: int, each: int, random: object
) -> None:
    costs = [random.uniform(0, 10) for _ in range(ranks * each)]  # type: ignore[attr-defined]
    dealt = balance(costs, ranks)
    assert sorted(i for mine in dealt for i in mine) == list(range(len(costs)))
    assert [len(mine) for mine in dealt] == [each] * ranks
    sums = [sum(costs[i] for i in mine) for mine in dealt]
    assert max(sums) - min(sums) <= max(costs) - min(costs) + 1e-9


def test_a_number_of_costs_that_is_no_multiple_of_the_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="must be a multiple of the ranks, got 5 for 2 ranks"):
        balance([1.0] * 5, 2)


def test_imbalance_is_the_excess_of_the_heaviest_rank_over_the_mean() -> None:
    assert imbalance([3, 1, 2]) == 0.5
    assert imbalance([2, 2]) == 0
    assert imbalance([0, 0]) == 0
