"""DPO in two passes, compared with the gradient of the loss of the paper."""

from __future__ import annotations

import math

import numpy as np
import pytest
from losses_support import Tokens, evaluate, slope

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.losses.dpo import dpo_coefficients

PAIRS = [("a", "b"), ("c", "d"), ("a", "d")]


def loss_of(sums: dict[str, float], reference: dict[str, float], beta: float) -> float:
    losses = []
    for chosen, rejected in PAIRS:
        margin = beta * (sums[chosen] - reference[chosen] - sums[rejected] + reference[rejected])
        losses.append(-math.log(1 / (1 + math.exp(-margin))))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("seed", range(3))
def test_two_passes_give_the_gradient_of_the_loss(seed: int) -> None:
    t = Tokens(seed)
    # seven samples of four episodes: most episodes have tokens in two samples
    episodes = np.array(
        [dict(zip(np.unique(t.sequence_ids), "abcdabc", strict=True))[i] for i in t.sequence_ids]
    )

    def sums(logprobs: np.ndarray) -> dict[str, float]:
        return {e: float(logprobs[episodes == e].sum()) for e in "abcd"}

    def oracle(theta: np.ndarray) -> float:
        return loss_of(sums(theta), sums(t.reference), 0.5)

    first = dpo_coefficients(sums(t.current), sums(t.reference), PAIRS, beta=0.5)
    assert first.loss == pytest.approx(oracle(t.current), rel=1e-9)
    coefficients = np.array([first.by_episode[e] for e in episodes])
    _, gradient, _ = evaluate(
        t.current, proximal=t.current, behavior=t.behavior, advantages=coefficients,
        sequence_ids=t.sequence_ids, algorithm=AlgorithmConfig(preset="dpo"),
    )  # fmt: skip
    assert gradient == pytest.approx(slope(oracle, t.current), rel=1e-5, abs=1e-9)


def test_coefficients_by_hand() -> None:
    zero = dict.fromkeys("abcd", 0.0)
    equal = dpo_coefficients(zero, zero, PAIRS, beta=0.3)
    assert equal.loss == pytest.approx(math.log(2)) and equal.accuracy == 0 and equal.margin == 0
    assert equal.by_episode == pytest.approx({"a": 0.1, "b": -0.05, "c": 0.05, "d": -0.1})
    apart = dpo_coefficients(zero | {"a": 2.0}, zero, [("a", "b"), ("b", "a")], beta=1.0)
    assert apart.accuracy == 0.5 and apart.margin == 0


def test_extreme_sums_stay_finite() -> None:
    sums, zero = {"a": 1e6, "b": -1e6}, {"a": 0.0, "b": 0.0}
    right, wrong = (dpo_coefficients(sums, zero, [pair], beta=0.1) for pair in (("a", "b"), ("b", "a")))
    assert right.loss == 0 and right.by_episode == {"a": 0.0, "b": 0.0}
    assert wrong.loss == pytest.approx(2e5) and wrong.by_episode == pytest.approx({"a": -0.1, "b": 0.1})


def test_invalid_arguments_are_named_in_the_error() -> None:
    with pytest.raises(ValueError, match=r"both logprob sums, missing: \['b'\]"):
        dpo_coefficients({"a": 0.0}, {"a": 0.0, "b": 0.0}, [("a", "b")], beta=0.1)
    with pytest.raises(ValueError, match="got 0 pairs"):
        dpo_coefficients({}, {}, [], beta=0.1)
    with pytest.raises(ValueError, match="beta 0"):
        dpo_coefficients({"a": 0.0}, {"a": 0.0}, [("a", "a")], beta=0)
