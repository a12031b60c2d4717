"""Clip-Cov and KL-Cov (arXiv 2505.22617) compared with loops over tokens in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from losses_support import Array, Tokens, evaluate, slope
from pydantic import ValidationError

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.losses.trust_region import (
    ClipCov,
    KlCov,
    clip_cov_keep,
    covariances,
    kl_cov_chosen,
)

CONSTANTS = {"share": 0.2, "low": 0.1, "high": 1.5}


def by_hand(t: Tokens) -> list[float]:
    n = len(t)
    mean_logprob, mean_advantage = math.fsum(t.proximal) / n, math.fsum(t.advantages) / n
    pairs = zip(t.proximal, t.advantages, strict=True)
    return [(logprob - mean_logprob) * (advantage - mean_advantage) for logprob, advantage in pairs]


def tensors(t: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(t.proximal), torch.tensor(t.advantages)


def given(t: Tokens) -> dict[str, Any]:
    names = ("proximal", "behavior", "advantages", "loss_weights", "sequence_ids")
    return {name: getattr(t, name) for name in names}


@pytest.mark.parametrize("seed", range(4))
def test_token_covariances_equal_the_loop_and_average_to_the_covariance(seed: int) -> None:
    t = Tokens(seed)
    found = covariances(*tensors(t)).tolist()
    assert found == pytest.approx(by_hand(t), rel=1e-12)
    assert np.mean(found) == pytest.approx(np.cov(t.proximal, t.advantages, bias=True)[0, 1])


@pytest.mark.parametrize("seed", range(6))
def test_clip_cov_drops_its_share_of_the_tokens_within_the_bounds(seed: int) -> None:
    t = Tokens(seed)
    inside = {i for i, value in enumerate(by_hand(t)) if 0.1 <= value <= 1.5}
    keep = clip_cov_keep(*tensors(t), **CONSTANTS, rng=np.random.default_rng(seed))
    dropped = set(np.flatnonzero(~keep.numpy()))
    assert dropped <= inside and len(dropped) == min(int(0.2 * len(t)), len(inside)) > 0


def test_clip_cov_drops_every_candidate_with_the_same_probability() -> None:
    t = Tokens(3)
    inside = [i for i, value in enumerate(by_hand(t)) if 0.1 <= value <= 1.5]
    rng, counts, draws = np.random.default_rng(0), np.zeros(len(t)), 3000
    for _ in range(draws):
        counts += ~clip_cov_keep(*tensors(t), **CONSTANTS, rng=rng).numpy()
    expected = min(int(0.2 * len(t)), len(inside)) / len(inside)
    assert len(inside) * expected < len(inside)  # so not every candidate is dropped
    error = 5 * math.sqrt(expected * (1 - expected) / draws)
    assert counts[inside] / draws == pytest.approx(expected, abs=error)


def test_clip_cov_is_the_same_for_the_same_state_of_the_generator() -> None:
    t = Tokens(3)

    def draw(seed: int) -> list[list[bool]]:
        rng = np.random.default_rng(seed)
        return [clip_cov_keep(*tensors(t), **CONSTANTS, rng=rng).tolist() for _ in range(3)]

    assert draw(7) == draw(7) != draw(8)
    first, second, _ = draw(7)
    assert first != second  # each minibatch advances the random generator


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [1e-6, 0.1, 1.0])
def test_kl_cov_chooses_the_largest_covariances(seed: int, share: float) -> None:
    t = Tokens(seed)
    chosen = np.flatnonzero(kl_cov_chosen(*tensors(t), share=share).numpy())
    ranked = sorted(range(len(t)), key=lambda i: -by_hand(t)[i])
    assert set(chosen) == set(ranked[: max(1, int(share * len(t)))])


@pytest.mark.parametrize("seed", range(4))
def test_the_loss_of_kl_cov_equals_the_paper(seed: int) -> None:
    """The loss is −w (u A − β |log u|) for the chosen tokens and −w u A for others: the paper's objective,
    with the ratio to the behavior policy factored into w and u."""
    t = Tokens(seed)
    region = KlCov(kl_cov_share=0.2, kl_cov_coefficient=0.7)
    choice = region.choose(torch.tensor(t.behavior), *tensors(t), rng=np.random.default_rng(0))
    assert choice.keep is None and choice.penalty is not None
    ranked = sorted(range(len(t)), key=lambda i: -by_hand(t)[i])[: int(0.2 * len(t))]

    def oracle(theta: Array) -> float:
        total = 0.0
        for i, advantage in enumerate(t.advantages):
            moved = theta[i] - t.proximal[i]
            value = math.exp(moved) * advantage - (0.7 * abs(moved) if i in ranked else 0.0)
            total -= t.loss_weights[i] * math.exp(t.proximal[i] - t.behavior[i]) * value
        return total

    algorithm = AlgorithmConfig.model_validate({"preset": "kl_cov", "weight_cap": 1e9})
    loss, gradient, _ = evaluate(t.current, algorithm=algorithm, penalty=choice.penalty, **given(t))
    # the penalty is float32, so 0.7 is not exact
    assert loss == pytest.approx(oracle(t.current), rel=1e-6)
    assert gradient == pytest.approx(slope(oracle, t.current), rel=1e-5, abs=1e-7)
    without, _, _ = evaluate(t.current, algorithm=algorithm, **given(t))
    assert abs(loss - without) > 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_the_loss_of_clip_cov_leaves_out_the_dropped_tokens(seed: int) -> None:
    t = Tokens(seed)
    region = ClipCov(clip_cov_share=0.2, clip_cov_low=0.1, clip_cov_high=1.5)
    choice = region.choose(torch.tensor(t.behavior), *tensors(t), rng=np.random.default_rng(2))
    assert choice.penalty is None and choice.keep is not None
    keep = choice.keep.numpy()

    def oracle(theta: Array) -> float:
        return -sum(
            t.loss_weights[i] * math.exp(theta[i] - t.behavior[i]) * t.advantages[i]
            for i in np.flatnonzero(keep)
        )

    algorithm = AlgorithmConfig.model_validate({"preset": "clip_cov", "weight_cap": 1e9})
    loss, gradient, statistics = evaluate(t.current, algorithm=algorithm, keep=keep, **given(t))
    assert loss == pytest.approx(oracle(t.current), rel=1e-11)
    assert gradient == pytest.approx(slope(oracle, t.current), rel=1e-5, abs=1e-9)
    assert statistics["dropped_tokens"] == (~keep).sum() > 0
    assert statistics["clipped_low"] == statistics["clipped_high"] == 0


def test_a_minibatch_without_tokens_is_accepted() -> None:
    nothing = torch.zeros(0)
    assert clip_cov_keep(nothing, nothing, **CONSTANTS, rng=np.random.default_rng(0)).shape == (0,)
    assert kl_cov_chosen(nothing, nothing, share=0.5).shape == (0,)


def test_no_token_is_dropped_if_no_covariance_is_within_the_bounds() -> None:
    t = Tokens(0)
    bounds = {"share": 0.5, "low": 1e6, "high": 2e6}
    assert clip_cov_keep(*tensors(t), **bounds, rng=np.random.default_rng(0)).all()


def test_settings_of_the_presets_and_refused_combinations() -> None:
    made = AlgorithmConfig(preset="clip_cov").trust_region
    assert made == ClipCov(clip_cov_share=2e-4, clip_cov_low=1.0, clip_cov_high=5.0)
    assert AlgorithmConfig(preset="kl_cov").trust_region == KlCov(kl_cov_share=2e-3, kl_cov_coefficient=1.0)
    for given, reason in (
        ({"preset": "kl_cov", "minibatches": 1}, "raise minibatches"),
        ({"preset": "clip_cov", "clip_cov_low": 6.0}, "must be below clip_cov_high: 5.0"),
        ({"preset": "clip_cov", "policy_loss": "gspo"}, "chooses single tokens"),
        ({"preset": "kl_cov", "proximal": "behavior"}, "computes no logprobs under the weights"),
    ):
        with pytest.raises(ValidationError, match=reason):
            AlgorithmConfig.model_validate(given)
