"""Logprobs and entropies of chosen tokens, without computing logits where there is no loss.

Only the hidden rows that predict a trained token are multiplied by the output matrix, in chunks. The backward
pass computes each chunk's logits again and turns them into their gradient, so that about one chunk of logits
[C, V] exists at a time and the gradient of the matrix is summed in one array. If there are only a few logits,
they are kept for the backward pass instead of being recomputed.

On a GPU each pass over a chunk is one kernel, see `logit_kernels`; elsewhere the gradient takes the memory of
the logits.

Logits are float32 even if the hidden states and the matrix are bfloat16 (see
`inference.embedded.model.head`). Gradients with respect to the logits are rounded to the compute type, a
relative error of 2^-9 per entry; their products with the matrix and the states are summed in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from areal_agents.inference.embedded.model.head import is_half, tiles, wide_logits
from areal_agents.training.step import logit_kernels

# Elements of one chunk of logits, 512 MiB in float32. With fewer rows a GPU would spend its time on
# reading the matrix and on adding to its gradient.
CHUNK_LOGITS = 2**27
CPU_ROWS = 256  # of a chunk on a CPU: enough for the matrix kernel, and few enough for the cache
KEPT_LOGITS = 2**25  # so many are kept from the forward to the backward pass, 128 MiB in float32


def token_logprobs(
    hidden: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    head: nn.Module,
    *,
    chunk_logits: int = CHUNK_LOGITS,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Logprobs of the targets under softmax(head(hidden)/temperature), and the entropy of that distribution.

    Args:
        hidden: [N, d]; targets: [N]; temperatures: [N], each > 0.
        head: the model's output layer, d → V.
        chunk_logits: bound on C · V.
        entropy_gradient: whether the entropies are also differentiable, for an entropy bonus.

    Returns:
        Logprobs [N], differentiable; entropies [N], detached unless `entropy_gradient`. Both float32,
        or float64 if the logits are.

    Raises:
        ValueError: a head that is not a plain nn.Linear: its weight would not be all that it computes.
    """
    rows = chunk_rows(head, hidden, chunk_logits)
    assert isinstance(head, nn.Linear)
    keep = torch.is_grad_enabled() and len(hidden) * head.out_features <= min(chunk_logits, KEPT_LOGITS)
    return _TokenLogprobs.apply(
        hidden, head.weight, head.bias, targets, temperatures, rows, keep, entropy_gradient
    )


