"""Counts what one rank holds of a sharded model besides activations: weights, gradients, optimizer, buffers.

The model is divided by the same code that divides it for training, on the meta device. The mesh may be that
of a real process group or of a fake one, which has any number of ranks in one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from areal_agents.training.config import TrainerConfig
from areal_agents.training.distributed import Ranks
from areal_agents.training.memory.allocations import Allocations
from areal_agents.training.model.images import vision_blocks
from areal_agents.training.model.model import ModelOptions
from areal_agents.training.model.nf4 import QuantizedWeight
from areal_agents.training.model.sharding import blocks, shard
from areal_agents.training.step.optimizer import make_optimizer

REDUCED = 4  # bytes of a gradient element while it is reduced, and afterwards


@dataclass(frozen=True, slots=True)
class States:
    """Bytes on one rank.

    Attributes:
        trained: float32 masters. frozen: weights that are not trained.
        gradients: the rank's shard of the gradients.
        optimizer: the optimizer's state. step: the temporary memory of an optimizer step.
        step_by_block: both for the largest part of the model, of those that an optimizer whose state is in
            host memory steps one after the other.
        gathered: whole weights during a pass: those of the root unit, which stay, and of the largest block
            three times: it computes, the next one is received in one buffer and copied from it. With
            `reshard: step` all weights, and those buffers.
        unsharded: whole gradients during a pass: that of the root unit, which is reduced last, and of the
            largest block, in the compute type and twice in float32, because a block's gradient may still be
            reduced when that of the next one is copied.
        ending: whole weights and gradients at the end of a pass, when no activations are left: those of the
            root unit and of the embedding; with `reshard: step` all weights.
        copied: the largest shard of a parameter, which offloaded weights have on the device while it is
            converted to the compute type.
        model: all weights, whole, in elements.
    """

    trained: int
    frozen: int
    gradients: int
    optimizer: int
    step: int
    step_by_block: int
    gathered: int
    unsharded: int
    ending: int
    copied: int
    model: int


@contextmanager
def fake_ranks(count: int, *, replicas: int = 1, context: int = 1) -> Iterator[Ranks]:
    """Be the first of `count` ranks that do not exist. No process group may exist in this process."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        shape = (count,) if replicas == 1 else (replicas, count // replicas)
        names = None if replicas == 1 else ("replicate", "shard")
        yield Ranks(
            rank=0,
            count=count,
            device=torch.device("cpu"),
            mesh=init_device_mesh("cpu", shape, mesh_dim_names=names),
            data_rank=0,
            data_count=count // context,
            context_count=context,
        )
    finally:
        dist.destroy_process_group()


def count_states(
    module: nn.Module,
    model: PreTrainedModel,
    ranks: Ranks,
    *,
    options: ModelOptions,
    optimized_by: TrainerConfig | None,
) -> States:
    """Shard a module without weights in place, and count what one rank holds.

    Args:
        module: the root, which contains `model`; on the meta device.
        options: those of the model, with the compute type.
        optimized_by: the settings of the optimizer; None for a model without one.
    """
    whole = sum(_weights(p) for p in module.parameters())
    per_byte, step_per_byte = (0.0, 0.0) if optimized_by is None else _optimizer(module, optimized_by)
    shard(
        module,
        model,
        ranks,
        dtype=options.dtype,
        router_dtype=options.router_dtype,
        reshard=options.reshard,
    )
    parameters = list(module.parameters())
    trained = sum(_local(p).nbytes for p in parameters if p.requires_grad)
    buffers = sum(buffer.nbytes for buffer in module.buffers())
    root, *units = _units(module)
    inner = {id(p) for block in [*blocks(model), *vision_blocks(model)] for p in block.parameters()}
    ends = [root, *(unit for unit in units if not inner.issuperset(map(id, unit)))]
    blocks_of = [unit for unit in units if inner.issuperset(map(id, unit))]
    width = options.dtype.itemsize
    by_block, whole_bytes = options.reshard == "block", _bytes(parameters, width)
    largest = max((_bytes(unit, width) for unit in blocks_of), default=0)
    largest_trained = max((_elements(unit, trained=True) for unit in blocks_of), default=0)
    largest_part = max(map(_trained_bytes, [sum(ends, []), *blocks_of]))
    reduced = sum(_local(p).numel() for p in parameters if p.requires_grad) * REDUCED
    return States(
        trained=trained,
        frozen=sum(_local(p).nbytes for p in parameters if not p.requires_grad) + buffers,
        gradients=reduced,
        optimizer=round(trained * per_byte),
        step=round(trained * step_per_byte),
        step_by_block=round(largest_part * (per_byte + step_per_byte)),
        gathered=_bytes(root, width) + 3 * largest if by_block else whole_bytes + 2 * largest,
        unsharded=_elements(root, trained=True) * width + largest_trained * (width + 2 * REDUCED),
        ending=(sum(_elements(unit) for unit in ends) * width if by_block else whole_bytes)
        + sum(_elements(unit, trained=True) for unit in ends) * (width + REDUCED),
        copied=max((_local(p).nbytes for p in parameters), default=0),
        model=whole,
    )


def _units(root: nn.Module) -> list[list[nn.Parameter]]:
    """The parameters of each FSDP unit, without those of the units inside it; the root's first."""
    return [list(_own_parameters(module)) for module in root.modules() if isinstance(module, FSDPModule)]


def _own_parameters(unit: nn.Module) -> Iterator[nn.Parameter]:
    yield from unit.parameters(recurse=False)
    for child in unit.children():
        if not isinstance(child, FSDPModule):
            yield from _own_parameters(child)


def _elements(unit: list[nn.Parameter], *, trained: bool = False) -> int:
    return sum({id(p): p.numel() for p in unit if p.requires_grad or not trained}.values())


def _bytes(unit: list[nn.Parameter], width: int) -> int:
    """Bytes of the gathered weights, with `width` bytes for each; packed ones are gathered as they are."""
    return sum({id(p): p.numel() * (width if p.is_floating_point() else 1) for p in unit}.values())


def _weights(parameter: nn.Parameter) -> int:
    """The number of weights in a parameter, which may be packed in four bits."""
    return parameter.numel() if parameter.is_floating_point() else QuantizedWeight(parameter).shape.numel()


def _trained_bytes(unit: list[nn.Parameter]) -> int:
    return sum({id(p): _local(p).nbytes for p in unit if p.requires_grad}.values())


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _optimizer(module: nn.Module, config: TrainerConfig) -> tuple[float, float]:
    """The optimizer's state, and its temporary memory in a step, in bytes per byte of the masters.

    Two steps are taken without values: the first creates the state.
    """
    optimizer = make_optimizer(module, config.model_copy(update={"offload": "none"}))
    for group in optimizer.param_groups:
        if "foreach" in group:
            # One weight after the other, as on a CPU; the fused step of a GPU needs no temporary memory.
            group["foreach"] = False
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    with Allocations() as memory:
        optimizer.step()
    state = sum(
        value.nbytes
        for states in optimizer.state.values()
        for value in states.values()
        if isinstance(value, Tensor) and value.ndim  # not the counters
    )
    masters = sum(p.nbytes for p in parameters)
    for parameter in parameters:
        parameter.grad = None
    return state / masters, memory.peak / masters
