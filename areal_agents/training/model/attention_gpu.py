"""Packed attention on a GPU: flash attention for documents, FlexAttention for token trees.

Both are fused, and neither creates a [T, T] mask. Documents that share nothing are separated by cu_seqlens.
In a tree, row q sees row k if k ≤ q and q lies before the end of the subtree of k's segment; this end is one
number per row, and blocks that see nothing or everything are known beforehand. A sliding window bounds the
difference of the rows' positions. Attention sinks need the log-sum-exp with its gradient, which FlexAttention
provides and flash attention does not.

FlexAttention is compiled with symbolic sizes, and every batch has the same mask function, whose limits are
tensors: a few programs then serve all batches, windows and layers of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from inspect import signature
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from areal_agents.algorithms.packing.token_tree import Segment
from areal_agents.errors import TrainingError

BLOCK = 128  # rows and columns of one block of FlexAttention
LEAST_ROWS = 1024
LEAST_WIDTH = 16  # of a head, for the tensor cores that FlexAttention's kernel uses
FLASH_WIDTHS = range(8, 257, 8)  # of a head, for which flash attention has kernels


@dataclass(frozen=True, slots=True, eq=False)
class GpuPlan:
    """The kernel arguments of one micro-batch, computed once for all layers.

    Attributes:
        documents: [documents + 1] int32, the start of each document and the end of the last; None for a tree.
        longest: number of rows of the longest document.
        segments, device: the segments and the device for which block masks are created.
        block_masks: the block masks of FlexAttention by sliding window. The rows are padded to one of a few
            sizes, each compiled once. A mask is created when the first layer requests it.
    """

    documents: Tensor | None
    longest: int
    segments: tuple[Segment, ...]
    device: torch.device
    block_masks: dict[int | None, Any] = field(default_factory=dict)

    def block_mask(self, window: int | None = None) -> Any:
        """The block mask for layers with this sliding window."""
        if window not in self.block_masks:
            self.block_masks[window] = tree_block_mask(self.segments, self.device, window=window)
        return self.block_masks[window]


def gpu_plan(segments: Sequence[Segment], device: torch.device) -> GpuPlan:
    """The plan of a micro-batch whose rows the segments cover, depth first."""
    alone = all(s.position == 0 and s.subtree_end == s.end for s in segments)
    starts = [s.start for s in segments] + [segments[-1].end]
    return GpuPlan(
        documents=torch.tensor(starts, dtype=torch.int32, device=device) if alone else None,
        longest=max(s.end - s.start for s in segments),
        segments=tuple(segments),
        device=device,
    )


def gpu_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: GpuPlan,
    scale: float,
    *,
    sinks: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Compute flash attention if nothing is shared and the type is 16 bits wide, else FlexAttention.

    Args:
        query: [1, H, T, D]; key, value: [1, KV, T, D] with H a multiple of KV.
        sinks: [H], the logit of each head's attention sink; always computed by FlexAttention.
        window: the number of positions that a row sees, its own included; None for all of them.
    """
    if plan.documents is not None and sinks is None and _has_flash_kernel(query, value):
        return varlen_attention(query, key, value, plan.documents, plan.longest, scale, window=window)
    return flex_tree_attention(query, key, value, plan.block_mask(window), scale, sinks=sinks)


def _has_flash_kernel(query: Tensor, value: Tensor) -> bool:
    half = query.dtype in (torch.float16, torch.bfloat16)
    return half and query.shape[-1] == value.shape[-1] and query.shape[-1] in FLASH_WIDTHS


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor,
    longest: int,
    scale: float,
    *,
    window: int | None = None,
) -> Tensor:
    """Causal flash attention within each document, over `window` positions; runs on a GPU only."""
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 shares the heads of keys among those of queries without being asked
    has_gqa = "enable_gqa" in signature(varlen_attn).parameters
    shared_heads: dict[str, Any] = {"enable_gqa": True} if has_gqa else {}
    out = varlen_attn(
        query[0].transpose(0, 1),  # [T, H, D]
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        documents,
        documents,
        longest,
        longest,
        scale=scale,
        # number of rows to the left, without the row itself
        window_size=(-1 if window is None else window - 1, 0),
        **shared_heads,
    )
    assert isinstance(out, Tensor)
    return out.transpose(0, 1)[None]


