"""The passes over a chunk of logits on a GPU, one kernel each. They are bound by memory bandwidth, and a
sequence of torch's own operations would read and write the chunk several times.

`token_statistics` reads the logits once, `logit_gradient` reads them once and writes their gradient, and
`add_half_product` adds to the gradient of the output matrix in place. All three are registered as custom
operators with a fake implementation, which returns shapes without computing: the estimate of memory counts by
it what they allocate.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

BLOCK = 4096  # logits of one row that a program handles at a time
WARPS = 8


@cache
def has_triton() -> bool:
    """Whether Triton, which compiles the kernels, is installed; it comes with torch for GPUs."""
    return importlib.util.find_spec("triton") is not None


@torch.library.custom_op("areal_agents::token_statistics", mutates_args=(), device_types="cuda")
def token_statistics(logits: Tensor, temperatures: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs of the targets under softmax(logits / temperature), entropies, and logs of the normalizers.

    Args:
        logits: [C, V], float32; temperatures: [C], float32; targets: [C], int64. Contiguous, as all arrays
            here; only the rows of `logits` may be apart.

    Returns:
        Logprobs, entropies, and logs of the normalizers Σ exp(logits / temperature), each [C], float32.
    """
    return compute_statistics(logits, temperatures, targets)


@token_statistics.register_fake
def _(logits: Tensor, temperatures: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = len(logits)
    return temperatures.new_empty(rows), temperatures.new_empty(rows), temperatures.new_empty(rows)


@torch.library.custom_op("areal_agents::logit_gradient", mutates_args=(), device_types="cuda")
def logit_gradient(
    logits: Tensor,
    temperatures: Tensor,
    targets: Tensor,
    normalizers: Tensor,
    entropies: Tensor,
    of_logprobs: Tensor,
    of_entropies: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient with respect to logits / temperature [C, V] in `dtype`.

    Args:
        normalizers, entropies: [C], as `token_statistics` returned them for these logits.
        of_logprobs, of_entropies: [C], the gradients with respect to logprobs and entropies; the latter None
            if the entropies have none.
    """
    return compute_gradient(
        logits, temperatures, targets, normalizers, entropies, of_logprobs, of_entropies, dtype
    )


@logit_gradient.register_fake
def _(
    logits: Tensor,
    temperatures: Tensor,
    targets: Tensor,
    normalizers: Tensor,
    entropies: Tensor,
    of_logprobs: Tensor,
    of_entropies: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return logits.new_empty(logits.shape, dtype=dtype)


@torch.library.custom_op("areal_agents::add_half_product", mutates_args={"total"}, device_types="cuda")
def add_half_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left · right, for 16-bit factors and total [V, d] of float32, in place.

    A custom operator, because torch 2.11 has no meta implementation of this product.
    """
    if len(right):  # a rank may have no trained token in a micro-batch
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)


@add_half_product.register_fake
def _(total: Tensor, left: Tensor, right: Tensor) -> None:
    return None


def compute_statistics(
    logits: Tensor, temperatures: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel of `token_statistics`, also in Triton's interpreter on a CPU."""
    rows, vocabulary = logits.shape
    logprobs, entropies, normalizers = (
        torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(3)
    )
    if rows:
        _kernels().statistics[(rows,)](
            logits, temperatures, targets, logprobs, entropies, normalizers, logits.stride(0), vocabulary,
            BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return logprobs, entropies, normalizers


def compute_gradient(
    logits: Tensor,
    temperatures: Tensor,
    targets: Tensor,
    normalizers: Tensor,
    entropies: Tensor,
    of_logprobs: Tensor,
    of_entropies: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Launch the kernel of `logit_gradient`, also in Triton's interpreter on a CPU."""
    rows, vocabulary = logits.shape
    gradient = torch.empty(rows, vocabulary, dtype=dtype, device=logits.device)
    if rows:
        _kernels().gradient[(rows, -(-vocabulary // BLOCK))](
            logits, temperatures, targets, normalizers, entropies, of_logprobs,
            of_logprobs if of_entropies is None else of_entropies, gradient, logits.stride(0), vocabulary,
            OF_ENTROPIES=of_entropies is not None, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return gradient


@cache
def _kernels() -> Any:
    """The module of the kernels, imported late: without a GPU nothing needs Triton."""
    from areal_agents.training.step import triton_kernels

    return triton_kernels
