"""Attention over a packed token tree, registered as an attention implementation of transformers.

A mask over all rows is never created. On a CPU in float32 the fused kernel runs once per segment (causal)
and once per shared segment (all of its descendants, which are one slice, against its keys); partial
results are merged through their log-sum-exp, exactly. `attention_gpu` handles GPUs. In other cases, within a
sliding window, and as the reference implementation, each segment attends to its gathered keys. If the ranks
of a context share the rows, each rank computes attention over all rows for some of the heads (see
`context_parallel`).

An attention sink (arXiv 2309.17453; a learned logit per head, as in gpt-oss) takes part in the
normalization of the softmax and has no value. With L the log-sum-exp of a row's scores and s the sink of
its head, the output is the ordinary one times sigmoid(L - s), and the log-sum-exp is log(exp L + exp s).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from areal_agents.algorithms.packing.microbatches import MicroBatch
from areal_agents.algorithms.packing.token_tree import Segment
from areal_agents.errors import TrainingError
from areal_agents.training.model.attention_gpu import GpuPlan, gpu_attention, gpu_plan
from areal_agents.training.model.context_parallel import heads_to_rows, own_heads, rows_to_heads

NAME = "token_tree"
ROWS = 256  # rows whose scores are computed at once with a window or a sink

# Keyword arguments of an attention call that do not change its result. Flash attention reads packed documents
# from `position_ids`, which agree with the plan of the rows; the other arguments select additional outputs of
# the model.
HARMLESS = frozenset(
    {
        "position_ids",
        "use_cache",
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
    }
)

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """The layout of one micro-batch for the attention of every layer.

    Attributes:
        segments: the segments of all rows, depth first.
        gpu: the plan of the GPU kernels; None on other devices.
        group: the ranks over which the rows are split; None if this rank has all rows.
    """

    segments: tuple[Segment, ...]
    gpu: GpuPlan | None
    group: dist.ProcessGroup | None


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """One call of the attention interface, as `AttentionProbe` records it.

    Attributes:
        heads, kv_heads: the number of heads of the queries, and of the keys and values.
        window: the number of rows that a row attends to, including itself; None without a sliding window.
    """

    module: nn.Module
    heads: int
    kv_heads: int
    window: int | None


@dataclass(frozen=True, slots=True)
class AttentionProbe:
    """Records attention calls without computing attention; passed to a model as `segments=` in place of a
    plan. The result has no values, but keeps for the backward pass what a fused kernel keeps.

    Attributes:
        cache_bytes: bytes of the keys and values of all calls.
    """

    calls: list[AttentionCall] = field(default_factory=list)
    cache_bytes: list[int] = field(default_factory=list)


def plan(batch: MicroBatch) -> AttentionPlan:
    """Create the plan of a micro-batch, which is passed to the model as `segments=` for all layers.

    Raises:
        ValueError: the segments do not cover the rows, here or on all ranks of the context.
    """
    group = batch.context_group
    ranks = 1 if group is None else dist.get_world_size(group)
    rows, covered = len(batch.input_ids) * ranks, batch.segments[-1].end
    if rows != covered:
        raise ValueError(
            f"the segments cover {covered} rows, expected {ranks} × {rows} (ranks × rows per rank)"
        )
    device = batch.input_ids.device
    gpu = gpu_plan(batch.segments, device) if device.type == "cuda" else None
    return AttentionPlan(batch.segments, gpu, group)


def register() -> None:
    """Register `attn_implementation="token_tree"` with transformers. The model is then called with
    `segments=plan(batch)`, and receives no mask, since no mask function is registered under that name.
    Idempotent."""
    AttentionInterface.register(NAME, _attention_forward)


def leave_uncompiled() -> None:
    """Let models that are compiled call attention as it is, between two compiled parts. Idempotent."""
    AttentionInterface.register(NAME, torch.compiler.disable(_attention_forward))


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Sequence[Segment],
    scale: float,
    *,
    sinks: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention in which each row attends causally to its own segment and fully to all segments above it.

    Args:
        query: [1, H, T, D]; key, value: [1, KV, T, D] with H a multiple of KV.
        segments: depth first, covering all T rows.
        sinks: [H], the logit of each head's attention sink.
        window: the number of positions that a row sees, its own included; None for all of them.

    Returns:
        [1, H, T, D].
    """
    if window is not None and window >= max(s.position + s.end - s.start for s in segments):
        window = None  # every sequence is shorter than the window
    fused = query.device.type == "cpu" and query.dtype == torch.float32 and query.shape[-1] == value.shape[-1]
    if fused and window is None:
        return _MergedAttention.apply(query, key, value, sinks, tuple(segments), scale)
    return gathered_attention(query, key, value, segments, scale, sinks=sinks, window=window)


