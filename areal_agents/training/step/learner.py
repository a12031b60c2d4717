"""A trained module with its optimizer, its learning rate schedule, and the norm of each gradient.

A step whose gradient is not finite is skipped and counted, for policy and critic independently. The learning
rate is a function of the step number, so a resumed run continues its schedule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from areal_agents.training.config import Reshard, TrainerConfig


@dataclass(slots=True)
class Learner:
    """A module and its optimizer.

    Attributes:
        shards: the number of ranks over which each copy of the weights is divided.
        on_host: whether FSDP moves the gradient to host memory (`trainer.offload: all`).
        reshard: that of the module's options.
        norms: the norm of the gradient at each step, None where skipped.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    shards: int
    on_host: bool = False
    reshard: Reshard = "block"
    norms: list[float | None] = field(default_factory=list)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of a micro-batch, of which every rank keeps only its shard. Collective.

        A whole gradient exists for one block at a time. Copies of the weights (HSDP) add up their shards
        after the `last` micro-batch of an optimizer step; in host memory, after each one, because FSDP keeps
        what is not added up on the device. With `reshard: step` the weights that the forward pass gathered
        stay until the `last` one.
        """
        module = cast(FSDPModule, self.module)
        if self.reshard == "step":
            module.set_reshard_after_backward(last)
        if self.on_host:
            pass
        elif self.shards == 1:
            module.set_requires_gradient_sync(last)  # the shard is the whole gradient: nothing to scatter
        else:
            module.set_requires_all_reduce(last)
        loss.backward()

    def step(self, grad_clip: float) -> None:
        """Take an optimizer step with the gradient clipped to a norm of at most `grad_clip`, then clear the
        gradient.

        If the norm is not finite, the weights stay unchanged.
        """
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        norm = _norm(gradients)
        finite = math.isfinite(norm)
        if finite:
            _scale(gradients, min(1.0, grad_clip / (norm + 1e-6)))
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.norms.append(norm if finite else None)

    @property
    def grad_norm(self) -> float:
        """Mean gradient norm over the steps that were taken."""
        taken = [norm for norm in self.norms if norm is not None]
        return sum(taken) / len(taken) if taken else math.nan

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped because the gradient was not finite."""
        return self.norms.count(None)


def _norm(gradients: Sequence[Tensor]) -> float:
    """The norm of all gradients, over all ranks. Collective.

    The shards may be in host memory, which a device's collectives cannot reach, so only a number goes through
    the device.
    """
    squares = torch.nn.utils.get_total_norm([_local(g) for g in gradients]).double().square()
    mesh = next((g.device_mesh for g in gradients if isinstance(g, DTensor)), None)
    if mesh is not None:
        squares = squares.to(mesh.device_type)
        dist.all_reduce(squares, group=mesh.get_group(mesh.ndim - 1))  # the axis over which they are sharded
    return math.sqrt(float(squares))


def _scale(gradients: Sequence[Tensor], factor: float) -> None:
    if factor < 1 and gradients:
        torch._foreach_mul_([_local(gradient) for gradient in gradients], factor)


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def rate_factor(step: int, config: TrainerConfig) -> float:
    """The learning rate of batch `step`, counted from 0, as a fraction of the peak rate.

    Linear warm-up, then the schedule down to `min_lr_ratio` at the last batch.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    last = max(1, config.steps - 1 - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / last)
    left = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
    ratio = 1.0 if config.schedule == "constant" else config.min_lr_ratio
    return ratio + (1 - ratio) * left[config.schedule]


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
