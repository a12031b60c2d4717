"""The divergence of the policy from a teacher at each scored token, computed in chunks.

As in `logprobs`, only the hidden rows that predict a scored token are multiplied by the output matrices, and
the backward pass recomputes the logits of each chunk, so that about two chunks of logits [C, V] exist at a
time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from areal_agents.algorithms.losses.distillation import reverse_kl_top_k
from areal_agents.training.step.logprobs import add_product, chunk_rows, chunks, scaled_logits, wide_zeros


@dataclass(frozen=True, slots=True, eq=False)
class TopTargets:
    """The most likely tokens of a teacher at the N scored tokens of a micro-batch.

    Attributes:
        ids: [N, k] int64.
        logprobs: [N, k] float32.
    """

    ids: Tensor
    logprobs: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class FullTargets:
    """A teacher's whole distribution at the N scored tokens of a micro-batch.

    Attributes:
        hidden: [N, d_T] the teacher's last hidden states.
        weight, bias: [V, d_T] and [V] of its output layer.
        temperatures: [N] divisors of the layer's outputs.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    temperatures: Tensor


def reverse_kl(
    hidden: Tensor,
    temperatures: Tensor,
    head: nn.Linear,
    targets: TopTargets | FullTargets,
    *,
    chunk_logits: int,
) -> Tensor:
    """KL(π_θ, teacher) [N] at each row, differentiable in `hidden` and in the head.

    Args:
        hidden: [N, d], the policy's last hidden states.
        temperatures: [N], divisors of the policy's logits.
        head: the policy's output layer.
        targets: the teacher's distributions; for `TopTargets` see `reverse_kl_top_k`.
        chunk_logits: upper bound on the number C · V of logits in a chunk.

    Raises:
        ValueError: the teacher's vocabulary size differs from the policy's.
    """
    rows = chunk_rows(head, hidden, chunk_logits)
    if isinstance(targets, TopTargets):
        top = _LogprobsAt.apply(hidden, head.weight, head.bias, targets.ids, temperatures, rows)
        return reverse_kl_top_k(top, targets.logprobs.to(top.dtype))
    if len(targets.weight) != head.out_features:
        raise ValueError(
            f"the teacher has a vocabulary of {len(targets.weight)} tokens and the policy one of "
            f"{head.out_features}; distillation needs a teacher with the policy's tokenizer and vocabulary"
        )
    divergence: Tensor = _ReverseKl.apply(
        hidden,
        head.weight,
        head.bias,
        temperatures,
        targets.hidden,
        targets.weight,
        targets.bias,
        targets.temperatures,
        rows,
    )
    return divergence


def top_logprobs(
    hidden: Tensor, temperatures: Tensor, head: nn.Linear, k: int, *, chunk_logits: int
) -> tuple[Tensor, Tensor]:
    """The k most likely tokens at each row, without a gradient: ids [N, k] int64, logprobs [N, k] float32.

    The arguments are as in `reverse_kl`.
    """
    rows = chunk_rows(head, hidden, chunk_logits)
    ids, values = (
        [hidden.new_zeros((0, k), dtype=torch.int64)],
        [hidden.new_zeros((0, k), dtype=torch.float32)],
    )
    with torch.no_grad():
        for h, temperature in chunks(rows, hidden, temperatures):
            best = torch.log_softmax(scaled_logits(h, head.weight, head.bias, temperature), -1).topk(k)
            ids.append(best.indices)
            values.append(best.values)
    return torch.cat(ids), torch.cat(values)


