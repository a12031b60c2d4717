"""MaxRL: advantages by the formula, and their expected gradient by the expansion of log p."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from algorithms_support import episode, group, turn
from pydantic import ValidationError

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.samples import TrainingData, build_training_data
from areal_agents.errors import TrainingError


def config(**given: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"preset": "maxrl", **given})


def trained(scores: list[float], **given: Any) -> TrainingData:
    """The training data of one group, whose episodes have two turns each."""
    members = [
        episode([turn(f"{i}a"), turn(f"{i}b", f"{i}a")], score, id=f"e{i}") for i, score in enumerate(scores)
    ]
    return build_training_data([group(members)], config(**given))


def advantages(scores: list[float], **given: Any) -> list[float]:
    """For each episode, the advantage that all its trained tokens share."""
    found = []
    for sample in trained(scores, **given).samples:
        (value,) = set(sample.advantages[sample.loss_mask].tolist())
        found.append(value)
    return found


def test_the_advantage_is_the_score_less_the_mean_divided_by_the_mean() -> None:
    assert advantages([1.0, 0.0, 0.0, 0.0]) == [3.0, -1.0, -1.0, -1.0]
    assert advantages([3.0, 1.0]) == [0.5, -0.5]
    assert advantages([0.0, 0.0, 0.0]) == [0.0, 0.0, 0.0]
    assert advantages([0.1] * 10) == [0.0] * 10


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("p", [0.05, 0.4, 0.9])
def test_the_expected_gradient_is_that_of_the_truncated_log_likelihood(p: float, size: int) -> None:
    # A policy with one parameter, the logit of p: d log π(solved) = 1 − p, d log π(failed) = −p.
    expected = 0.0
    for scores in itertools.product([0.0, 1.0], repeat=size):
        probability = math.prod(p if score else 1 - p for score in scores)
        found = advantages(list(scores))
        expected += probability * sum(a * ((1 - p) if s else -p) for a, s in zip(found, scores, strict=True))
    # d/dp of −Σ_{k<G} (1 − p)^k/k is Σ_{k<G} (1 − p)^(k−1), and dp/dlogit = p (1 − p)
    truncated = sum((1 - p) ** (k - 1) for k in range(1, size)) * p * (1 - p)
    assert expected / size == pytest.approx(truncated, rel=1e-6)  # advantages are stored as float32


def test_a_negative_score_is_refused_and_the_group_is_named() -> None:
    with pytest.raises(TrainingError, match=r"group g has an episode with the score -0\.5.*0 or more"):
        trained([1.0, -0.5])
    assert advantages([1.0, -0.5], reward_bias=0.5) == [1.0, -1.0]
    cancelling = [turn("x")]
    zero = episode(cancelling, -0.3, id="zero", by_turn={"x": 0.1}, by_branch={"x": 0.2})
    data = build_training_data([group([zero, episode([turn("y")], 1.0, id="one")])], config())
    assert [float(s.advantages[-1]) for s in data.samples] == [-1.0, 1.0]


def test_groups_of_equal_scores_are_dropped() -> None:
    made = trained([1.0, 1.0], drop_equal_groups=True)
    assert made.samples == () and made.report.equal_groups == ("g",)
    assert trained([1.0, 0.0], drop_equal_groups=True).report.equal_groups == ()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"reward_scale": 2.0}, "reward_scale: 2.0 is divided out again by the mean"),
        (
            {"length_penalty": "linear", "overlong_limit": 10, "overlong_buffer": 5},
            "length_penalty: linear makes scores negative",
        ),
        (
            {"kl_in": "reward", "kl_coefficient": 0.1},
            "estimator: maxrl cannot be combined with kl_in: reward",
        ),
        ({"advantage_std": "none"}, "advantage_std: none needs estimator: group or estimator: gae"),
        ({"leave_one_out": True}, "leave_one_out: true needs estimator: group"),
        ({"credit": "reward_to_go"}, "credit: reward_to_go needs estimator: group"),
        (
            {"policy_loss": "sft", "estimator": "maxrl"},
            "estimator: maxrl cannot be combined with policy_loss: sft",
        ),
    ],
)
def test_settings_that_maxrl_cannot_use_are_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError) as caught:
        config(**given)
    assert reason in str(caught.value)


def test_scale_and_clip_are_applied_to_the_scores() -> None:
    assert advantages([0.2, 0.6], reward_scale=2.0, reward_clip=0.8) == pytest.approx([-1 / 3, 1 / 3])
