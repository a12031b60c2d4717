"""The coefficients of each mode by hand, and that they make the means that their names say."""

from __future__ import annotations

import numpy as np
import pytest
from algorithms_support import sample
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_agents.algorithms.config import LossNormalization
from areal_agents.algorithms.losses.normalization import loss_weights

SAMPLES = [sample(range(6), [2, 3, 5]), sample(range(4), [1]), sample(range(3), [])]


@pytest.mark.parametrize(
    "mode, constant, first, second",
    [
        ("token", None, 1 / 4, 1 / 4),
        ("sequence_mean", None, 1 / 6, 1 / 2),
        ("sequence_sum", None, 1 / 2, 1 / 2),
        ("constant", 10, 1 / 20, 1 / 20),
    ],
)
def test_by_hand(mode: LossNormalization, constant: int | None, first: float, second: float) -> None:
    got = loss_weights(SAMPLES, mode=mode, constant=constant)
    assert [len(weights) for weights in got] == [3, 1, 0]  # a sample without a trained token is no sequence
    assert got[0].tolist() == pytest.approx([first] * 3) and got[1].tolist() == pytest.approx([second])
    assert all(weights.dtype == np.float32 for weights in got)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(0, 2**32 - 1))
@settings(derandomize=True, deadline=None, max_examples=40)
def test_they_make_the_means(lengths: list[int], seed: int) -> None:
    samples = [sample(range(n + 1), range(1, n + 1)) for n in lengths]
    losses = [np.random.default_rng(seed + i).normal(size=n) for i, n in enumerate(lengths)]
    means = {
        "token": np.concatenate(losses).mean(),
        "sequence_mean": np.mean([each.mean() for each in losses]),
        "sequence_sum": np.mean([each.sum() for each in losses]),
        "constant": np.mean([each.sum() / 64 for each in losses]),
    }
    for mode, mean in means.items():
        weights = loss_weights(samples, mode=mode, constant=64 if mode == "constant" else None)  # type: ignore[arg-type]
        total = sum(np.dot(w, each) for w, each in zip(weights, losses, strict=True))
        assert total == pytest.approx(mean, rel=1e-5, abs=1e-6)


def test_no_sample_is_no_coefficient() -> None:
    assert loss_weights([], mode="token") == []


@pytest.mark.parametrize("mode, constant", [("constant", None), ("constant", 0), ("token", 8)])
def test_a_constant_that_does_not_fit_the_mode(mode: LossNormalization, constant: int | None) -> None:
    with pytest.raises(ValueError, match=f"got {constant} with {mode}"):
        loss_weights(SAMPLES, mode=mode, constant=constant)
