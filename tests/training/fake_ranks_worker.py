"""Prints how much of the gradient one of many simulated ranks holds unsharded.

Run as a program: `fake_ranks_worker.py MODEL RANKS REPLICAS`. The process group is fake, the weights are on
the meta device, and tensors are fake, so a model of any size takes seconds and no memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from training_support import make_sample
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from areal_agents.algorithms.packing.microbatches import MicroBatch, pack
from areal_agents.training.distributed import Ranks
from areal_agents.training.model import attention
from areal_agents.training.model.experts import has_experts, prepare_replay
from areal_agents.training.model.model import Policy
from areal_agents.training.model.sharding import blocks, drop_gradients, shard
from areal_agents.training.step.learner import Learner


def qwen3_8b(layers: int = 36) -> Qwen3Config:
    return Qwen3Config(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=False,
    )  # fmt: skip


MODELS: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3-8b": qwen3_8b,
    "4 blocks of qwen3-8b": lambda: qwen3_8b(4),
    "tiny": lambda: Qwen3Config(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=512, tie_word_embeddings=False,
    ),
    "qwen3-30b-a3b": lambda: Qwen3MoeConfig(
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_experts=128,
        num_experts_per_tok=8, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4,
        head_dim=128, vocab_size=151936, tie_word_embeddings=False,
    ),
}  # fmt: skip


def build(name: str, count: int, replicas: int) -> tuple[Policy, Ranks]:
    """Return a policy on the meta device, sharded as in a run, and its ranks."""
    names = ("replicate", "shard")
    mesh = (
        init_device_mesh("cpu", (count,))
        if replicas == 1
        else init_device_mesh("cpu", (replicas, count // replicas), mesh_dim_names=names)
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            MODELS[name](), dtype=torch.float32, attn_implementation=attention.NAME
        )
        policy = Policy(model)
    if has_experts(model):
        prepare_replay(model)
    group = Ranks(0, count, torch.device("cpu"), mesh, data_rank=0, data_count=count)
    shard(policy, model, group, dtype=torch.bfloat16)
    return policy, group


def unsharded_gradient(policy: nn.Module) -> int:
    """Return the number of bytes of unsharded gradients on this rank."""
    held = 0
    for module in policy.modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        for parameter in group.fsdp_params if group is not None else ():
            whole = parameter.unsharded_accumulated_grad
            if whole is None and hasattr(parameter, "_unsharded_param"):
                whole = parameter._unsharded_param.grad
            held += 0 if whole is None else whole.numel() * whole.element_size()
    return held


def kept_gradient(policy: nn.Module) -> int:
    """Return the number of bytes of gradients on this rank, with shards not yet summed over the replicas."""
    shards = [p.grad.to_local() for p in policy.parameters() if p.grad is not None]
    for module in policy.modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        if group is not None and group._partial_reduce_output is not None:
            shards.append(group._partial_reduce_output)
    return unsharded_gradient(policy) + sum(shard.nbytes for shard in shards)


def micro_batch(mode: FakeTensorMode) -> MicroBatch:
    sample = make_sample(list(range(300)), range(100, 300), rng=np.random.default_rng(0))
    (packed,) = pack([sample], token_budget=512)
    values = {field.name: getattr(packed, field.name) for field in fields(packed)}
    return replace(
        packed, **{name: mode.from_tensor(v) for name, v in values.items() if isinstance(v, Tensor)}
    )


def main(name: str, count: int, replicas: int) -> dict[str, int | list[int]]:
    """Process a micro-batch, drop its gradient as after a stop, and process a last micro-batch."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    attention.register()
    policy, group = build(name, count, replicas)
    within: list[int] = []
    after: list[int] = []
    kept: list[int] = []
    for block in blocks(policy.model):
        block.register_full_backward_pre_hook(lambda *_: within.append(unsharded_gradient(policy)))
    head = policy.model.get_output_embeddings().weight
    block_bytes = sum(4 * p.numel() for p in blocks(policy.model)[0].parameters())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        policy.to_empty(device="cpu")
        learner = Learner(policy, torch.optim.AdamW(policy.parameters()), group.shards)
        batch = micro_batch(mode)
        for last in (False, True):
            logprobs, *_ = policy(batch)
            learner.backward(logprobs.sum(), last=last)
            after.append(unsharded_gradient(policy))
            kept.append(kept_gradient(policy))
            if not last:
                drop_gradients(policy)
                dropped = kept_gradient(policy)
    shards = sum(p.grad.to_local().numel() for p in policy.parameters() if p.grad is not None)
    return {
        "block": block_bytes,
        "head": 4 * head.numel(),
        "model": sum(4 * p.numel() for p in policy.parameters()),
        "within": max(within),
        "after": after,
        "shards": 4 * shards,
        "kept": kept,
        "dropped": dropped,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