def gathered_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Sequence[Segment],
    scale: float,
    *,
    sinks: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Compute `tree_attention` by attention of each segment to its gathered keys.

    With a window or sinks a segment is computed in blocks of rows, so that neither the mask nor the
    scores exist for all of its rows at once.
    """
    outputs: list[Tensor] = []
    above: list[Segment] = []
    for segment in segments:
        above = [s for s in above if s.subtree_end > segment.start]
        rows = [slice(s.start, s.end) for s in (*above, segment)]
        keys = torch.cat([key[:, :, r] for r in rows], 2)  # entry j is at position j
        values = torch.cat([value[:, :, r] for r in rows], 2)
        own = query[:, :, segment.start : segment.end]
        if window is None and sinks is None:
            outputs.append(_causal_attention(own, keys, values, scale))
        else:
            for offset in range(0, own.shape[2], ROWS):
                block = own[:, :, offset : offset + ROWS]
                last = segment.position + offset + block.shape[2]
                first = 0 if window is None else max(0, segment.position + offset - window + 1)
                seen = slice(first, last)
                outputs.append(
                    _windowed_attention(block, keys[:, :, seen], values[:, :, seen], scale, sinks, window)
                )
        above.append(segment)
    return torch.cat(outputs, 2)


def _causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Compute attention of the last rows of a sequence to all of it [1, H, rows, D]."""
    rows, seen = query.shape[2], key.shape[2]
    mask = None
    if seen > rows:
        mask = torch.ones(rows, seen, dtype=torch.bool, device=query.device).tril(seen - rows)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _windowed_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None, window: int | None
) -> Tensor:
    """Compute attention of the last rows of a sequence to the part of it that each row sees, with sinks [1,
    H, rows, D]."""
    rows, seen = query.shape[2], key.shape[2]
    visible = torch.ones(rows, seen, dtype=torch.bool, device=query.device).tril(seen - rows)
    if window is not None:
        visible = visible.triu(seen - rows - window + 1)
    if sinks is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    repeats = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
    precise = torch.promote_types(query.dtype, torch.float32)
    scores = (query.to(precise) @ key.to(precise).transpose(2, 3)) * scale
    scores = scores.masked_fill(~visible, -torch.inf)
    column = sinks.to(precise)[None, :, None, None].expand(1, -1, rows, 1)
    shares = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return shares.to(value.dtype) @ value


class _MergedAttention(torch.autograd.Function):
    """Runs one fused call per block of keys and merges the outputs of the blocks through their log-sum-exp.

    The kernel's backward pass needs only the merged output and log-sum-exp: with them each block recomputes
    its true probabilities, so the blocks' gradients add up. A sink is an additional block with a single key
    whose value is zero: its probability p = exp(s - lse) gives ∂/∂s = -p (grad · out).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        segments: tuple[Segment, ...],
        scale: float,
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
        if sinks is not None:
            column = sinks.to(lse.dtype)[None, :, None]
            out *= torch.sigmoid(lse - column)[..., None]
            lse = torch.logaddexp(lse, column)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.segments, ctx.scale = segments, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, sinks, out, lse = ctx.saved_tensors
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
        d_sinks = None
        if sinks is not None:
            share = torch.exp(sinks.to(lse.dtype)[None, :, None] - lse)
            d_sinks = -(share * (grad * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
        return *totals, d_sinks, None, None


class _FusedShapes(torch.autograd.Function):
    """The memory of a fused attention kernel, without its values: it saves its inputs, its output and the
    log-sum-exp [1, H, T] in float32, and creates the gradients of its inputs."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = query.transpose(1, 2)  # the layout in memory of the fused kernels' output
        out = rows.new_zeros(*rows.shape[:3], value.shape[3]).transpose(1, 2)
        lse = query.new_zeros(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    segments: AttentionPlan | AttentionProbe | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Implement the attention function of transformers; returns [1, T, H, D]. Arguments that would change the
    result are refused."""
    if segments is None:
        raise TrainingError(
            f"{type(module).__name__} receives no keyword arguments from its model, so it does not receive "
            "the plan of the packed rows; choose a model of another family"
        )
    _check_call(module, query, key, value, attention_mask, s_aux, kwargs)
    if isinstance(segments, AttentionProbe):
        segments.calls.append(AttentionCall(module, query.shape[1], key.shape[1], sliding_window or None))
        segments.cache_bytes.append(key.nbytes + value.nbytes)
        return _FusedShapes.apply(query, key, value).transpose(1, 2).contiguous(), None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks, window = s_aux, sliding_window or None
    if segments.group is not None:
        query, key, value = rows_to_heads(query, key, value, segments.group)
        sinks = None if sinks is None else own_heads(sinks, segments.group)
    if segments.gpu is not None:
        out = gpu_attention(query, key, value, segments.gpu, scale, sinks=sinks, window=window)
    else:
        out = tree_attention(query, key, value, segments.segments, scale, sinks=sinks, window=window)
    if segments.group is not None:
        out = heads_to_rows(out, segments.group)
    # some model families require a contiguous result, of which they take a view
    return out.transpose(1, 2).contiguous(), None


def _check_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    sinks: Tensor | None,
    others: Mapping[str, Any],
) -> None:
    """Check that packed attention supports the call.

    Raises:
        TrainingError: an argument is not supported, or there is not exactly one key per row.
    """
    name = type(module).__name__
    refused = [key for key, given in others.items() if key not in HARMLESS and not _is_unset(key, given)]
    if attention_mask is not None:
        refused.append("attention_mask")
    if refused:
        raise TrainingError(
            f"{name} passes {', '.join(sorted(refused))} to attention, which packed attention does not "
            "support: the log-probabilities would not be the model's; choose a model without it"
        )
    if query.shape[0] != 1 or key.shape[2] != query.shape[2] or value.shape[2] != key.shape[2]:
        raise TrainingError(
            f"{name} attends from {tuple(query.shape)} to {tuple(key.shape)}: packed attention needs one key "
            "per row (compressed or cached keys are not supported)"
        )
    if sinks is not None and sinks.shape != (query.shape[1],):
        raise TrainingError(
            f"{name} passes attention sinks (s_aux) of shape {tuple(sinks.shape)}, expected one per head, "
            f"({query.shape[1]},)"
        )


def _is_unset(name: str, given: object) -> bool:
    """Whether an argument requests nothing except causal attention over all rows."""
    if name == "is_causal":
        return given is None or given is True
    return given is None or given is False or (name == "dropout" and given == 0.0)
