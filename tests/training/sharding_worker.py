"""The program of the two ranks in test_sharding, which spawned processes import by name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from model_support import samples, set_adapters
from torch import Tensor
from torch.distributed.tensor import DTensor
from vision_support import samples_with_images

from areal_agents.algorithms.packing.microbatches import pack
from areal_agents.core.sample import TrainingSample
from areal_agents.errors import TrainingError
from areal_agents.training.distributed import Ranks, ranks
from areal_agents.training.model.loading import load_weights
from areal_agents.training.model.lora import LoraOptions
from areal_agents.training.model.model import ModelOptions, Policy, load_policy

OPTIONS = {
    "plain": ModelOptions(),
    "checkpointed": ModelOptions(activation_checkpointing="full"),
    "every second block": ModelOptions(activation_checkpointing=2),
    "lora": ModelOptions(lora=LoraOptions(rank=3), activation_checkpointing="full"),
}

HALF = ModelOptions(dtype=torch.bfloat16, activation_checkpointing="full")

NF4 = ModelOptions(lora=LoraOptions(rank=3, base="nf4"), activation_checkpointing="full")


def gradients(
    policy: Policy, group: Ranks, batch: Sequence[TrainingSample] | None = None
) -> dict[str, Tensor]:
    """Return the gradient of Σ advantage · logprob over all samples, of which this rank processes a share."""
    batches = pack(batch or samples(), token_budget=250, ranks=group.data_count)
    for batch in batches[group.data_rank :: group.data_count]:
        logprobs, *_ = policy(batch)
        ((logprobs * batch.advantages).sum() * group.count).backward()
    found = {n: p.grad.full_tensor() for n, p in policy.named_parameters() if isinstance(p.grad, DTensor)}
    policy.zero_grad()
    return found


def main(rank: int, port: int, folders: dict[str, Path], out: Path) -> None:
    """Load every kind of model in every kind of mesh, and compute its gradients."""
    torch.set_num_threads(1)
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2, "RANK": rank}
    os.environ.update({name: str(value) for name, value in environment.items()})
    results: dict[str, Any] = {}
    with ranks("cpu") as group:
        for name, options in OPTIONS.items():
            torch.manual_seed(5 + rank)  # the first rank's seed determines the initial adapters
            policy = load_policy(folders["untied"], group, options=options)
            results[name] = gradients(policy, group)
        policy = load_policy(folders["tied"], group)
        results["tied"] = gradients(policy, group)
        results["whole"] = policy.full_state_dict(keep=group.is_first)
        results["local"] = sum(p.to_local().numel() for p in policy.parameters())
        results["read"] = load_weights(policy.model, folders["tied"])
        policy = load_policy(folders["experts"], group)
        results["experts"] = gradients(policy, group)
        results["experts read"] = load_weights(policy.model, folders["experts"])
        results["experts whole"] = policy.full_state_dict()
        policy = load_policy(folders["experts"], group, options=HALF)
        results["half"] = gradients(policy, group)
        policy = load_policy(folders["wide"], group, options=NF4)
        set_adapters(policy)
        results["nf4"] = gradients(policy, group)
        results["nf4 whole"] = policy.full_state_dict()
        results["nf4 adapter"] = policy.adapter_state_dict()
        results["nf4 local"] = sum(p.to_local().nbytes for p in policy.parameters() if not p.requires_grad)
        policy = load_policy(folders["vision"], group)
        # only one rank has an image, but both must take part in the collectives
        results["vision"] = gradients(policy, group, samples_with_images()[::5])
        with ranks("cpu", replicas=2) as replicated:
            policy = load_policy(folders["tied"], replicated)
            results["replicated"] = gradients(policy, replicated)
            results["replicated read"] = load_weights(policy.model, folders["tied"])
        with ranks("cpu", context=2) as paired:
            results["paired"] = (
                paired.data_rank, paired.data_count, paired.context_rank, paired.context_count,
                torch.distributed.get_world_size(paired.context_group),
            )  # fmt: skip
        errors = []
        for replicas, folder in ((3, "tied"), (1, "broken" if rank else "tied")):
            try:
                with ranks("cpu", replicas=replicas) as joined:
                    load_policy(folders[folder], joined)
            except (TrainingError, ValueError) as error:
                errors.append(f"{type(error).__name__}: {error}")
        results["errors"] = errors
        torch.save(results, out / f"{rank}.pt")
