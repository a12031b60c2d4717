"""Compares estimators with enumeration, and intervals and tests with reference values of scipy 1.17.1."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from areal_agents.evaluation.estimators import (
    interval,
    majority_score,
    mcnemar_p,
    pass_at_k,
    pass_hat_k,
    sign_flip_p,
    t_interval,
    t_quantile,
)


@pytest.mark.parametrize("attempts", [1, 2, 5, 7])
def test_pass_at_k_and_pass_hat_k_are_shares_of_subsets(attempts: int) -> None:
    for passed, k in itertools.product(range(attempts + 1), range(1, attempts + 1)):
        scores = [1] * passed + [0] * (attempts - passed)
        subsets = list(itertools.combinations(scores, k))
        assert pass_at_k(attempts, passed, k) == pytest.approx(sum(map(max, subsets)) / len(subsets))
        assert pass_hat_k(attempts, passed, k) == pytest.approx(sum(map(min, subsets)) / len(subsets))


@pytest.mark.parametrize("estimator", [pass_at_k, pass_hat_k])
def test_no_more_attempts_are_sampled_than_there_are(estimator: Callable[[int, int, int], float]) -> None:
    with pytest.raises(ValueError, match="1 ≤ k ≤ attempts"):
        estimator(2, 1, 3)


@pytest.mark.parametrize(
    ("answers", "scores", "expected"),
    [
        (["a", "b", "a"], [1.0, 0.0, 1.0], 1.0),
        (["a", "b", "b"], [1.0, 0.0, 0.0], 0.0),
        (["a", "b"], [1.0, 0.0], 0.5),  # a tie is broken at random
        ([None, None, "a"], [0.0, 0.0, 1.0], 1.0),  # no answer, no vote
        ([None, None], [1.0, 1.0], 0.0),
        (["a", "a", "b"], [1.0, 0.5, 0.0], 0.75),  # equal answers with different scores
    ],
)
def test_the_score_is_that_of_the_majority_answer(
    answers: list[str | None], scores: list[float], expected: float
) -> None:
    assert majority_score(answers, scores) == expected


@pytest.mark.parametrize(
    ("p", "degrees", "expected"),  # scipy.stats.t.ppf
    [
        (0.975, 1, 12.706204736174694),
        (0.975, 2, 4.302652729749462),
        (0.95, 3, 2.3533634348018233),
        (0.975, 10, 2.228138851986274),
        (0.995, 30, 2.7499956535672254),
        (0.975, 499, 1.9647293909876886),
    ],
)
def test_quantiles_of_students_t_match_scipy(p: float, degrees: int, expected: float) -> None:
    assert t_quantile(p, degrees) == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize(
    ("ones", "count", "low", "high"),  # scipy.stats.binomtest(…).proportion_ci(method="wilson")
    [
        (0, 5, 0.0, 0.43448246478317476),
        (5, 5, 0.5655175352168251, 1.0),
        (3, 10, 0.10779126740630102, 0.6032218525388546),
        (64, 128, 0.41465224626050723, 0.5853477537394928),
    ],
)
def test_shares_have_wilsons_interval(ones: int, count: int, low: float, high: float) -> None:
    assert interval([1.0] * ones + [0.0] * (count - ones)) == pytest.approx((low, high), abs=1e-12)


def test_other_values_have_students_interval() -> None:
    values = [0.25, 0.5, 0.75, 0.5, 1.0]
    expected = (0.24607130575443192, 0.953928694245568)  # scipy.stats.t.interval(0.95, 4, mean, sem)
    assert interval(values) == pytest.approx(expected, rel=1e-12)
    assert interval([0.5]) is None and interval([0.5, 0.5]) is None and t_interval([1.0, 1.0]) is None


def test_sign_flips_are_enumerated_or_sampled() -> None:
    differences = [0.5, -0.25, 0.75, 0.5, 0.25, 0.0, -0.5, 1.0]
    assert sign_flip_p(differences) == 0.21875  # scipy.stats.permutation_test, exact
    assert sign_flip_p([0.0, 0.0]) == 1.0
    many = [1.0] * 13 + [-1.0] * 7  # too many to enumerate
    assert sign_flip_p(many) == pytest.approx(mcnemar_p(13, 7), abs=0.01)
    assert 0 < sign_flip_p([1.0] * 200) < 1e-4


@pytest.mark.parametrize(("worse", "better"), [(1, 6), (3, 3), (0, 5), (0, 0), (2, 9)])
def test_mcnemar_equals_the_enumeration_of_sign_flips(worse: int, better: int) -> None:
    differences = [-1.0] * worse + [1.0] * better + [0.0] * 3
    assert mcnemar_p(worse, better) == pytest.approx(sign_flip_p(differences))


def test_mcnemar_by_hand() -> None:
    assert mcnemar_p(0, 5) == 2 / 32 and mcnemar_p(1, 6) == 2 * 8 / 128