class _LogprobsAt(torch.autograd.Function):
    """log softmax(s) at k tokens of each row, where s are the logits divided by the temperature.

    With g the gradient with respect to the k logprobs and p = softmax(s), the gradient with respect to s is
    Σ_i g_i (1_{y_i} − p).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        temperatures: Tensor,
        rows: int,
    ) -> Tensor:
        parts = [
            torch.log_softmax(scaled_logits(h, weight, bias, t), -1).gather(1, y)
            for h, y, t in chunks(rows, hidden, ids, temperatures)
        ]
        ctx.save_for_backward(hidden, weight, bias, ids, temperatures)
        ctx.rows = rows
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden, weight, bias, ids, temperatures = ctx.saved_tensors
        sums = _HeadGradient(ctx, hidden, weight, bias)
        for h, y, t, g in chunks(ctx.rows, hidden, ids, temperatures, grads[0]):
            p = torch.softmax(scaled_logits(h, weight, bias, t), -1)
            d_scores = p.mul_(-g.sum(-1, keepdim=True)).scatter_add_(1, y, g)
            sums.add(h, d_scores.div_(t[:, None]))
        return sums.hidden, sums.weight, sums.bias, None, None, None


class _ReverseKl(torch.autograd.Function):
    """D = Σ_v p_v (log p_v − log q_v), and ∂D/∂s_v = p_v (log p_v − log q_v − D).

    s are the policy's logits divided by the temperature, p = softmax(s), and q is the teacher's distribution.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperatures: Tensor,
        t_hidden: Tensor,
        t_weight: Tensor,
        t_bias: Tensor | None,
        t_temperatures: Tensor,
        rows: int,
    ) -> Tensor:
        parts = []
        for h, t, th, tt in chunks(rows, hidden, temperatures, t_hidden, t_temperatures):
            log_p = torch.log_softmax(scaled_logits(h, weight, bias, t), -1)
            gap = log_p - torch.log_softmax(scaled_logits(th, t_weight, t_bias, tt), -1)
            parts.append((log_p.exp_() * gap).sum(-1))
        divergence = torch.cat(parts)
        teacher = (t_hidden, t_weight, t_bias, t_temperatures)
        ctx.save_for_backward(hidden, weight, bias, temperatures, *teacher, divergence)
        ctx.rows = rows
        return divergence

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden, weight, bias, temperatures, *teacher, divergence = ctx.saved_tensors
        t_hidden, t_weight, t_bias, t_temperatures = teacher
        sums = _HeadGradient(ctx, hidden, weight, bias)
        arrays = (hidden, temperatures, t_hidden, t_temperatures, divergence, grads[0])
        for h, t, th, tt, d, g in chunks(ctx.rows, *arrays):
            log_p = torch.log_softmax(scaled_logits(h, weight, bias, t), -1)
            gap = log_p - torch.log_softmax(scaled_logits(th, t_weight, t_bias, tt), -1)
            d_scores = gap.sub_(d[:, None]).mul_(log_p.exp_()).mul_((g / t)[:, None])
            sums.add(h, d_scores)
        return sums.hidden, sums.weight, sums.bias, None, None, None, None, None, None


class _HeadGradient:
    """Gradients of an output layer and of its inputs, summed over the chunks of its rows in order.

    The gradients of the layer are summed in at least float32, whatever its type.
    """

    def __init__(self, ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self._head, self._hidden = weight, hidden
        self._parts: list[Tensor] = []
        self._weight = wide_zeros(weight) if ctx.needs_input_grad[1] else None
        self._bias = wide_zeros(bias) if bias is not None and ctx.needs_input_grad[2] else None

    def add(self, hidden: Tensor, d_logits: Tensor) -> None:
        """Add a chunk: its rows [C, d] and the gradient with respect to its logits [C, V]."""
        if self._bias is not None:
            self._bias += d_logits.sum(0)
        d_logits = d_logits.to(self._head.dtype)
        self._parts.append(d_logits @ self._head)
        if self._weight is not None:
            add_product(self._weight, d_logits.T, hidden)

    @property
    def hidden(self) -> Tensor:
        """[N, d]"""
        return torch.cat([self._hidden[:0], *self._parts])

    @property
    def weight(self) -> Tensor | None:
        """[V, d]; None if it is not needed."""
        return None if self._weight is None else self._weight.to(self._head.dtype)

    @property
    def bias(self) -> Tensor | None:
        """[V]; None if it is not needed."""
        return None if self._bias is None else self._bias.to(self._head.dtype)
