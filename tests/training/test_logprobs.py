"""Compares chunked logprobs and entropies, and their gradients, with the whole softmax."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from areal_agents.inference.embedded.model.head import TILE
from areal_agents.training.step.logprobs import CPU_ROWS, token_logprobs

ROWS, WIDTH, VOCAB = 10, 8, 50


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """An output layer with these weights."""
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    head.weight = nn.Parameter(weight)
    if bias is not None:
        head.bias = nn.Parameter(bias)
    return head


def whole(hidden: Tensor, head: nn.Linear, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """The logprobs and entropies by definition, from all logits at once."""
    p = torch.softmax(head(hidden) / temperatures[:, None], -1)
    return p[torch.arange(len(targets)), targets].log(), -(p * p.log()).sum(-1)


def case(dtype: torch.dtype, *, rows: int = ROWS) -> tuple[Tensor, nn.Linear, Tensor, Tensor]:
    """Random hidden states, head, targets and temperatures between 0.5 and 1.5."""
    torch.manual_seed(0)
    head = linear(torch.randn(VOCAB, WIDTH, dtype=dtype), torch.randn(VOCAB, dtype=dtype))
    hidden = torch.randn(rows, WIDTH, dtype=dtype, requires_grad=True)
    return hidden, head, torch.randint(0, VOCAB, (rows,)), torch.rand(rows, dtype=dtype) + 0.5


def test_logprobs_entropy_and_temperature_by_hand() -> None:
    logprobs, entropies = token_logprobs(
        torch.tensor([[0.0, math.log(3.0)], [0.0, math.log(3.0)]]),
        torch.tensor([1, 1]),
        torch.tensor([1.0, 0.5]),
        linear(torch.eye(2)),
    )
    assert logprobs.tolist() == pytest.approx([math.log(3 / 4), math.log(9 / 10)])
    assert entropies.tolist() == pytest.approx(
        [-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)), -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))]
    )


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("chunk_rows", [1, 3, 9, 10])
def test_chunks_give_the_results_of_the_whole_softmax(chunk_rows: int, entropy_gradient: bool) -> None:
    hidden, head, targets, temperatures = case(torch.float64)
    weights = torch.randn(2, ROWS, dtype=torch.float64)
    inputs = (hidden, *head.parameters())

    logprobs, entropies = token_logprobs(
        hidden, targets, temperatures, head,
        chunk_logits=chunk_rows * VOCAB, entropy_gradient=entropy_gradient,
    )  # fmt: skip
    got = logprobs @ weights[0] + (entropies @ weights[1] if entropy_gradient else 0)
    expected_logprobs, expected_entropies = whole(hidden, head, targets, temperatures)
    expected = expected_logprobs @ weights[0] + (expected_entropies @ weights[1] if entropy_gradient else 0)

    assert entropies.requires_grad == entropy_gradient
    torch.testing.assert_close(logprobs, expected_logprobs, atol=1e-12, rtol=0)
    torch.testing.assert_close(entropies, expected_entropies.detach(), atol=1e-12, rtol=0, check_stride=False)
    for mine, theirs in zip(
        torch.autograd.grad(got, inputs), torch.autograd.grad(expected, inputs), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=0)


def test_gradients_match_finite_differences() -> None:
    hidden, head, targets, temperatures = case(torch.float64, rows=4)

    def both(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        head = nn.Linear(WIDTH, VOCAB)
        del head.weight, head.bias
        head.weight, head.bias = weight, bias
        return token_logprobs(
            hidden, targets, temperatures, head, chunk_logits=3 * VOCAB, entropy_gradient=True
        )

    assert torch.autograd.gradcheck(both, (hidden, head.weight, head.bias))


def test_float32_with_large_logits_is_accurate_up_to_rounding() -> None:
    hidden, head, targets, temperatures = case(torch.float64, rows=2 * CPU_ROWS + 1)
    with torch.no_grad():
        hidden *= 10
    expected = whole(hidden, head, targets, temperatures)
    for chunk_logits in (2**25, 7 * VOCAB):
        got = token_logprobs(
            hidden.float(), targets, temperatures.float(), head.float(), chunk_logits=chunk_logits
        )
        assert all(array.dtype == torch.float32 for array in got)
        for mine, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(mine.double(), theirs, atol=1e-4, rtol=1e-6)
        head.double()


Answer = tuple[Tensor, ...]  # logprobs, entropies, and the gradients with respect to states, matrix and bias


def realistic() -> tuple[Tensor, nn.Linear, Tensor, Tensor, Tensor]:
    """bfloat16 states, a head of more than two tiles with logits of up to about 30, targets among the 20 most
    likely tokens, temperatures, and the gradient of the logprobs."""
    torch.manual_seed(0)
    rows, width, vocab = 2 * CPU_ROWS + 1, 256, 9000
    assert vocab * width > 2 * TILE
    head = linear((torch.randn(vocab, width) * 6 / 16).bfloat16(), torch.randn(vocab).bfloat16())
    states = torch.randn(rows, width).bfloat16()
    logits = states.float() @ head.weight.float().T
    assert 24 < logits.max() < 48
    targets = logits.argsort(-1, descending=True)[torch.arange(rows), torch.arange(rows) % 20]
    return states, head, targets, torch.rand(rows) + 0.5, torch.randn(rows)


def exactly(
    states: Tensor, head: nn.Linear, targets: Tensor, temperatures: Tensor, gradient: Tensor
) -> Answer:
    """The results by definition in float64, from the same bfloat16 values."""
    inputs = [t.detach().double().requires_grad_() for t in (states, *head.parameters())]
    return differentiated(F.linear(*inputs), inputs, targets, temperatures, gradient)


def rounded(
    states: Tensor, head: nn.Linear, targets: Tensor, temperatures: Tensor, gradient: Tensor
) -> Answer:
    """The results by definition, with logits that are rounded to bfloat16."""
    inputs = [t.detach().requires_grad_() for t in (states, *head.parameters())]
    return differentiated(F.linear(*inputs).float(), inputs, targets, temperatures, gradient)


def differentiated(
    logits: Tensor, inputs: list[Tensor], targets: Tensor, temperatures: Tensor, gradient: Tensor
) -> Answer:
    log_p = torch.log_softmax(logits / temperatures[:, None], -1)
    logprobs = log_p.gather(1, targets[:, None])[:, 0]
    entropies = -(log_p.exp() * log_p).sum(-1)
    return (
        logprobs.detach(),
        entropies.detach(),
        *torch.autograd.grad(logprobs @ gradient.to(logprobs), inputs),
    )


def error(got: Tensor, want: Tensor) -> float:
    return (
        float((got.double() - want).norm() / want.norm())
        if not got.requires_grad
        else error(got.detach(), want)
    )


@pytest.mark.parametrize("path", ["kept", "chunked"])
def test_logits_of_bfloat16_states_are_float32(path: str) -> None:
    states, head, targets, temperatures, gradient = realistic()
    given = (states, head, targets, temperatures, gradient)
    want, coarse = exactly(*given), rounded(*given)
    inputs = (states.requires_grad_(), *head.parameters())
    chunk_logits = 2**25 if path == "kept" else 100 * head.out_features
    logprobs, entropies = token_logprobs(states, targets, temperatures, head, chunk_logits=chunk_logits)
    gradients = torch.autograd.grad(logprobs @ gradient, inputs)
    assert logprobs.dtype == entropies.dtype == torch.float32
    assert {g.dtype for g in gradients} == {torch.bfloat16}
    assert (logprobs.double() - want[0]).abs().max() < 5e-5 < 0.03 < (coarse[0] - want[0]).abs().max()
    for mine, wrong, exact in zip((logprobs, entropies), coarse[:2], want[:2], strict=True):
        assert error(mine, exact) < error(wrong, exact) / 100
    for mine, wrong, exact in zip(gradients, coarse[2:], want[2:], strict=True):
        assert error(mine, exact) < error(wrong, exact) / 3
        # the gradient is rounded to bfloat16, and its error is not much larger than that of the rounding
        assert error(mine, exact) < 2 * error(exact.bfloat16(), exact)


def test_kept_and_chunked_logits_of_bfloat16_agree() -> None:
    states, head, targets, temperatures, gradient = realistic()
    states.requires_grad_()
    answers = []
    for chunk_logits in (2**25, 100 * head.out_features, 7 * head.out_features):
        logprobs, entropies = token_logprobs(
            states, targets, temperatures, head, chunk_logits=chunk_logits, entropy_gradient=True
        )
        total = logprobs @ gradient + entropies.sum()
        answers.append((logprobs, entropies, *torch.autograd.grad(total, (states, *head.parameters()))))
    for other in answers[1:]:
        for one, two in zip(answers[0][:2], other[:2], strict=True):
            torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-6)
        for one, two in zip(answers[0][2:], other[2:], strict=True):
            assert error(one, two.double()) < 4e-3  # one rounding to bfloat16


@pytest.mark.gpu
def test_logits_on_a_gpu_are_float32_too() -> None:
    given = realistic()
    want, coarse = exactly(*given), rounded(*given)
    states, head, targets, temperatures, gradient = (value.cuda() for value in given)
    inputs = (states.requires_grad_(), *head.parameters())
    logprobs, _ = token_logprobs(states, targets, temperatures, head)
    gradients = torch.autograd.grad(logprobs @ gradient, inputs)
    assert error(logprobs.cpu(), want[0]) < error(coarse[0], want[0]) / 100
    for mine, wrong, exact in zip(gradients, coarse[2:], want[2:], strict=True):
        assert error(mine.cpu(), exact) < error(wrong, exact) / 3


def test_no_more_than_one_chunk_of_logits_is_computed_at_once() -> None:
    seen: list[int] = []

    class Sizes(TorchDispatchMode):
        """Records the size of every array that an operation returns."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            seen.extend(array.numel() for array in tree_leaves(out) if isinstance(array, Tensor))
            return out

    head = linear(torch.randn(100, 4))
    states = torch.randn(25, 4, requires_grad=True)
    with Sizes():
        logprobs, entropies = token_logprobs(
            states, torch.zeros(25, dtype=torch.long), torch.ones(25), head,
            chunk_logits=1000, entropy_gradient=True,
        )  # fmt: skip
        (logprobs + entropies).sum().backward()
    assert max(seen) == 1000


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, head, targets, temperatures = case(torch.float32)
    head.requires_grad_(False)
    token_logprobs(hidden, targets, temperatures, head)[0].sum().backward()
    assert hidden.grad is not None and head.weight.grad is None


def test_without_rows_there_are_no_logprobs_and_the_gradient_is_zero() -> None:
    hidden, head, targets, temperatures = case(torch.float32, rows=0)
    logprobs, entropies = token_logprobs(hidden, targets, temperatures, head)
    logprobs.sum().backward()
    assert logprobs.shape == entropies.shape == (0,)
    assert head.weight.grad is not None and (head.weight.grad == 0).all()


def test_a_head_that_is_not_a_linear_layer_is_refused() -> None:
    hidden, head, targets, temperatures = case(torch.float32)
    with pytest.raises(ValueError, match=r"nn\.Linear, got Sequential"):
        token_logprobs(hidden, targets, temperatures, nn.Sequential(head))
