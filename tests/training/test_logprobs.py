"""Chunked logprobs against the whole softmax."""

from __future__ import annotations

import math

import pytest
import torch

from areal_agents.training.logprobs import token_logprobs


def test_logprobs_entropy_and_temperature_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [0.0, math.log(3.0)]])
    logprobs, entropies = token_logprobs(
        logits, torch.tensor([1, 1]), torch.tensor([1.0, 0.5]), lambda hidden: hidden, vocab_size=2
    )
    assert logprobs.tolist() == pytest.approx([math.log(3 / 4), math.log(9 / 10)])
    assert entropies.tolist() == pytest.approx(
        [-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)), -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))]
    )


@pytest.mark.parametrize("chunk_rows", [1, 3, 10])
def test_chunks_change_nothing(chunk_rows: int) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 50)
    hidden, targets = torch.randn(10, 8), torch.randint(0, 50, (10,))
    temperatures = torch.rand(10) + 0.5

    def compute(chunk_logits: int) -> list[torch.Tensor]:
        states = hidden.clone().requires_grad_()
        logprobs, entropies = token_logprobs(
            states, targets, temperatures, head, vocab_size=50, chunk_logits=chunk_logits
        )
        gradients = torch.autograd.grad((logprobs * torch.arange(10)).sum(), [states, *head.parameters()])
        return [logprobs.detach(), entropies, *gradients]

    for whole, chunked in zip(compute(10**6), compute(50 * chunk_rows), strict=True):
        torch.testing.assert_close(chunked, whole, atol=1e-5, rtol=1e-5)


def test_no_more_than_a_chunk_of_logits_is_ever_computed() -> None:
    seen: list[int] = []

    def head(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(len(hidden))
        return hidden @ torch.ones(4, 100)

    states = torch.randn(25, 4, requires_grad=True)
    logprobs, _ = token_logprobs(
        states, torch.zeros(25, dtype=torch.long), torch.ones(25), head, vocab_size=100, chunk_logits=1000
    )
    logprobs.sum().backward()
    assert seen == [10, 10, 5] + [5, 10, 10]  # forward, and again in the backward pass


def test_no_rows_are_no_logprobs_and_a_gradient_of_zero() -> None:
    states = torch.randn(0, 4, requires_grad=True)
    head = torch.nn.Linear(4, 9)
    logprobs, entropies = token_logprobs(
        states, torch.zeros(0, dtype=torch.long), torch.ones(0), head, vocab_size=9
    )
    logprobs.sum().backward()
    assert logprobs.shape == entropies.shape == (0,)
    assert head.weight.grad is not None and (head.weight.grad == 0).all()