def flex_tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: Any,
    scale: float,
    *,
    sinks: Tensor | None = None,
) -> Tensor:
    """FlexAttention over a block mask of `tree_block_mask`, compiled on a GPU; sinks: [H].

    Raises:
        TrainingError: the kernel cannot be compiled.
    """
    from torch._dynamo.exc import TorchDynamoException  # imported late, because it takes seconds
    from torch.nn.attention.flex_attention import AuxRequest

    rows, width = query.shape[2], value.shape[3]
    padding = block_mask.shape[-1] - rows
    query, key, value = (
        F.pad(tensor, (0, max(0, LEAST_WIDTH - tensor.shape[3]), 0, padding))
        for tensor in (query, key, value)
    )
    options = {"block_mask": block_mask, "scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    flex = compiled_flex() if query.is_cuda else _uncompiled_flex()
    try:
        if sinks is None:
            out: Tensor = flex(query, key, value, **options)
        else:
            out, aux = flex(query, key, value, **options, return_aux=AuxRequest(lse=True))
            share = torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype)[None, :, None])
            out = (out * share[..., None]).to(out.dtype)
    except TorchDynamoException as error:
        raise TrainingError(
            f"FlexAttention, which packed samples with shared prefixes need on a GPU, cannot be compiled for "
            f"queries {tuple(query.shape)} and keys {tuple(key.shape)} in {query.dtype}; set "
            f"trainer.share_prefixes: false to train without it in bfloat16. The compiler says: {error}"
        ) from error
    return out[:, :, :rows, :width]


@cache
def compiled_flex(backend: str | Callable[..., Any] = "inductor") -> Any:
    """FlexAttention as it is compiled on a GPU."""
    from torch.nn.attention.flex_attention import flex_attention

    # fullgraph: without compilation it would create the [T, T] scores; it must fail instead
    return torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=backend)


def _uncompiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


def tree_block_mask(segments: Sequence[Segment], device: torch.device, *, window: int | None = None) -> Any:
    """FlexAttention's mask of a token tree, with its blocks computed from the segments in O((T / 128)²).

    The rows are padded to a power of two; a row of padding sees itself. With a window a row sees only
    rows whose position is less than `window` below its own.
    """
    from torch.nn.attention.flex_attention import BlockMask

    rows = max(LEAST_ROWS, 1 << (segments[-1].end - 1).bit_length())
    until = np.arange(1, rows + 1)
    positions = np.zeros(rows, np.int64)
    for segment in segments:
        until[segment.start : segment.end] = segment.subtree_end
        positions[segment.start : segment.end] = segment.position + np.arange(segment.end - segment.start)
    seen_until = torch.from_numpy(until).to(device)
    position = torch.from_numpy(positions).to(device)
    first_seen = torch.from_numpy(positions - (rows if window is None else window) + 1).to(device)

    def visible(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return (column <= row) & (row < seen_until[column]) & (position[column] >= first_seen[row])

    partial, full = _blocks(until)
    if window is not None:
        any_near, all_near = _near_blocks(positions, window)
        diagonal = np.eye(len(full), dtype=bool)
        partial, full = ((partial | full) & any_near & ~(full & all_near)) | diagonal, full & all_near
    return BlockMask.from_kv_blocks(
        *_listed(partial, device),
        *_listed(full, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(rows, rows),
    )


def _blocks(until: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Two masks [T/128, T/128]: whether a block of rows sees part of a block of columns, and whether it sees
    all of it."""
    by_block = until.reshape(-1, BLOCK)
    index = np.arange(len(by_block))
    before = index[None, :] < index[:, None]
    any_seen = before & (by_block.max(1)[None, :] > index[:, None] * BLOCK)
    full = before & (by_block.min(1)[None, :] >= (index[:, None] + 1) * BLOCK)
    diagonal = np.eye(len(by_block), dtype=bool)
    return (any_seen & ~full) | diagonal, full


def _near_blocks(
    positions: npt.NDArray[np.int64], window: int
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Two masks: whether any row of a block may be within the window of a block of columns, and whether all
    rows are."""
    by_block = positions.reshape(-1, BLOCK)
    low, high = by_block.min(1), by_block.max(1)
    return low[:, None] - high[None, :] < window, high[:, None] - low[None, :] < window


def _listed(blocks: npt.NDArray[np.bool_], device: torch.device) -> tuple[Tensor, Tensor]:
    """Number [1, 1, Q] and indices [1, 1, Q, K] of the blocks of each block row, with the set ones first."""
    counts = blocks.sum(1).astype(np.int32)[None, None]
    indices = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)[None, None]
    return torch.from_numpy(counts).to(device), torch.from_numpy(indices).to(device)
