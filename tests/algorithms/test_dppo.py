"""DPPO, compared with the objective of its paper (arXiv 2602.04879) token by token in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from losses_support import Array, Tokens, evaluate, slope
from pydantic import ValidationError

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.losses.dppo import dppo


def config(**given: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"preset": "dppo", "weight_cap": 1e9, **given})


def divergence(kind: str, pi: float, mu: float) -> float:
    if kind == "tv":
        return abs(pi - mu)
    return mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))


def tokens(seed: int) -> Tokens:
    """Random tokens, some of which are likely enough to change their probability by more than a threshold."""
    t = Tokens(seed, staleness=0.4)
    rng = np.random.default_rng(seed)
    t.proximal = rng.uniform(-2, -0.3, len(t))
    t.current = np.minimum(t.proximal + rng.normal(0, 0.4, len(t)), -0.01)
    t.behavior = np.minimum(t.proximal + rng.normal(0, 0.4, len(t)), -0.01)
    return t


def given(t: Tokens) -> dict[str, Any]:
    names = ("proximal", "behavior", "advantages", "loss_weights", "sequence_ids")
    return {name: getattr(t, name) for name in names}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("kind", "low", "high", "coefficient"),
    [("tv", 0.2, 0.2, 1e-3), ("tv", 0.05, 0.15, 0.0), ("kl", 0.05, 0.02, 0.3)],
)
def test_loss_and_gradient_equal_the_paper(
    seed: int, kind: str, low: float, high: float, coefficient: float
) -> None:
    t = tokens(seed)
    masked_low, masked_high = np.zeros(len(t), bool), np.zeros(len(t), bool)
    for i, advantage in enumerate(t.advantages):
        pi, mu = math.exp(t.current[i]), math.exp(t.behavior[i])
        distance = divergence(kind, pi, mu)
        masked_high[i] = advantage > 0 and pi / mu > 1 and distance > high
        masked_low[i] = advantage < 0 and pi / mu < 1 and distance > low

    def oracle(theta: Array) -> float:
        """The paper's ratio is π_θ/μ, whatever the proximal policy; prime-rl adds the squared log-ratio."""
        total = 0.0
        for i, advantage in enumerate(t.advantages):
            moved = theta[i] - t.behavior[i]
            mask = not (masked_low[i] or masked_high[i])
            total += t.loss_weights[i] * (coefficient * moved**2 - mask * math.exp(moved) * advantage)
        return total

    algorithm = config(dppo_divergence=kind, dppo_low=low, dppo_high=high, dppo_kl_coefficient=coefficient)
    loss, gradient, statistics = evaluate(t.current, algorithm=algorithm, **given(t))
    assert loss == pytest.approx(oracle(t.current), rel=1e-11)
    assert gradient == pytest.approx(slope(oracle, t.current), rel=1e-5, abs=1e-9)
    assert statistics["clipped_low"] == masked_low.sum() > 0
    assert statistics["clipped_high"] == masked_high.sum() > 0


def test_a_mask_does_not_depend_on_the_proximal_policy() -> None:
    t = tokens(5)
    moved = given(t) | {"proximal": t.proximal - 0.7}
    loss, gradient, statistics = evaluate(t.current, algorithm=config(), **given(t))
    again, gradient_again, statistics_again = evaluate(t.current, algorithm=config(), **moved)
    assert again == pytest.approx(loss) and gradient_again == pytest.approx(gradient)
    for name in ("clipped_low", "clipped_high"):
        assert statistics[name] == statistics_again[name] > 0


def test_the_weight_is_capped_by_the_correction() -> None:
    t = tokens(6)
    low, _, _ = evaluate(t.current, algorithm=config(weight_cap=1.0), **given(t))
    weights = np.minimum(np.exp(t.proximal - t.behavior), 1.0)
    ratio, moved = np.exp(t.current - t.proximal), np.exp(t.current) - np.exp(t.behavior)
    mask = ~(((t.advantages > 0) & (moved > 0.2)) | ((t.advantages < 0) & (moved < -0.2)))
    penalty = 1e-3 * (t.current - t.behavior) ** 2
    assert low == pytest.approx((t.loss_weights * (penalty - weights * mask * ratio * t.advantages)).sum())


def test_a_rare_token_may_become_much_likelier_and_a_likely_one_not_much_rarer() -> None:
    """The point of the paper: PPO's clip does the opposite."""
    behavior = torch.tensor([1e-5, 0.99]).log()
    current = torch.tensor([1e-3, 0.75]).log()
    values = dppo(
        current - behavior, current, behavior, torch.tensor([1.0, -1.0]),
        divergence="tv", low=0.2, high=0.2, kl_coefficient=0.0,
    )  # fmt: skip
    assert values.clipped_low is not None and values.clipped_high is not None
    assert values.clipped_low.tolist() == [False, True] and not values.clipped_high.any()
    assert values.values.tolist() == pytest.approx([-100.0, 0.0])


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_the_gradient_at_tokens_of_probability_one_is_finite(kind: Any) -> None:
    behavior = torch.tensor([0.0, 0.0, -1.0])
    current = torch.tensor([0.0, -1.0, 0.0], requires_grad=True)
    made = dppo(
        current - behavior, current, behavior, torch.tensor([1.0, -1.0, 1.0]),
        divergence=kind, low=0.05, high=0.05, kl_coefficient=1.0,
    )  # fmt: skip
    assert made.unweighted is not None and made.clipped_low is not None and made.clipped_high is not None
    (made.values + made.unweighted).sum().backward()
    assert current.grad is not None and current.grad.isfinite().all()
    assert (made.clipped_low | made.clipped_high).tolist() == [False, True, True]


def test_a_token_that_is_not_kept_has_no_loss_and_no_gradient() -> None:
    t = tokens(7)
    keep = np.arange(len(t)) % 3 > 0
    loss, gradient, _ = evaluate(t.current, algorithm=config(), keep=keep, **given(t))
    kept = {name: array[keep] for name, array in given(t).items()}
    want, want_gradient, _ = evaluate(t.current[keep], algorithm=config(), **kept)
    assert loss == pytest.approx(want)
    assert gradient[keep] == pytest.approx(want_gradient) and (gradient[~keep] == 0).all()


def test_settings_of_the_preset_and_refused_values() -> None:
    made = AlgorithmConfig(preset="dppo")
    assert made.policy_loss.kind == "dppo" and made.estimator.advantage_std == "none"
    assert (made.policy_loss.dppo_low, made.policy_loss.dppo_high) == (0.2, 0.2)
    assert made.policy_loss.dppo_kl_coefficient == 1e-3
    with pytest.raises(ValidationError, match="the paper uses 0.05 for both"):
        config(dppo_divergence="kl")
    with pytest.raises(ValidationError, match="dppo_low"):
        AlgorithmConfig.model_validate({"dppo_low": 0.1})
