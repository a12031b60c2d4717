"""Computes logits in float32 from 16-bit hidden states and matrices.

A product of bfloat16 matrices rounds its result to bfloat16 as well: a logit of 20 is then off by up to
1/16, and so is the logprob. The engine and the trainer both compute logits here.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import linear

TILE = 2**20  # elements of the matrix that are cast at a time on a CPU: 4 MiB, which stay in its cache


def wide_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """hidden · weightᵀ + bias [N, V], summed and stored in at least float32.

    Args:
        hidden: [N, d]; weight: [V, d]; bias: [V].
    """
    if not is_half(weight):
        return linear(hidden, weight, bias)
    if weight.is_cuda or weight.is_meta:  # a meta tensor stands for one on a GPU
        logits = torch.mm(hidden, weight.T, out_dtype=torch.float32)
    else:  # a CPU has no product of 16-bit matrices with a float32 result
        logits = torch.empty(len(hidden), len(weight), dtype=torch.float32, device=weight.device)
        wide = hidden.float()
        for rows in tiles(weight):
            torch.mm(wide, weight[rows].float().T, out=logits[:, rows])
    return logits if bias is None else logits.add_(bias)


def is_half(tensor: Tensor) -> bool:
    """Whether the type is 16 bits wide."""
    return tensor.dtype in (torch.bfloat16, torch.float16)


def tiles(matrix: Tensor) -> Iterator[slice]:
    """Slices of the rows of a matrix [V, d] with at most TILE elements each, or one row."""
    size = max(1, TILE // matrix.shape[1])
    for start in range(0, len(matrix), size):
        yield slice(start, min(start + size, len(matrix)))
