"""The three KL estimators: their values, and the quantity whose gradient each of them estimates."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from losses_support import Tokens, evaluate, slope

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.losses.kl import KlEstimator, kl_estimate


def formula(estimator: str, logprob: float, reference: float) -> float:
    ratio = math.exp(reference - logprob)
    return {"k1": -math.log(ratio), "k2": math.log(ratio) ** 2 / 2, "k3": ratio - 1 - math.log(ratio)}[
        estimator
    ]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_values_and_derivatives_equal_the_formulas(estimator: KlEstimator) -> None:
    t = Tokens(0)
    theta = torch.tensor(t.current, requires_grad=True)
    kl = kl_estimate(theta, torch.tensor(t.reference), estimator=estimator)
    want = [formula(estimator, p, r) for p, r in zip(t.current, t.reference, strict=True)]
    assert kl.tolist() == pytest.approx(want, rel=1e-9)
    kl.sum().backward()
    total = lambda at: sum(formula(estimator, p, r) for p, r in zip(at, t.reference, strict=True))  # noqa: E731
    assert theta.grad is not None
    assert theta.grad.tolist() == pytest.approx(slope(total, t.current), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_of_equal_policies_is_zero_and_that_of_extreme_ones_is_finite(estimator: KlEstimator) -> None:
    same = torch.tensor([-1.0, -7.0], requires_grad=True)
    kl = kl_estimate(same, same.detach(), estimator=estimator)
    assert kl.tolist() == [0, 0]
    far = torch.tensor([0.0, -1e4], requires_grad=True)
    kl = kl_estimate(far, torch.tensor([-1e4, 0.0]), estimator=estimator)
    kl.sum().backward()
    assert torch.isfinite(kl).all() and far.grad is not None and torch.isfinite(far.grad).all()


def test_each_estimator_has_the_expected_gradient() -> None:
    """Expectations are exact, over a small vocabulary, instead of over samples."""
    rng = np.random.default_rng(0)
    logits, reference_logits = rng.normal(size=(2, 9))
    reference = torch.log_softmax(torch.tensor(reference_logits), -1)

    def policy(values: np.ndarray) -> torch.Tensor:
        return torch.log_softmax(torch.tensor(values, requires_grad=True), -1)

    def exact(values: np.ndarray, *, forward: bool) -> float:
        logp = policy(values).detach()
        p, q = (reference, logp) if forward else (logp, reference)
        return float((p.exp() * (p - q)).sum())

    def expected_gradient(estimator: KlEstimator, *, in_reward: bool) -> np.ndarray:
        leaf = torch.tensor(logits, requires_grad=True)
        logp = torch.log_softmax(leaf, -1)
        kl = kl_estimate(logp, reference, estimator=estimator)
        term = kl.detach() * logp if in_reward else kl
        (logp.exp().detach() * term).sum().backward()
        assert leaf.grad is not None
        return leaf.grad.numpy()

    reverse = slope(lambda at: exact(at, forward=False), logits)
    forward = slope(lambda at: exact(at, forward=True), logits)
    assert expected_gradient("k1", in_reward=True) == pytest.approx(reverse, abs=1e-7)
    assert expected_gradient("k2", in_reward=False) == pytest.approx(reverse, abs=1e-7)
    assert expected_gradient("k3", in_reward=False) == pytest.approx(forward, abs=1e-7)
    assert expected_gradient("k1", in_reward=False) == pytest.approx(np.zeros(9), abs=1e-12)
    # k2 and k3 in the reward estimate other quantities
    for estimator in ("k2", "k3"):
        assert np.abs(expected_gradient(estimator, in_reward=True) - reverse).max() > 1e-3  # type: ignore[arg-type]


@pytest.mark.parametrize("estimator", ["k2", "k3"])  # k1 is refused in the loss
def test_kl_in_the_loss_is_added_with_its_coefficient(estimator: KlEstimator) -> None:
    t = Tokens(1)
    arrays = {"proximal": t.proximal, "behavior": t.proximal, "advantages": t.advantages,
              "loss_weights": t.loss_weights}  # fmt: skip
    plain, plain_gradient, _ = evaluate(t.current, **arrays)
    loss, gradient, statistics = evaluate(
        t.current, reference=t.reference, **arrays,
        algorithm=AlgorithmConfig(kl_in="loss", kl_estimator=estimator, kl_coefficient=0.3),
    )  # fmt: skip

    def oracle(theta: np.ndarray) -> float:
        each = [formula(estimator, p, r) for p, r in zip(theta, t.reference, strict=True)]
        return float(0.3 * np.dot(t.loss_weights, each))

    assert loss - plain == pytest.approx(oracle(t.current), rel=1e-9)
    assert gradient - plain_gradient == pytest.approx(slope(oracle, t.current), rel=1e-6, abs=1e-9)
    each = [formula(estimator, p, r) for p, r in zip(t.current, t.reference, strict=True)]
    assert statistics["kl_reference"] == pytest.approx(sum(each))


def test_kl_in_the_reward_does_not_change_the_loss_and_is_reported() -> None:
    t = Tokens(1)
    arrays = {"proximal": t.proximal, "behavior": t.behavior, "advantages": t.advantages}
    algorithm = AlgorithmConfig(kl_in="reward", kl_estimator="k1", kl_coefficient=0.3)
    with_reference = evaluate(t.current, algorithm=algorithm, reference=t.reference, **arrays)
    without = evaluate(t.current, algorithm=algorithm, **arrays)
    assert with_reference[0] == without[0] and (with_reference[1] == without[1]).all()
    assert with_reference[2]["kl_reference"] == pytest.approx((t.current - t.reference).sum())
    assert without[2]["kl_reference"] == 0
