"""The composed loss: decoupled PPO by default, and properties of every composition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from losses_support import Array, Tokens, evaluate, slope

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.losses.objective import Objective, policy_loss
from areal_agents.algorithms.losses.statistics import LossStatistics

# Every loss, correction, KL and bonus appears at least once.
COMPOSITIONS = {
    "decoupled_ppo": {},
    "ppo": {"dual_clip": 3.0, "clip_high": 0.28, "entropy_coefficient": 0.01},
    "gspo": {"policy_loss": "gspo", "clip_low": 0.03, "clip_high": 0.04, "correction_level": "geometric"},
    "cispo": {"policy_loss": "cispo", "clip_low": 1.0, "correction_level": "sequence"},
    "sapo": {"policy_loss": "sapo", "correction": "mask", "weight_floor": 0.5, "veto": 0.05},
    "k3": {"kl_in": "loss", "kl_coefficient": 0.1, "correction": "mask", "weight_cap": 2.0},
    "k2": {"kl_in": "loss", "kl_estimator": "k2", "kl_coefficient": 0.1, "veto": 0.1},
    "turns": {"policy_loss": "gspo", "gspo_level": "turn", "correction_level": "turn"},
    "turn means": {"correction": "mask", "correction_level": "turn_geometric", "veto": 0.01},
    "sft": {"preset": "sft"},
}
ARRAYS = (
    "proximal", "behavior", "advantages", "loss_weights", "sequence_ids", "turn_ids", "reference", "entropy",
)  # fmt: skip


def settings_of(name: str) -> AlgorithmConfig:
    return AlgorithmConfig(**COMPOSITIONS[name])  # type: ignore[arg-type]


def arrays_of(t: Tokens) -> dict[str, Array]:
    return {name: getattr(t, name) for name in ARRAYS}


@pytest.mark.parametrize("seed", range(5))
def test_the_default_is_equation_5_of_the_paper(seed: int) -> None:
    t = Tokens(seed, staleness=1.5)

    def oracle(theta: Array) -> float:
        total = 0.0
        for i, advantage in enumerate(t.advantages):
            weight = min(math.exp(t.proximal[i] - t.behavior[i]), 5.0)
            u = math.exp(theta[i] - t.proximal[i])
            total -= t.loss_weights[i] * weight * min(u * advantage, min(max(u, 0.8), 1.28) * advantage)
        return total

    algorithm = AlgorithmConfig(clip_low=0.2, clip_high=0.28)
    arrays = {name: getattr(t, name) for name in ARRAYS[:4]}
    loss, gradient, statistics = evaluate(t.current, algorithm=algorithm, **arrays)
    assert loss == pytest.approx(oracle(t.current), rel=1e-12)
    assert gradient == pytest.approx(slope(oracle, t.current), rel=1e-5, abs=1e-9)
    assert statistics["weight_capped"] == (t.proximal - t.behavior > math.log(5)).sum()
    moved, distance = t.current - t.proximal, t.current - t.behavior
    assert statistics["ratio"] == pytest.approx(np.exp(moved).sum())
    assert statistics["abs_log_ratio_max"] == pytest.approx(np.abs(moved).max())
    assert statistics["kl_k1"] == pytest.approx(-distance.sum())
    assert statistics["kl_k3"] == pytest.approx((np.exp(distance) - 1 - distance).sum())
    single, single_gradient, _ = evaluate(t.current, algorithm=algorithm, dtype=torch.float32, **arrays)
    assert single == pytest.approx(loss, rel=1e-5)
    assert single_gradient == pytest.approx(gradient, rel=1e-4, abs=1e-7)


def test_the_gradient_of_a_token_mean_equals_that_of_the_divided_sum_bit_for_bit() -> None:
    """The reference is equation 5 as one expression in float32: the sum, divided by the token count."""
    t = Tokens(0, staleness=1.5)
    theta, proximal, behavior, advantages = (
        torch.tensor(a, dtype=torch.float32) for a in (t.current, t.proximal, t.behavior, t.advantages)
    )
    theta.requires_grad_(True)
    u = (theta - proximal).exp()
    weight = (proximal - behavior).exp().clamp(max=5.0)
    objective = weight * torch.minimum(u * advantages, u.clamp(0.8, 1.2) * advantages)
    (-objective.sum() / len(t)).backward()
    _, gradient, _ = evaluate(
        t.current, proximal=t.proximal, behavior=t.behavior, advantages=t.advantages,
        loss_weights=np.full(len(t), 1 / len(t)), dtype=torch.float32,
    )  # fmt: skip
    assert theta.grad is not None and (gradient == theta.grad.double().numpy()).all()


def test_on_policy_the_loss_is_minus_the_mean_advantage() -> None:
    logprobs = [-1.0, -2.0, -3.0]
    loss, gradient, statistics = evaluate(
        logprobs, proximal=logprobs, behavior=logprobs, advantages=[1.0, -2.0, 4.0], loss_weights=[1 / 3] * 3
    )
    assert loss == pytest.approx(-1.0)
    assert gradient.tolist() == pytest.approx([-1 / 3, 2 / 3, -4 / 3])
    assert statistics["weight"] == statistics["ratio"] == 3 and statistics["abs_diff_max"] == 0
    assert statistics["kl_k1"] == statistics["kl_k3"] == 0
    assert statistics["clipped_low"] == statistics["clipped_high"] == 0


def test_the_weight_is_always_applied_and_truncated_at_its_cap() -> None:
    # w = e^1 stays, w = e^3 is capped at 5
    same = [-1.0, -1.0]
    loss, _, statistics = evaluate(same, proximal=same, behavior=[-2.0, -4.0], advantages=[1.0, 1.0])
    assert loss == pytest.approx(-(math.e + 5))
    assert statistics["weight_capped"] == 1
    assert statistics["weight"] == pytest.approx(math.e + 5)
    assert statistics["weight_squared"] == pytest.approx(math.e**2 + 25)
    assert statistics["weight_raw"] == pytest.approx(math.e + math.e**3)


def test_a_rejected_token_is_in_no_term_of_the_loss_but_in_the_denominator() -> None:
    same = [-1.0, -1.0]
    loss, gradient, statistics = evaluate(
        same, proximal=same, behavior=[-1.0, -4.0], advantages=[1.0, 1.0], loss_weights=[0.5, 0.5],
        reference=[-2.0, -3.0], entropy=[1.0, 7.0],
        algorithm=AlgorithmConfig(
            correction="mask", kl_in="loss", kl_estimator="k2", kl_coefficient=0.1,
            entropy_coefficient=0.01,
        ),
    )  # fmt: skip
    assert loss == pytest.approx(0.5 * (-1 + 0.1 * 0.5 - 0.01))
    assert gradient.tolist() == pytest.approx([0.5 * (-1 + 0.1), 0])
    assert statistics["rejected_tokens"] == 1 and statistics["rejected_sequences"] == 0


def test_the_entropy_bonus_has_a_gradient() -> None:
    logits = torch.tensor([[0.3, -1.0, 2.0], [0.0, 0.5, 0.1]], dtype=torch.float64, requires_grad=True)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        logp = torch.log_softmax(logits, -1)
        zeros, weights = torch.zeros(2).double(), torch.tensor([0.5, 0.25]).double()
        return policy_loss(
            logp[:, 0], Objective.of(AlgorithmConfig(entropy_coefficient=0.2)),
            proximal=logp[:, 0].detach(), behavior=zeros, advantages=zeros, loss_weights=weights,
            sequence_ids=torch.zeros(2).long(), entropy=-(logp.exp() * logp).sum(-1),
        )[0]  # fmt: skip

    p = torch.softmax(logits.detach(), -1)
    entropy = -(p * p.log()).sum(-1)
    assert loss(logits).item() == pytest.approx(-0.2 * (0.5 * entropy[0] + 0.25 * entropy[1]).item())
    assert torch.autograd.gradcheck(loss, logits)


def test_statistics_by_hand() -> None:
    _, _, statistics = evaluate(
        [-1.0, -2.0], proximal=[-1.0, -2.0], behavior=[-1.5, -1.0], advantages=[1.0, 1.0],
        on_policy=[True, False], entropy=[0.5, 0.25],
    )  # fmt: skip
    assert statistics["kl_k1"] == pytest.approx(-0.5 + 1.0)
    assert statistics["kl_k3"] == pytest.approx((math.exp(0.5) - 1 - 0.5) + (math.exp(-1) - 1 + 1), rel=1e-5)
    assert statistics["abs_diff"] == pytest.approx(1.5)
    assert statistics["on_policy_abs_diff"] == pytest.approx(0.5) and statistics["on_policy_tokens"] == 1
    assert statistics["abs_diff_max"] == 1.0 and statistics["on_policy_abs_diff_max"] == 0.5
    assert statistics["weight_raw_max"] == pytest.approx(math.exp(0.5)) and statistics["entropy"] == 0.75
    assert statistics["tokens"] == 2 and statistics["sequences"] == 1 and statistics["dropped_tokens"] == 0


def test_masked_tokens_contribute_nothing_even_if_they_are_not_finite() -> None:
    bad = [-1.0, math.inf, math.nan]
    for name in COMPOSITIONS:
        loss, gradient, statistics = evaluate(
            bad, proximal=bad, behavior=bad, advantages=[1.0, math.nan, math.inf], reference=bad,
            entropy=[0.0, math.nan, math.nan], keep=[True, False, False], algorithm=settings_of(name),
        )  # fmt: skip
        alone, _, _ = evaluate(
            bad[:1], proximal=bad[:1], behavior=bad[:1], advantages=[1.0], reference=bad[:1], entropy=[0.0],
            algorithm=settings_of(name),
        )  # fmt: skip
        assert loss == pytest.approx(alone) != 0
        assert gradient.tolist() == pytest.approx([-1.0, 0.0, 0.0])
        assert statistics["tokens"] == 1 and all(math.isfinite(value) for value in statistics.values())


def test_an_untrained_token_counts_only_in_the_ratio_of_its_sequence() -> None:
    """w = sqrt(2 · 8), and the loss is that of the second token, whatever the advantage of the first."""
    algorithm = AlgorithmConfig(
        correction_level="geometric", kl_in="loss", kl_coefficient=0.5, entropy_coefficient=0.1
    )
    loss, gradient, statistics = evaluate(
        [-1.0, -1.0], proximal=[-1.0, -1.0], behavior=[-1 - math.log(2), -1 - math.log(8)],
        advantages=[7.0, 3.0], loss_weights=[9.0, 0.5], reference=[-3.0, -1.0], entropy=[5.0, 2.0],
        trained=[False, True], algorithm=algorithm,
    )  # fmt: skip
    assert loss == pytest.approx(0.5 * (-4 * 3 - 0.1 * 2))
    assert gradient.tolist() == pytest.approx([0, -0.5 * 4 * 3])
    assert (statistics["tokens"], statistics["sequences"], statistics["dropped_tokens"]) == (1, 1, 0)
    assert statistics["weight"] == pytest.approx(4) and statistics["entropy"] == 2
    assert statistics["abs_diff"] == pytest.approx(math.log(8)) and statistics["kl_reference"] == 0


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_extreme_ratios_stay_finite(name: str) -> None:
    far, zero = [-1e4, 0.0, -1e4, 0.0], [0.0, -1e4, 0.0, -1e4]
    for current, proximal, behavior in ((far, zero, zero), (zero, zero, far), (far, zero, far)):
        loss, gradient, statistics = evaluate(
            current, proximal=proximal, behavior=behavior, advantages=[1.0, -1.0, -1.0, 1.0],
            reference=far, entropy=[0.0] * 4, algorithm=settings_of(name), dtype=torch.float32,
        )  # fmt: skip
        assert math.isfinite(loss) and np.isfinite(gradient).all()
        assert all(math.isfinite(value) for value in statistics.values())


@pytest.mark.parametrize("name", COMPOSITIONS)
@given(seed=st.integers(0, 10**6), cuts=st.sets(st.integers(0, 7), max_size=3))
@settings(derandomize=True, deadline=None, max_examples=15)
def test_micro_batches_cut_between_sequences_add_up(name: str, seed: int, cuts: set[int]) -> None:
    t = Tokens(seed)
    bounds = [0, *sorted(cuts), 7]
    groups = t.sequences()
    parts = [
        np.concatenate([*groups[a:b], np.empty(0, np.int64)])
        for a, b in zip(bounds, bounds[1:], strict=False)
    ]
    arrays, algorithm = arrays_of(t), settings_of(name)
    loss, gradient, statistics = evaluate(t.current, algorithm=algorithm, **arrays)
    cut_loss, cut_gradient, total = 0.0, np.zeros(len(t)), LossStatistics.zero()
    for at in parts:
        tensors = {n: torch.tensor(a[at]) for n, a in arrays.items()}
        theta = torch.tensor(t.current[at], requires_grad=True)
        part, part_statistics, _ = policy_loss(theta, Objective.of(algorithm), **tensors)  # type: ignore[arg-type]
        part.backward()
        assert theta.grad is not None
        cut_loss, total = cut_loss + part.item(), total + part_statistics
        cut_gradient[at] = theta.grad.numpy()
    assert cut_loss == pytest.approx(loss, rel=1e-9, abs=1e-12)
    assert cut_gradient == pytest.approx(gradient, rel=1e-9, abs=1e-12)
    assert total.as_dict() == pytest.approx(statistics, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_the_loss_without_tokens_is_zero_and_differentiable(name: str) -> None:
    loss, gradient, statistics = evaluate(
        [], proximal=[], behavior=[], advantages=[], reference=[], entropy=[], keep=[], on_policy=[],
        algorithm=settings_of(name),
    )  # fmt: skip
    assert loss == 0 and gradient.shape == (0,)
    assert statistics == LossStatistics.zero().as_dict()


def test_invalid_arguments_are_named_in_the_error() -> None:
    with pytest.raises(ValueError, match=r"one shape, got \[\(1,\), \(2,\)\]"):
        evaluate([-1.0], proximal=[-1.0, -1.0], behavior=[-1.0], advantages=[1.0])
    one = {"proximal": [-1.0], "behavior": [-1.0], "advantages": [1.0]}
    with pytest.raises(ValueError, match="KL in the loss needs `reference`"):
        evaluate([-1.0], algorithm=settings_of("k3"), **one)
    with pytest.raises(ValueError, match="entropy coefficient needs `entropy`"):
        evaluate([-1.0], algorithm=settings_of("ppo"), **one)
