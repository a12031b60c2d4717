"""Divides a model without weights into FSDP2 units, then allocates float32 shards on every rank.

The order is fixed: adapters, activation checkpointing, units, memory, buffers, weights. Computation uses the
compute type, gradients are reduced in float32, and buffers (the rotary frequencies) stay in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from areal_agents.errors import TrainingError
from areal_agents.training.config import Reshard
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.experts import router_of
from areal_agents.training.model.images import vision_blocks

Checkpointing = Literal["off", "full"] | int
# Where shards are: on the device; in host memory until `Parking` fetches them; or in host memory for good,
# from where FSDP copies those of a block when it gathers them.
Placement = Literal["device", "parked", "offloaded"]


def blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder's blocks, first to last."""
    return list(model.get_decoder().layers)


def checkpoint_blocks(model: PreTrainedModel, setting: Checkpointing) -> None:
    """Recompute blocks in the backward pass: all of them, or every n-th, beginning with the first.

    Raises:
        ValueError: the number is below 1.
    """
    if setting == "off":
        return
    every = 1 if setting == "full" else setting
    if every < 1:
        raise ValueError(f"activation_checkpointing: expected off, full or a number ≥ 1, got {setting}")
    for block in blocks(model)[::every]:
        # nothing in a block is random, because dropout is off
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


def shard(
    root: nn.Module,
    model: PreTrainedModel,
    ranks: Ranks,
    *,
    dtype: torch.dtype,
    router_dtype: torch.dtype | None = None,
    placement: Placement = "device",
    reshard: Reshard = "block",
) -> None:
    """Divide `root`, which contains `model` and calls its head, into FSDP units, in place.

    Each block is a unit, and so is a router of experts within it that computes in a type of its own
    (`router_dtype`; None: in the type of the rest). The embedding is a unit unless it is tied to the head,
    since tied weights must be in the same unit. The root contains the rest: the final norm and the head,
    whose matrix is used once per chunk, and again in the backward pass.
    The head stays gathered from the forward pass to the end of the backward pass. With `reshard: step` all
    units stay gathered through the micro-batches of an optimizer step.
    """
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    routing = MixedPrecisionPolicy(param_dtype=router_dtype, reduce_dtype=torch.float32)
    unit = partial(
        fully_shard,
        mesh=ranks.mesh,
        mp_policy=precision,
        offload_policy=offload_policy(ranks, placement),
        reshard_after_forward=reshard == "block",
    )
    for block in blocks(model):
        router = router_of(block)
        if router is not None and router_dtype not in (None, dtype):
            unit(router, mp_policy=routing)
        unit(block)
    for block in vision_blocks(model):
        unit(block)
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    if head is None or head.weight is not embedding.weight:
        unit(embedding)
    unit(root, reshard_after_forward=False)


def offload_policy(ranks: Ranks, placement: Placement) -> OffloadPolicy:
    """FSDP's policy for shards of this placement."""
    if placement == "offloaded":
        return CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda")
    return OffloadPolicy()


def materialize(
    root: nn.Module, model: PreTrainedModel, device: torch.device, placement: Placement = "device"
) -> None:
    """Allocate the shards, and compute the buffers, which no file contains; these are on the device always.

    Raises:
        TrainingError: the model's own initialisation does not set a buffer.
    """
    root.to_empty(device=device if placement == "device" else "cpu")
    with torch.no_grad():
        for _, buffer, _, _ in _buffers(model):
            buffer.fill_(_unset(buffer.dtype))
        for _, _, module, owner in _buffers(model):
            owner._init_weights(module)
    saved = model.state_dict().keys()
    for name, buffer, _, _ in _buffers(model):
        unset = buffer.isnan() if buffer.is_floating_point() else buffer == _unset(buffer.dtype)
        if name not in saved and buffer.dtype != torch.bool and unset.any():
            raise TrainingError(f"{type(model).__name__}: cannot rebuild the buffer {name}")
    for module in root.modules():
        for name, held in module._buffers.items():
            module._buffers[name] = None if held is None else held.to(device)


def drop_gradients(root: nn.Module) -> None:
    """Free all gradients, those included that FSDP holds between the micro-batches of a step: whole ones, and
    shards that the copies of the weights (HSDP) have not added up."""
    root.zero_grad()
    for module in root.modules():
        if not isinstance(module, FSDPModule):
            continue
        group = module._get_fsdp_state()._fsdp_param_group
        if group is None:
            continue
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):  # it has been gathered before
                parameter._unsharded_param.grad = None


def local_rows(tensor: torch.Tensor) -> slice:
    """Return the rows of the whole tensor that this rank holds; FSDP shards the first dimension, over one
    mesh axis."""
    size, start = len(tensor) if tensor.ndim else 1, 0
    if isinstance(tensor, DTensor):
        for axis, placement in enumerate(tensor.placements):
            if isinstance(placement, Shard):
                assert placement.dim == 0, placement
                mesh = tensor.device_mesh
                size, start = Shard.local_shard_size_and_offset(
                    size, mesh.size(axis), mesh.get_local_rank(axis)
                )
    return slice(start, start + size)


def _unset(dtype: torch.dtype) -> float | int | bool:
    """Return the placeholder value of a buffer that has not been computed."""
    if dtype.is_floating_point:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def _buffers(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor, nn.Module, PreTrainedModel]]:
    """Yield every buffer: its name, tensor, module, and the innermost model that contains the module."""
    owners: dict[str, PreTrainedModel] = {}
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            owners[path] = module
        else:
            owners[path] = owners[path.rpartition(".")[0]]
        for name, buffer in module.named_buffers(recurse=False):
            yield f"{path}.{name}" if path else name, buffer, module, owners[path]
