"""Moves a policy and its optimizer between host memory and a fake GPU, and prints their devices.

Run as a program: `parking_worker.py MODEL`. Tensors and the process group are fake; see `fake_gpu_worker`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from fake_gpu_worker import CUDA, add_guard
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from areal_agents.training.config import Offload, TrainerConfig
from areal_agents.training.memory.states import fake_ranks
from areal_agents.training.model.lora import LoraOptions
from areal_agents.training.model.model import ModelOptions, Policy, build_without_weights, policy_around
from areal_agents.training.model.run_models import Models
from areal_agents.training.model.sharding import shard
from areal_agents.training.step.optimizer import make_optimizer


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def where(policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, list[str]]:
    """Return the devices of all weights, of the shards that FSDP gathers, and of the moments."""
    gathered = []
    for module in policy.modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        gathered += [p._sharded_param_data for p in group.fsdp_params] if group is not None else []
    moments = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    kinds = {"weights": [*policy.parameters()], "gathered": gathered, "moments": moments}
    return {kind: sorted({local(t).device.type for t in tensors}) for kind, tensors in kinds.items()}


def take_step(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def main(folder: Path, *, lora: bool, offload: Offload) -> list[Any]:
    calls: list[str] = []
    torch.cuda.synchronize = lambda device=None: calls.append("synchronize")  # type: ignore[assignment]
    torch.cuda.empty_cache = lambda: calls.append("empty_cache")  # type: ignore[assignment]
    pinned: list[bool] = []
    empty_like = torch.empty_like

    def allocate(tensor: Tensor, **options: Any) -> Tensor:
        if "pin_memory" in options:
            pinned.append(options["pin_memory"])
        return empty_like(tensor, **options)

    torch.empty_like = allocate  # the next call of `main` wraps this function again
    out: list[Any] = []
    options = ModelOptions(dtype=torch.bfloat16, lora=LoraOptions(rank=2) if lora else None)
    with fake_ranks(2) as group:
        policy, model = build_without_weights(folder, policy_around(options), options=options)
        shard(policy, model, group, dtype=options.dtype, placement="parked")
        with FakeTensorMode(allow_non_fake_inputs=True):
            policy.to_empty(device="cpu")
            optimizer = make_optimizer(policy, TrainerConfig(offload=offload), device=CUDA)
            parking = Models(policy, optimizer, critic=None, reference=None).parking(CUDA)
            parameters: list[nn.Parameter] = [*policy.parameters()]
            out.append(where(policy, optimizer))
            for _ in range(2):
                parking.fetch()
                take_step(optimizer)
                out.append(where(policy, optimizer))
                parking.park()
                out.append(where(policy, optimizer))
            same = all(a is b for a, b in zip(parameters, policy.parameters(), strict=True))
    trained = sum(parameter.requires_grad for parameter in parameters)
    return [out, same, calls, [all(pinned), len(pinned)], [trained, len(parameters) - trained]]


if __name__ == "__main__":
    add_guard()
    cases: list[tuple[bool, Offload]] = [(False, "none"), (True, "none"), (False, "optimizer")]
    print(json.dumps([[way, main(Path(sys.argv[1]), lora=lora, offload=way)] for lora, way in cases]))
