"""Sampled tokens compared with small distributions that are known exactly."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from areal_agents.inference.embedded.scheduling.sampling import SamplingBatch, sample

PROBS = np.array([0.5, 0.25, 0.15, 0.1])
DRAWS = 4000


def batch(
    rows: int, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0
) -> SamplingBatch:
    return SamplingBatch(
        temperature=np.full(rows, temperature, np.float32),
        top_p=np.full(rows, top_p, np.float32),
        min_p=np.full(rows, min_p, np.float32),
        top_k=np.full(rows, top_k, np.int32),
        seeds=np.full(rows, 17, np.uint64),
        positions=np.arange(rows, dtype=np.int32),
    )


def frequencies(
    rows: int = DRAWS, probs: np.ndarray = PROBS, **options: float
) -> tuple[np.ndarray, np.ndarray]:
    logits = torch.log(torch.tensor(probs, dtype=torch.float32)).expand(rows, -1)
    tokens, logprobs = sample(logits, batch(rows, **options))  # type: ignore[arg-type]
    return np.bincount(tokens, minlength=len(probs)) / rows, logprobs


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, PROBS),
        ({"temperature": 0.5}, PROBS**2 / (PROBS**2).sum()),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_k": 9}, PROBS),
        ({"top_p": 0.6}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.3}, [1, 0, 0, 0]),
        ({"min_p": 0.25}, [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0]),
        ({"top_k": 3, "top_p": 0.95, "min_p": 0.45}, [2 / 3, 1 / 3, 0, 0]),
        ({"temperature": 0.0}, [1, 0, 0, 0]),
    ],
)
def test_tokens_are_sampled_from_the_truncated_distribution(options: dict, expected: list[float]) -> None:
    drawn, _ = frequencies(**options)
    expected_array = np.asarray(expected)
    assert (drawn[expected_array == 0] == 0).all()
    np.testing.assert_allclose(drawn, expected_array, atol=5 * 0.5 / np.sqrt(DRAWS))


def test_logprobs_are_of_the_distribution_after_temperature_before_truncation() -> None:
    logits = torch.log(torch.tensor(PROBS, dtype=torch.float32)).expand(200, -1)
    tokens, logprobs = sample(logits, batch(200, temperature=0.5, top_k=2))
    squared = PROBS**2 / (PROBS**2).sum()
    np.testing.assert_allclose(logprobs, np.log(squared)[tokens], atol=1e-6)
    _, greedy = sample(logits[:1], batch(1, temperature=0.0))
    np.testing.assert_allclose(greedy, np.log(0.5), atol=1e-6)


def test_a_row_depends_only_on_its_seed_and_position() -> None:
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(0))
    tokens, _ = sample(logits, batch(50))
    for row in (0, 13, 49):
        one = SamplingBatch(
            **{k: getattr(batch(50), k)[row : row + 1] for k in SamplingBatch.__dataclass_fields__}
        )
        assert sample(logits[row : row + 1], one)[0][0] == tokens[row]


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    logits = torch.log(torch.tensor(PROBS, dtype=torch.float32)).expand(400, -1)
    mixed = batch(400)
    mixed.temperature[::2] = 0.0
    tokens, _ = sample(logits, mixed)
    assert (tokens[::2] == 0).all()
    assert set(tokens[1::2].tolist()) == {0, 1, 2, 3}


def test_logits_that_are_not_finite_yield_a_logprob_that_is_not_finite() -> None:
    logits = torch.zeros(2, 4)
    logits[1, 2] = float("nan")
    _, logprobs = sample(logits, batch(2))
    assert np.isfinite(logprobs[0]) and not np.isfinite(logprobs[1])
