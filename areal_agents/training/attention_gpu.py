"""Packed attention on a GPU: flash attention of documents, FlexAttention of token trees.

Both are fused, and neither meets a [T, T] mask. Documents that share nothing are rows that cu_seqlens
cuts; in a tree, row q sees row k if k ≤ q and q lies before the end of what continues k's segment,
which is one number per row, and whole blocks that see nothing or everything are known beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from areal_agents.algorithms.packing.token_tree import Segment

BLOCK = 128  # rows and columns of one block of FlexAttention
LEAST_ROWS = 1024


@dataclass(frozen=True, slots=True, eq=False)
class GpuPlan:
    """What a kernel is told about one micro-batch; made once for all layers.

    Attributes:
        documents: [documents + 1] int32, where each starts and the last ends; None for a tree.
        longest: rows of the longest document.
        block_mask: of FlexAttention, over the rows padded to a few sizes, each compiled once.
    """

    documents: Tensor | None
    longest: int
    block_mask: Any


def gpu_plan(segments: Sequence[Segment], device: torch.device) -> GpuPlan:
    """The plan of a micro-batch whose rows the segments cover, depth first."""
    alone = all(s.position == 0 and s.subtree_end == s.end for s in segments)
    starts = [s.start for s in segments] + [segments[-1].end]
    return GpuPlan(
        documents=torch.tensor(starts, dtype=torch.int32, device=device) if alone else None,
        longest=max(s.end - s.start for s in segments),
        block_mask=tree_block_mask(segments, device),
    )


def gpu_attention(query: Tensor, key: Tensor, value: Tensor, plan: GpuPlan, scale: float) -> Tensor:
    """Flash attention where nothing is shared and the type is 16 bits wide, else FlexAttention.

    Args:
        query: [1, H, T, D]; key, value: [1, KV, T, D] with H a multiple of KV.
    """
    half = query.dtype in (torch.float16, torch.bfloat16)
    if plan.documents is not None and half and query.shape[-1] == value.shape[-1]:
        return varlen_attention(query, key, value, plan.documents, plan.longest, scale)
    return flex_tree_attention(query, key, value, plan.block_mask, scale)


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, documents: Tensor, longest: int, scale: float
) -> Tensor:
    """Causal flash attention within each document; runs on a GPU only."""
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(
        query[0].transpose(0, 1),  # [T, H, D]
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        documents,
        documents,
        longest,
        longest,
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(out, Tensor)
    return out.transpose(0, 1)[None]


def flex_tree_attention(query: Tensor, key: Tensor, value: Tensor, block_mask: Any, scale: float) -> Tensor:
    """FlexAttention over a block mask of `tree_block_mask`, compiled on a GPU."""
    rows = query.shape[2]
    padding = block_mask.shape[-1] - rows
    query, key, value = (F.pad(tensor, (0, 0, 0, padding)) for tensor in (query, key, value))
    out: Tensor = _flex(query.is_cuda)(
        query, key, value, block_mask=block_mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out[:, :, :rows]


@cache
def _flex(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # fullgraph: without the compiler it would make the [T, T] scores, and must fail instead
    return torch.compile(flex_attention, dynamic=True, fullgraph=True) if compiled else flex_attention


def tree_block_mask(segments: Sequence[Segment], device: torch.device) -> Any:
    """FlexAttention's mask of a token tree, its blocks found from the segments in O((T / 128)²).

    The rows are padded to a power of two; a row of padding sees itself.
    """
    from torch.nn.attention.flex_attention import BlockMask

    rows = max(LEAST_ROWS, 1 << (segments[-1].end - 1).bit_length())
    until = np.arange(1, rows + 1)
    for segment in segments:
        until[segment.start : segment.end] = segment.subtree_end
    seen_until = torch.from_numpy(until).to(device)

    def visible(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return (column <= row) & (row < seen_until[column])

    partial, full = _blocks(until)
    return BlockMask.from_kv_blocks(
        *_listed(partial, device),
        *_listed(full, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(rows, rows),
    )


def _blocks(until: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Which blocks of rows see a part, and which all, of which blocks of columns: [T/128, T/128]."""
    by_block = until.reshape(-1, BLOCK)
    index = np.arange(len(by_block))
    before = index[None, :] < index[:, None]
    any_seen = before & (by_block.max(1)[None, :] > index[:, None] * BLOCK)
    full = before & (by_block.min(1)[None, :] >= (index[:, None] + 1) * BLOCK)
    diagonal = np.eye(len(by_block), dtype=bool)
    return (any_seen & ~full) | diagonal, full


def _listed(blocks: npt.NDArray[np.bool_], device: torch.device) -> tuple[Tensor, Tensor]:
    """Number [1, 1, Q] and indices [1, 1, Q, K] of each row's blocks, those that are set first."""
    counts = blocks.sum(1).astype(np.int32)[None, None]
    indices = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)[None, None]
    return torch.from_numpy(counts).to(device), torch.from_numpy(indices).to(device)
