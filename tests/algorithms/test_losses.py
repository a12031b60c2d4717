"""Decoupled PPO against an independent float64 computation of the paper's equation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from areal_agents.algorithms.losses import LossStatistics, decoupled_ppo_loss


def loss_of(current, proximal, behavior, advantages, mask=None, **options):  # type: ignore[no-untyped-def]
    tensors = [torch.as_tensor(v, dtype=torch.float32) for v in (current, proximal, behavior, advantages)]
    mask = torch.ones(len(tensors[0]), dtype=torch.bool) if mask is None else torch.as_tensor(mask)
    options = {"clip_low": 0.2, "clip_high": 0.28, "weight_cap": 5.0, "denominator": len(mask), **options}
    tensors[0].requires_grad_(True)
    loss, statistics = decoupled_ppo_loss(*tensors, mask, **options)
    loss.backward()
    return loss.item(), tensors[0].grad, statistics.as_dict()


def reference(current, proximal, behavior, advantages, low, high, cap, denominator):  # type: ignore[no-untyped-def]
    """Equation 5 of arXiv 2505.24298 token by token, and its derivative, in Python floats."""
    total, gradient = 0.0, []
    for theta, prox, mu, advantage in zip(current, proximal, behavior, advantages, strict=True):
        weight = min(math.exp(prox - mu), cap)
        u = math.exp(theta - prox)
        clipped = min(max(u, 1 - low), 1 + high)
        total -= weight * min(u * advantage, clipped * advantage) / denominator
        active = u * advantage <= clipped * advantage
        gradient.append(-weight * u * advantage / denominator if active else 0.0)
    return total, gradient


@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_equal_the_formula(seed: int) -> None:
    rng = np.random.default_rng(seed)
    proximal = rng.uniform(-8, -0.1, 64)
    current, behavior = proximal + rng.normal(0, 0.3, 64), proximal + rng.normal(0, 1.5, 64)
    advantages = rng.normal(size=64)
    want, want_gradient = reference(current, proximal, behavior, advantages, 0.2, 0.28, 5.0, 100.0)
    got, gradient, statistics = loss_of(current, proximal, behavior, advantages, denominator=100.0)
    assert got == pytest.approx(want, rel=1e-5, abs=1e-7)
    assert gradient.tolist() == pytest.approx(want_gradient, rel=1e-4, abs=1e-7)
    assert (
        statistics["clipped_low"] > 0 and statistics["clipped_high"] > 0 and statistics["weight_capped"] > 0
    )


def test_on_policy_ratio_and_weight_are_one_and_the_loss_is_minus_the_mean_advantage() -> None:
    logprobs, advantages = [-1.0, -2.0, -3.0], [1.0, -2.0, 4.0]
    loss, gradient, statistics = loss_of(logprobs, logprobs, logprobs, advantages)
    assert loss == pytest.approx(-1.0)
    assert gradient.tolist() == pytest.approx([-1 / 3, 2 / 3, -4 / 3])
    assert statistics["weight"] == 3 and statistics["kl_k1"] == 0 and statistics["kl_k3"] == 0
    assert statistics["abs_diff_max"] == 0 and statistics["clipped_low"] == statistics["clipped_high"] == 0


def test_the_weight_is_always_applied_and_truncated_at_its_cap() -> None:
    # w = e^1 stays, w = e^3 is capped at 5
    loss, _, statistics = loss_of([-1.0, -1.0], [-1.0, -1.0], [-2.0, -4.0], [1.0, 1.0], denominator=1)
    assert loss == pytest.approx(-(math.e + 5))
    assert statistics["weight_capped"] == 1
    assert statistics["weight"] == pytest.approx(math.e + 5)


def test_statistics_by_hand() -> None:
    _, _, statistics = loss_of(
        [-1.0, -2.0], [-1.0, -2.0], [-1.5, -1.0], [1.0, 1.0],
        on_policy=torch.tensor([True, False]), entropy=torch.tensor([0.5, 0.25]),
    )  # fmt: skip
    assert statistics["kl_k1"] == pytest.approx(-0.5 + 1.0)
    assert statistics["kl_k3"] == pytest.approx((math.exp(0.5) - 1 - 0.5) + (math.exp(-1) - 1 + 1), rel=1e-5)
    assert statistics["abs_diff"] == pytest.approx(1.5)
    assert statistics["on_policy_abs_diff"] == pytest.approx(0.5) and statistics["on_policy_tokens"] == 1
    assert statistics["abs_diff_max"] == 1.0 and statistics["on_policy_abs_diff_max"] == 0.5
    assert statistics["entropy"] == 0.75


def test_masked_tokens_count_for_nothing_whatever_they_hold() -> None:
    bad = [-1.0, float("inf"), float("nan")]
    loss, gradient, statistics = loss_of(bad, bad, bad, bad, [True, False, False], denominator=1)
    assert loss == pytest.approx(1.0) and gradient.tolist() == [1.0, 0.0, 0.0]
    assert statistics["tokens"] == 1 and math.isfinite(statistics["kl_k3"])


def test_extreme_ratios_stay_finite() -> None:
    loss, gradient, _ = loss_of([-1e4, 0.0], [0.0, -1e4], [0.0, 0.0], [1.0, -1.0])
    assert math.isfinite(loss) and torch.isfinite(gradient).all()


def test_losses_and_statistics_of_parts_add_up() -> None:
    rng = np.random.default_rng(0)
    arrays = rng.normal(-2, 0.5, (4, 10))
    whole, gradient, statistics = loss_of(*arrays, denominator=10)
    parts = [loss_of(*arrays[:, at], denominator=10) for at in (slice(0, 3), slice(3, 10))]
    assert sum(part[0] for part in parts) == pytest.approx(whole)
    assert torch.cat([part[1] for part in parts]).tolist() == pytest.approx(gradient.tolist())
    assert sum(part[2]["kl_k3"] for part in parts) == pytest.approx(statistics["kl_k3"])
    assert max(part[2]["abs_diff_max"] for part in parts) == statistics["abs_diff_max"]


def test_no_token_is_no_loss_with_a_gradient_of_zero() -> None:
    loss, gradient, statistics = loss_of([], [], [], [], denominator=1)
    assert loss == 0 and gradient.shape == (0,)
    assert statistics == LossStatistics.zero().as_dict()


def test_bad_arguments_say_what_was_got() -> None:
    with pytest.raises(ValueError, match="one shape"):
        loss_of([-1.0], [-1.0, -1.0], [-1.0], [1.0], [True])
    with pytest.raises(ValueError, match="denominator must be positive, got 0"):
        loss_of([-1.0], [-1.0], [-1.0], [1.0], denominator=0)
