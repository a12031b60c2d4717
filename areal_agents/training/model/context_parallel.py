"""Computes one micro-batch on several ranks: each has some of the rows, and in attention some of the heads.

Ulysses (Jacobs et al., arXiv 2309.14509, section 3): before attention an all-to-all exchanges rows for heads,
so that every rank sees all rows of its heads and any attention kernel can be used; after attention a second
all-to-all exchanges them back. Everything else is computed row by row. A rank's loss is that of the trained
tokens that its rows predict, so the sum over ranks is the loss of the micro-batch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal_agents.algorithms.packing.microbatches import MicroBatch
from areal_agents.algorithms.packing.token_tree import Segment


def local_share(
    batch: MicroBatch, context_rank: int, context_count: int, group: dist.ProcessGroup | None
) -> MicroBatch:
    """Select the rows of one rank and the trained tokens that they predict; the segments stay those of all
    rows.

    All ranks have the same number of rows: the last ranks get padding tokens that train nothing, in a
    separate document.

    Args:
        group: the process group of the `context_count` ranks; None if there is only one rank.
    """
    if context_count == 1:
        return batch
    if group is None or dist.get_world_size(group) != context_count:
        raise ValueError(
            f"context_parallel: expected the process group of {context_count} ranks, got {group}"
        )
    padded = _pad(batch, -len(batch.input_ids) % context_count)
    rows = _rows(batch, context_rank, context_count)
    mine = predicted_here(batch, context_rank, context_count)
    return replace(
        padded,
        input_ids=padded.input_ids[rows],
        position_ids=padded.position_ids[rows],
        predictor_rows=batch.predictor_rows[mine] - rows.start,
        target_ids=batch.target_ids[mine],
        trained=batch.trained[mine],
        behavior_logprobs=batch.behavior_logprobs[mine],
        temperatures=batch.temperatures[mine],
        advantages=batch.advantages[mine],
        loss_weights=batch.loss_weights[mine],
        versions=batch.versions[mine],
        sample_index=batch.sample_index[mine],
        turn_ids=batch.turn_ids[mine],
        observed=None if batch.observed is None else batch.observed[mine],
        context_group=group,
    )


def predicted_here(batch: MicroBatch, context_rank: int, context_count: int) -> Tensor:
    """Return [N] bool, the scored tokens that the rows of one rank predict."""
    rows = _rows(batch, context_rank, context_count)
    return (batch.predictor_rows >= rows.start) & (batch.predictor_rows < rows.stop)


def _rows(batch: MicroBatch, context_rank: int, context_count: int) -> slice:
    """Return the rows of one rank; the last ones may be padding."""
    size = -(-len(batch.input_ids) // context_count)
    return slice(context_rank * size, (context_rank + 1) * size)


def _pad(batch: MicroBatch, count: int) -> MicroBatch:
    """The batch with one more document of `count` tokens at its end."""
    if count == 0:
        return batch
    rows = len(batch.input_ids)
    return replace(
        batch,
        input_ids=torch.cat([batch.input_ids, batch.input_ids[:1].expand(count)]),
        position_ids=torch.cat([batch.position_ids, torch.arange(count, device=batch.position_ids.device)]),
        segments=(*batch.segments, Segment(rows, rows + count, rows + count, 0)),
    )


def check_heads(heads: int, kv_heads: int, context_count: int) -> None:
    """Check that a model's heads can be divided over the ranks of a context.

    Raises:
        ValueError: they cannot.
    """
    repeats = context_count // math.gcd(kv_heads, context_count)
    if heads % context_count or heads % (kv_heads * repeats):
        raise ValueError(
            f"context_parallel: {context_count} ranks cannot share {heads} query heads and "
            f"{kv_heads} key heads; "
            f"expected a divisor of {heads}"
        )


def rows_to_heads(
    query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange this rank's rows of all heads for all rows of this rank's heads.

    Key and value heads are repeated if there are fewer of them than ranks.

    Args:
        query: [1, H, T/n, D]; key, value: [1, KV, T/n, D].

    Returns:
        Query [1, H/n, T, D]; key, value [1, KV'/n, T, D], KV' the least common multiple of KV and n.
    """
    count = dist.get_world_size(group)
    check_heads(query.shape[1], key.shape[1], count)
    repeats = count // math.gcd(key.shape[1], count)
    if repeats > 1:
        key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
    gathered = [_gather_rows(tensor[0], count, group) for tensor in (query, key, value)]
    return gathered[0][None], gathered[1][None], gathered[2][None]


def own_heads(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Select the entries [H/n] of this rank's heads from an array [H] with one entry per head, in the order
    of `rows_to_heads`."""
    size = len(tensor) // dist.get_world_size(group)
    start = dist.get_rank(group) * size
    return tensor[start : start + size]


def _gather_rows(tensor: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
    heads, rows, width = tensor.shape
    sent = tensor.reshape(count, heads // count, rows, width)  # the heads of a rank are adjacent
    received = exchange(sent, group)  # [n, H/n, T/n, D], by the rank that owns the rows
    return received.transpose(0, 1).reshape(heads // count, count * rows, width)


def heads_to_rows(output: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange all rows of this rank's heads [1, H/n, T, D] for this rank's rows of all heads [1, H, T/n,
    D]."""
    count = dist.get_world_size(group)
    _, heads, rows, width = output.shape
    sent = output[0].reshape(heads, count, rows // count, width).transpose(0, 1)
    return exchange(sent, group).reshape(1, count * heads, rows // count, width)


def exchange(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-to-all: entry r of the result is the entry that rank r holds for this rank. Differentiable.

    Args:
        tensor: [n, …], with the same shape on all n ranks.
    """
    exchanged: Tensor = _AllToAll.apply(tensor, group)
    return exchanged


class _AllToAll(torch.autograd.Function):
    """An all-to-all is its own transpose, so the gradients are exchanged in the same way as the values."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(tensor, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _all_to_all(grads[0], ctx.group), None


def _all_to_all(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    sent = tensor.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received
