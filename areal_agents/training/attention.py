"""Attention over a packed token tree, registered with transformers as one more implementation.

Packed rows never meet in a mask. On a CPU in float32 the fused kernel runs once per segment (causal)
and once per shared segment (all of its descendants, which are one slice, against its keys); partial
results are merged through their log-sum-exp, exactly. On a GPU see attention_gpu. Elsewhere, and as
the reference, each segment attends to its gathered keys through scaled_dot_product_attention. Where
the ranks of a context share the rows, attention is over all rows of some heads, see context_parallel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from areal_agents.algorithms.packing.microbatches import MicroBatch
from areal_agents.algorithms.packing.token_tree import Segment
from areal_agents.training.attention_gpu import GpuPlan, gpu_attention, gpu_plan
from areal_agents.training.context_parallel import heads_to_rows, rows_to_heads

NAME = "token_tree"

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """What every layer's attention needs to know about one micro-batch.

    Attributes:
        segments: of all its rows, depth first.
        gpu: for the kernels of a GPU; None elsewhere.
        group: the ranks that the rows are split over; None if they are all here.
    """

    segments: tuple[Segment, ...]
    gpu: GpuPlan | None
    group: dist.ProcessGroup | None


def plan(batch: MicroBatch) -> AttentionPlan:
    """The plan of a micro-batch, to be made once and passed to the model as `segments=`.

    Raises:
        ValueError: the segments do not cover the rows, here or on all ranks of the context.
    """
    group = batch.context_group
    ranks = 1 if group is None else dist.get_world_size(group)
    rows, covered = len(batch.input_ids) * ranks, batch.segments[-1].end
    if rows != covered:
        raise ValueError(f"segments of {covered} rows, and {rows} rows on {ranks} ranks")
    device = batch.input_ids.device
    gpu = gpu_plan(batch.segments, device) if device.type == "cuda" else None
    return AttentionPlan(batch.segments, gpu, group)


def register() -> None:
    """Make `attn_implementation="token_tree"` known to transformers; the model is then called with
    `segments=plan(batch)`, and gets no mask since none is registered under that name. Idempotent."""
    AttentionInterface.register(NAME, _attention_forward)


def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Sequence[Segment], scale: float
) -> Tensor:
    """Attention in which each row sees its own segment causally, and all of the segments above it.

    Args:
        query: [1, H, T, D]; key, value: [1, KV, T, D] with H a multiple of KV.
        segments: depth first, covering all T rows.

    Returns:
        [1, H, T, D].
    """
    if query.device.type == "cpu" and query.dtype == torch.float32 and query.shape[-1] == value.shape[-1]:
        return _MergedAttention.apply(query, key, value, tuple(segments), scale)
    return gathered_attention(query, key, value, segments, scale)


def gathered_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Sequence[Segment], scale: float
) -> Tensor:
    """The same as `tree_attention`, by one attention call per segment over its gathered keys."""
    grouped = query.shape[1] != key.shape[1]
    outputs: list[Tensor] = []
    above: list[Segment] = []
    for segment in segments:
        above = [s for s in above if s.subtree_end > segment.start]
        rows = [slice(s.start, s.end) for s in (*above, segment)]
        keys = torch.cat([key[:, :, r] for r in rows], 2)
        values = torch.cat([value[:, :, r] for r in rows], 2)
        own, seen = segment.end - segment.start, keys.shape[2]
        mask = None
        if above:  # everything above, and the own segment causally
            mask = torch.ones(own, seen, dtype=torch.bool, device=query.device).tril(seen - own)
        outputs.append(
            F.scaled_dot_product_attention(
                query[:, :, segment.start : segment.end],
                keys,
                values,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=grouped,
            )  # fmt: skip
        )
        above.append(segment)
    return torch.cat(outputs, 2)


class _MergedAttention(torch.autograd.Function):
    """One fused call per block of keys; outputs of several blocks merge by log-sum-exp.

    The kernel's backward needs only the merged output and log-sum-exp: with them each block
    recomputes its true probabilities, so the blocks' gradients add up.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: tuple[Segment, ...], scale: float
    ) -> Tensor:
        out = torch.empty_like(query)
        lse = query.new_empty(query.shape[:3])
        for s in segments:
            rows = slice(s.start, s.end)
            out[:, :, rows], lse[:, :, rows] = _flash(
                query[:, :, rows], key[:, :, rows], value[:, :, rows], 0.0, True, scale=scale
            )
        for s in segments:
            if s.subtree_end > s.end:
                rows, keys = slice(s.end, s.subtree_end), slice(s.start, s.end)
                part, part_lse = _flash(
                    query[:, :, rows], key[:, :, keys], value[:, :, keys], 0.0, False, scale=scale
                )
                share = torch.sigmoid(part_lse - lse[:, :, rows])[..., None]
                out[:, :, rows] = torch.lerp(out[:, :, rows], part, share)
                lse[:, :, rows] = torch.logaddexp(lse[:, :, rows], part_lse)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.segments, ctx.scale = segments, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        grad = grads[0]
        totals = tuple(torch.zeros_like(t) for t in (query, key, value))

        def add(rows: slice, keys: slice, causal: bool) -> None:
            parts = _flash_backward(
                grad[:, :, rows], query[:, :, rows], key[:, :, keys], value[:, :, keys],
                out[:, :, rows], lse[:, :, rows], 0.0, causal, scale=ctx.scale,
            )  # fmt: skip
            for total, part, where in zip(totals, parts, (rows, keys, keys), strict=True):
                total[:, :, where] += part

        for s in ctx.segments:
            add(slice(s.start, s.end), slice(s.start, s.end), True)
            if s.subtree_end > s.end:
                add(slice(s.end, s.subtree_end), slice(s.start, s.end), False)
        return *totals, None, None


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    segments: AttentionPlan,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls; returns [1, T, H, D]. Settings that would change the result are refused."""
    refused = [name for name in ("sliding_window", "softcap", "dropout") if kwargs.get(name)]
    if attention_mask is not None or refused:
        raise ValueError(f"packed attention takes no mask and no {refused}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if segments.group is not None:
        query, key, value = rows_to_heads(query, key, value, segments.group)
    if segments.gpu is not None:
        out = gpu_attention(query, key, value, segments.gpu, scale)
    else:
        out = tree_attention(query, key, value, segments.segments, scale)
    if segments.group is not None:
        out = heads_to_rows(out, segments.group)
    return out.transpose(1, 2), None
