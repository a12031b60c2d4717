"""The value and gradient of each policy loss, compared with the equation of its paper in float64.

An oracle is a function of the current logprobs; sg(x) is written as the value at the point where the
derivative is taken, so that central differences see it as a constant.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from losses_support import Array, Tokens, evaluate, slope

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.losses.cispo import cispo
from areal_agents.algorithms.losses.gspo import gspo
from areal_agents.algorithms.losses.likelihood import likelihood
from areal_agents.algorithms.losses.ppo import ppo
from areal_agents.algorithms.losses.ratios import Sequences
from areal_agents.algorithms.losses.sapo import sapo

SEEDS = range(4)


def check(t: Tokens, oracle, algorithm: AlgorithmConfig, advantages: Array | None = None) -> dict[str, float]:  # type: ignore[no-untyped-def]
    """Compare loss and gradient with the oracle, with the proximal policy as behavior policy."""
    advantages = t.advantages if advantages is None else advantages
    loss, gradient, statistics = evaluate(
        t.current, proximal=t.proximal, behavior=t.proximal, advantages=advantages,
        loss_weights=t.loss_weights, sequence_ids=t.sequence_ids, turn_ids=t.turn_ids, algorithm=algorithm,
    )  # fmt: skip
    assert loss == pytest.approx(oracle(t.current), rel=1e-12)
    assert gradient == pytest.approx(slope(oracle, t.current), rel=1e-5, abs=1e-9)
    return statistics


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dual_clip", [None, 1.2])
def test_ppo(seed: int, dual_clip: float | None) -> None:
    t = Tokens(seed)

    def oracle(theta: Array) -> float:
        total = 0.0
        for i, advantage in enumerate(t.advantages):
            u = math.exp(theta[i] - t.proximal[i])
            objective = min(u * advantage, min(max(u, 0.8), 1.28) * advantage)
            if dual_clip is not None and advantage < 0:
                objective = max(objective, dual_clip * advantage)
            total -= t.loss_weights[i] * objective
        return total

    statistics = check(t, oracle, AlgorithmConfig(clip_low=0.2, clip_high=0.28, dual_clip=dual_clip))
    u, positive = np.exp(t.current - t.proximal), t.advantages > 0
    assert statistics["clipped_high"] == (positive & (u > 1.28)).sum() > 0
    assert statistics["clipped_low"] == (~positive & (u < 0.8)).sum() > 0
    assert statistics["dual_clipped"] == ((~positive & (u > 1.2)).sum() if dual_clip else 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_gspo_differentiates_the_ratio_of_the_sequence(seed: int) -> None:
    t = Tokens(seed, drift=0.2)
    for at in t.sequences():  # mean over sequences, GSPO's own normalisation
        t.loss_weights[at] = 1 / (7 * len(at))

    def oracle(theta: Array) -> float:
        total = 0.0
        for at in t.sequences():
            s, advantage = math.exp(np.mean(theta[at] - t.proximal[at])), t.per_sequence[at[0]]
            total -= min(s * advantage, min(max(s, 0.97), 1.02) * advantage) / 7
        return total

    algorithm = AlgorithmConfig(policy_loss="gspo", clip_low=0.03, clip_high=0.02)
    statistics = check(t, oracle, algorithm, t.per_sequence)
    s = np.array([np.exp(np.mean((t.current - t.proximal)[t.sequence_ids == i])) for i in t.sequence_ids])
    assert statistics["clipped_high"] == ((t.per_sequence > 0) & (s > 1.02)).sum()
    assert statistics["clipped_low"] == ((t.per_sequence < 0) & (s < 0.97)).sum()


@pytest.mark.parametrize("seed", SEEDS)
def test_gspo_uses_the_advantage_of_each_token(seed: int) -> None:
    t = Tokens(seed, drift=0.2)

    def oracle(theta: Array) -> float:  # eq. 13 and 14 of arXiv 2507.18071
        total = 0.0
        for at in t.sequences():
            frozen = math.exp(np.mean(t.current[at] - t.proximal[at]))
            for i in at:
                s, advantage = frozen * math.exp(theta[i] - t.current[i]), t.advantages[i]
                total -= t.loss_weights[i] * min(s * advantage, min(max(s, 0.9), 1.1) * advantage)
        return total

    check(t, oracle, AlgorithmConfig(policy_loss="gspo", clip_low=0.1, clip_high=0.1))


@pytest.mark.parametrize("seed", SEEDS)
def test_gspo_by_turn_differentiates_the_ratio_of_the_turn(seed: int) -> None:
    """arXiv 2511.20718, eq. 8, length-normalised: one ratio and one advantage for each turn."""
    t = Tokens(seed, drift=0.2)
    turns = t.turns()
    by_turn = np.random.default_rng(seed).normal(size=len(turns))
    advantages = np.zeros(len(t))
    for at, advantage in zip(turns, by_turn, strict=True):
        advantages[at] = advantage
        t.loss_weights[at] = 1 / (len(turns) * len(at))

    def oracle(theta: Array) -> float:
        total = 0.0
        for at, advantage in zip(turns, by_turn, strict=True):
            s = math.exp(np.mean(theta[at] - t.proximal[at]))
            total -= min(s * advantage, min(max(s, 0.97), 1.02) * advantage) / len(turns)
        return total

    algorithm = AlgorithmConfig(policy_loss="gspo", gspo_level="turn", clip_low=0.03, clip_high=0.02)
    assert algorithm.policy_loss.ratio_level == "turn"
    check(t, oracle, algorithm, advantages)
    assert len(turns) > len(t.sequences())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("low", [0.2, 1.0])
def test_cispo(seed: int, low: float) -> None:
    t = Tokens(seed)

    def oracle(theta: Array) -> float:
        total = 0.0
        for i, advantage in enumerate(t.advantages):
            u = math.exp(t.current[i] - t.proximal[i])  # sg
            total -= t.loss_weights[i] * min(max(u, 1 - low), 1.3) * advantage * theta[i]
        return total

    statistics = check(t, oracle, AlgorithmConfig(policy_loss="cispo", clip_low=low, clip_high=0.3))
    u = np.exp(t.current - t.proximal)
    assert statistics["clipped_high"] == (u > 1.3).sum() > 0
    assert statistics["clipped_low"] == (u < 1 - low).sum()


@pytest.mark.parametrize("seed", SEEDS)
def test_sapo(seed: int) -> None:
    t = Tokens(seed)

    def oracle(theta: Array) -> float:
        total = 0.0
        for i, advantage in enumerate(t.advantages):
            tau = 1.0 if advantage > 0 else 1.5
            u = math.exp(theta[i] - t.proximal[i])
            total -= t.loss_weights[i] * 4 / tau / (1 + math.exp(-tau * (u - 1))) * advantage
        return total

    check(t, oracle, AlgorithmConfig(policy_loss="sapo", sapo_tau_positive=1.0, sapo_tau_negative=1.5))


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_likelihood_ignores_the_behavior_policy(name: str) -> None:
    t = Tokens(0)
    loss, gradient, statistics = evaluate(
        t.current, proximal=t.proximal, behavior=t.behavior - 30, advantages=t.advantages,
        loss_weights=t.loss_weights, algorithm=AlgorithmConfig(preset=name),
    )  # fmt: skip
    assert loss == pytest.approx(-(t.loss_weights * t.advantages * t.current).sum(), rel=1e-12)
    assert gradient == pytest.approx(-t.loss_weights * t.advantages, rel=1e-12)
    assert statistics["weight"] == len(t) and statistics["rejected_tokens"] == 0


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo", "sapo"])
def test_on_policy_every_gradient_is_the_policy_gradient(name: str) -> None:
    t = Tokens(1)
    _, gradient, statistics = evaluate(
        t.proximal, proximal=t.proximal, behavior=t.proximal, advantages=t.advantages,
        loss_weights=t.loss_weights, sequence_ids=t.sequence_ids,
        algorithm=AlgorithmConfig(policy_loss=name),  # type: ignore[arg-type]
    )  # fmt: skip
    assert gradient == pytest.approx(-t.loss_weights * t.advantages, rel=1e-12)
    assert statistics["ratio"] == statistics["weight"] == len(t) and statistics["abs_log_ratio_max"] == 0
    assert statistics["kl_k1"] == statistics["kl_k3"] == 0


def test_the_loss_functions_pass_gradcheck() -> None:
    t = Tokens(2)
    log_ratio = torch.tensor(t.current - t.proximal, requires_grad=True)
    logprobs = torch.tensor(t.current, requires_grad=True)
    advantages = torch.tensor(t.advantages)
    for function in (
        lambda x: ppo(x, advantages, clip_low=0.2, clip_high=0.2, dual_clip=3.0).values,
        lambda x: sapo(x, advantages, tau_positive=1.0, tau_negative=1.05).values,
    ):
        assert torch.autograd.gradcheck(function, log_ratio)
    assert torch.autograd.gradcheck(
        lambda x: cispo(log_ratio.detach(), x, advantages, clip_low=0.2, clip_high=0.2).values, logprobs
    )
    assert torch.autograd.gradcheck(lambda x: likelihood(x, advantages).values, logprobs)


def test_gspo_by_hand() -> None:
    log_ratio = torch.tensor([0.1, 0.3, -0.2], dtype=torch.float64, requires_grad=True)
    sequences = Sequences.of(torch.tensor([4, 4, 2]))
    losses = gspo(log_ratio, torch.tensor([1.0, 1.0, 2.0]).double(), sequences, clip_low=0.5, clip_high=0.1)
    assert losses.values.tolist() == pytest.approx([-1.1, -1.1, -2 * math.exp(-0.2)])
    assert losses.clipped_high.tolist() == [True, True, False]
    losses.values.sum().backward()
    assert log_ratio.grad is not None
    assert log_ratio.grad.tolist() == pytest.approx([0, 0, -2 * math.exp(-0.2)])
