"""The program of the two ranks in test_context_parallel, which spawned processes import by name."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from model_support import samples
from torch import Tensor

from areal_agents.algorithms.packing.microbatches import MicroBatch, pack
from areal_agents.algorithms.packing.token_tree import build_tree
from areal_agents.training.distributed import Ranks, ranks
from areal_agents.training.model.attention import gathered_attention
from areal_agents.training.model.context_parallel import heads_to_rows, local_share, own_heads, rows_to_heads
from areal_agents.training.model.model import load_policy

SCALE = 0.3


def batches() -> list[MicroBatch]:
    """Return micro-batches with shared prefixes, one with an odd number of rows; the last one is a filler."""
    packed = pack(samples(), token_budget=250, ranks=2)
    packed += pack(samples()[:1], token_budget=250, ranks=2)[1:]
    assert any(len(batch.input_ids) % 2 for batch in packed[:-1]) and packed[-1].scored_tokens == 0
    return packed


def policy_results(folder: Path, group: Ranks) -> tuple[list[tuple[Tensor, ...]], dict[str, Tensor]]:
    """Return this rank's sample indices, targets and logprobs for each micro-batch, and the gradient of
    Σ advantage · logprob."""
    policy = load_policy(folder, group)
    entries = []
    for batch in batches():
        mine = local_share(batch, group.context_rank, group.context_count, group.context_group)
        logprobs, *_ = policy(mine)
        # FSDP averages over all ranks, whereas the loss is a sum over them
        ((logprobs * mine.advantages).sum() * group.count).backward()
        entries.append((mine.sample_index, mine.target_ids, logprobs.detach()))
    gradients = {
        name[len("model.") :]: p.grad.full_tensor()
        for name, p in policy.named_parameters()
        if p.grad is not None
    }
    return entries, gradients


def attention_difference(
    heads: int, kv_heads: int, group: dist.ProcessGroup, window: int | None = None
) -> float:
    """Return the largest difference, in outputs and gradients, between attention over all rows on this rank
    and attention over rows that are split between the ranks.

    Every head has an attention sink, whose gradient is the sum over the ranks.
    """
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 9, 11)
    sequences = [np.concatenate([prompt, rng.integers(0, 9, n)]) for n in (5, 8)] + [rng.integers(0, 9, 6)]
    tree = build_tree(sequences, min_saved=1)
    rows = len(tree.token_ids)
    assert rows % 2 == 0
    torch.manual_seed(0)
    whole = [torch.randn(1, count, rows, 8, requires_grad=True) for count in (heads, kv_heads, kv_heads)]
    weights = torch.randn(1, heads, rows, 8)
    sinks = torch.randn(heads, requires_grad=True)
    want = gathered_attention(*whole, tree.segments, SCALE, sinks=sinks, window=window)
    *want_gradients, want_sinks = torch.autograd.grad((want * weights).sum(), [*whole, sinks])

    rank = dist.get_rank(group)
    own = slice(rank * rows // 2, (rank + 1) * rows // 2)
    local = [tensor.detach()[:, :, own].requires_grad_() for tensor in whole]
    query, key, value = rows_to_heads(*local, group)
    out = gathered_attention(
        query, key, value, tree.segments, SCALE, sinks=own_heads(sinks, group), window=window
    )
    got = heads_to_rows(out, group)
    *gradients, sink_gradient = torch.autograd.grad((got * weights[:, :, own]).sum(), [*local, sinks])
    dist.all_reduce(sink_gradient, group=group)
    pairs = [(got, want), *zip(gradients, want_gradients, strict=True)]
    differences = [float((a - b[:, :, own]).abs().max()) for a, b in pairs]
    return max(*differences, float((sink_gradient - want_sinks).abs().max()))


def main(rank: int, port: int, models: list[str], out: str) -> None:
    """Compute logprobs and gradients of micro-batches of which each rank has half of the rows."""
    torch.set_num_threads(1)
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2, "RANK": rank}
    os.environ.update({name: str(value) for name, value in environment.items()})
    with ranks("cpu", context=2) as group:
        assert group.context_group is not None
        differences = [attention_difference(4, kv_heads, group.context_group) for kv_heads in (4, 2, 1)]
        differences.append(attention_difference(4, 2, group.context_group, window=5))
        results = [policy_results(Path(model), group) for model in models]
        torch.save((*results, differences), Path(out) / f"{rank}.pt")
