"""Runs forward and backward passes of the GPU's code path on meta tensors: kernels accept their arguments,
and each trained weight gets a gradient of its shape and type. Prints one line for each pass.

Autograd's engine needs streams for fake CUDA tensors, but not for meta tensors. Kernels are chosen as for a
GPU. `fake_gpu_worker.py` checks that no tensor is left on the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from areal_agents.algorithms.packing.microbatches import MicroBatch, pack
from areal_agents.training.model import attention, attention_gpu
from areal_agents.training.model.lora import LoraOptions
from areal_agents.training.model.model import ModelOptions, Policy, build_without_weights, policy_around
from areal_agents.training.model.sharding import checkpoint_blocks
from benchmarks.trainer.data import Recorder, training_data

META = torch.device("meta")


def as_on_a_gpu() -> list[str]:
    """Choose the kernels of a GPU for meta tensors; return a list to which called kernels add their names."""
    called: list[str] = []
    # use only the part of the compiler that needs no GPU
    flex = attention_gpu.compiled_flex("eager")
    attention_gpu._uncompiled_flex = lambda: flex
    flex_attention._validate_device = lambda query, key, value: None
    for name in ("varlen_attention", "flex_tree_attention"):
        setattr(attention_gpu, name, noted(name, getattr(attention_gpu, name), called))
    plan = attention.plan

    def planned(batch: MicroBatch) -> attention.AttentionPlan:
        return replace(plan(batch), gpu=attention_gpu.gpu_plan(batch.segments, META))

    attention.plan = planned
    return called


def noted(name: str, kernel: Callable[..., Tensor], called: list[str]) -> Callable[..., Tensor]:
    """Return the kernel, wrapped to append its name to `called` at each call."""

    def call(*args: Any, **options: Any) -> Tensor:
        called.append(name)
        return kernel(*args, **options)

    return call


def policy(folder: Path, options: ModelOptions) -> Policy:
    """Return the model on the meta device, with its weights in the type in which FSDP gathers them."""
    module, model = build_without_weights(folder, policy_around(options), options=options)
    checkpoint_blocks(model, options.activation_checkpointing)
    return module.to(torch.bfloat16)


def main(folder: Path, vocab: int) -> None:
    called = as_on_a_gpu()
    samples = training_data([Recorder(vocab, seed=0).answers(0, prompt=64, lengths=[40] * 4)]).samples
    for name, shared, options in (
        ("documents", False, ModelOptions(dtype=torch.bfloat16)),
        ("tree", True, ModelOptions(dtype=torch.bfloat16)),
        ("recomputed", False, ModelOptions(dtype=torch.bfloat16, activation_checkpointing="full")),
        ("adapter", False, ModelOptions(dtype=torch.bfloat16, lora=LoraOptions(rank=4))),
    ):
        model = policy(folder, options)
        (batch,) = pack(samples, token_budget=1024, share_prefixes=shared)
        called.clear()
        out = model(batch.to(META))
        out.logprobs.sum().backward()
        trained = [p for p in model.parameters() if p.requires_grad]
        whole = all(
            p.grad is not None and (p.grad.shape, p.grad.dtype) == (p.shape, p.dtype) for p in trained
        )
        frozen = any(p.grad is not None for p in model.parameters() if not p.requires_grad)
        print(name, sorted(set(called)), len(called), len(trained) > 0 and whole and not frozen, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