def chunk_rows(head: nn.Module, hidden: Tensor, chunk_logits: int) -> int:
    """Number of rows of `hidden` [N, d] per chunk, so that a chunk has at most `chunk_logits` logits.

    Raises:
        ValueError: a head that is not a plain nn.Linear: its weight would not be all that it computes.
    """
    if not isinstance(head, nn.Linear):
        raise ValueError(f"expected an output layer of type nn.Linear, got {type(head).__name__}")
    rows = max(1, chunk_logits // head.out_features)
    return min(rows, CPU_ROWS) if hidden.device.type == "cpu" else rows


class _TokenLogprobs(torch.autograd.Function):
    """With s = logits/T, p = softmax(s), H its entropy and y the target:
    ∂ log p_y/∂s = 1_y − p, and ∂H/∂s = −p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperatures: Tensor,
        rows: int,
        keep: bool,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        kept: list[Tensor] = []
        has_kernels = _has_kernels(hidden, weight, bias, temperatures)
        for h, y, temperature in chunks(rows, hidden, targets, temperatures):
            if has_kernels:
                scores = wide_logits(h, weight)
                parts.append(logit_kernels.token_statistics(scores, temperature, y))
            else:
                scores = scaled_logits(h, weight, bias, temperature)
                logprobs, entropies, normalizers, shift = _reduce(scores, y)
                parts.append((logprobs, entropies, normalizers if keep else normalizers + shift))
            if keep:
                kept.append(scores)
            del scores  # frees it before the next chunk is computed
        logprobs, entropies, normalizers = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, bias, targets, temperatures, entropies, normalizers, *kept)
        ctx.rows = rows
        ctx.set_materialize_grads(False)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, d_logprobs: Tensor | None, d_entropies: Tensor | None) -> Any:
        hidden, weight, bias, targets, temperatures, entropies, normalizers, *kept = ctx.saved_tensors
        of_logprobs, of_entropies = (
            torch.zeros_like(entropies) if d is None else d / temperatures for d in (d_logprobs, d_entropies)
        )
        d_hidden = torch.empty_like(hidden)
        d_weight = wide_zeros(weight) if ctx.needs_input_grad[1] else None
        d_bias = wide_zeros(bias) if ctx.needs_input_grad[2] else None
        arrays = (hidden, targets, temperatures, entropies, normalizers, of_logprobs, of_entropies)
        has_kernels = _has_kernels(hidden, weight, bias, temperatures)
        for index, (h, y, temperature, entropy, normalizer, g, e) in enumerate(chunks(ctx.rows, *arrays)):
            if has_kernels:
                logits = kept[index] if kept else wide_logits(h, weight)
                d_logits = logit_kernels.logit_gradient(
                    logits, temperature, y, normalizer, entropy, g,
                    None if d_entropies is None else e, weight.dtype,
                )  # fmt: skip
                del logits
            else:
                log_p = kept[index] - normalizer[:, None] if kept else None
                if log_p is None:
                    log_p = scaled_logits(h, weight, bias, temperature).sub_(normalizer[:, None])
                d_logits = _score_gradient(log_p, y, g, None if d_entropies is None else (e, entropy))
                del log_p
                if d_bias is not None:
                    d_bias += d_logits.sum(0)
                d_logits = d_logits.to(weight.dtype)
            first = index * ctx.rows
            torch.mm(d_logits, weight, out=d_hidden[first : first + len(h)])
            if d_weight is not None:
                add_product(d_weight, d_logits.T, h)
            del d_logits
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        d_bias = None if d_bias is None else d_bias.to(bias.dtype)
        return d_hidden, d_weight, d_bias, None, None, None, None, None


def _has_kernels(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperatures: Tensor) -> bool:
    """Whether the passes over logits are kernels: on a GPU, or where a meta tensor stands for one."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (
        (hidden.is_cuda or hidden.is_meta)
        and bias is None
        and wide == temperatures.dtype == torch.float32
        and logit_kernels.has_triton()
    )


def scaled_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperatures: Tensor) -> Tensor:
    """Logits divided by the temperature [C, V], at least float32, in a new array."""
    return wide_logits(hidden, weight, bias).div_(temperatures[:, None])


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left · right for total [V, d]; 16-bit factors are summed in float32."""
    if not is_half(right):
        total.addmm_(left, right)
        return
    if right.is_cuda or right.is_meta:
        logit_kernels.add_half_product(total, left, right)
        return
    for rows in tiles(total):  # the sum over this chunk's rows is float32 within the kernel, and rounded once
        total[rows] += torch.mm(left[rows], right)


def wide_zeros(tensor: Tensor) -> Tensor:
    """Zeros of the tensor's shape, in float32 or a wider type."""
    return torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))


def _reduce(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logprobs, entropies, log of the normalizer and the shift, each [C]; scores are shifted in place."""
    shift = scores.amax(-1)
    odds = scores.sub_(shift[:, None]).exp()
    total = odds.sum(-1)
    normalizers = total.log()
    mean = torch.bmm(odds[:, None], scores[:, :, None])[:, 0, 0] / total
    return scores.gather(1, targets[:, None])[:, 0] - normalizers, normalizers - mean, normalizers, shift


def _score_gradient(
    log_p: Tensor, targets: Tensor, of_logprobs: Tensor, of_entropies: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Gradient with respect to the scores [C, V], written into the memory of log_p.

    Args:
        of_entropies: the gradient with respect to the entropies, and the entropies; None if they have no
            gradient.
    """
    of_logprobs = of_logprobs[:, None]
    if of_entropies is None:
        gradient = log_p.exp_().mul_(-of_logprobs)
    else:
        outer, entropies = of_entropies
        p = log_p.exp()
        gradient = log_p.add_(entropies[:, None]).mul_(-outer[:, None]).sub_(of_logprobs).mul_(p)
    return gradient.scatter_add_(1, targets[:, None], of_logprobs)


def chunks(rows: int, *arrays: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split the arrays into chunks of `rows` rows."""
    return zip(*(array.split(rows) for array in arrays), strict=True)
