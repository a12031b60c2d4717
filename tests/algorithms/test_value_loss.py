"""The critic's loss, compared with its formula in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from losses_support import Array, slope

from areal_agents.algorithms.losses.value import value_loss


def numbers(seed: int, n: int = 40) -> list[Array]:
    rng = np.random.default_rng(seed)
    old = rng.normal(size=n)
    return [old + rng.normal(0, 0.4, n), old, rng.normal(size=n), rng.uniform(0.01, 0.1, n)]


def run(values, old, targets, weights, clip, dtype=torch.float64):  # type: ignore[no-untyped-def]
    v, old, targets, weights = (torch.tensor(a, dtype=dtype) for a in (values, old, targets, weights))
    v.requires_grad_(True)
    loss, clipped = value_loss(v, old_values=old, targets=targets, loss_weights=weights, clip=clip)
    loss.backward()
    return loss.item(), v.grad, int(clipped)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("clip", [None, 0.2])
def test_loss_and_gradient_equal_the_formula(clip: float | None, seed: int) -> None:
    values, old, targets, weights = numbers(seed)

    def errors(v: Array) -> tuple[Array, Array]:
        near = v if clip is None else np.clip(v, old - clip, old + clip)
        return (v - targets) ** 2, (near - targets) ** 2

    def oracle(v: Array) -> float:
        return float(np.dot(weights, np.maximum(*errors(v))) / 2)

    loss, gradient, clipped = run(values, old, targets, weights, clip)
    assert loss == pytest.approx(oracle(values), rel=1e-12)
    assert gradient.tolist() == pytest.approx(slope(oracle, values), rel=1e-6, abs=1e-9)
    plain, near = errors(values)
    assert clipped == (near > plain).sum() and (clipped > 0) == (clip is not None)


def test_the_clip_by_hand() -> None:
    # a value beyond the clip has no gradient if it moved towards the target, else the plain gradient
    loss, gradient, clipped = run([1.0, 1.0], [0.0, 0.0], [2.0, -1.0], [1.0, 0.5], 0.2)
    assert loss == pytest.approx((1.8**2 + 0.5 * 2**2) / 2)
    assert gradient.tolist() == pytest.approx([0.0, 1.0]) and clipped == 1


def test_micro_batches_add_up_and_the_loss_of_no_tokens_is_zero() -> None:
    arrays = numbers(0)
    whole = run(*arrays, 0.2)
    parts = [run(*(a[at] for a in arrays), 0.2) for at in (slice(0, 7), slice(7, 40))]
    assert sum(part[0] for part in parts) == pytest.approx(whole[0])
    assert torch.cat([part[1] for part in parts]).tolist() == pytest.approx(whole[1].tolist())
    loss, gradient, clipped = run([], [], [], [], 0.2)
    assert loss == 0 and gradient.shape == (0,) and clipped == 0


def test_half_precision_values_are_squared_in_float32() -> None:
    loss, gradient, _ = run([300.0], [300.0], [0.0], [1.0], None, torch.float16)
    assert loss == 45000.0 and gradient.tolist() == [300.0]


def test_invalid_arguments_are_named_in_the_error() -> None:
    with pytest.raises(ValueError, match="one shape"):
        run([1.0], [1.0, 2.0], [1.0], [1.0], None)
    with pytest.raises(ValueError, match="must be positive, got 0"):
        run([1.0], [1.0], [1.0], [1.0], 0.0)
