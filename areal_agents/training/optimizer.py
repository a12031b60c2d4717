"""AdamW over the sharded float32 masters, and the learning rate as a function of the step.

The rate depends on nothing but the step, so a resumed run continues its schedule by counting.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from areal_agents.training.config import TrainerConfig


def make_optimizer(policy: nn.Module, config: TrainerConfig) -> torch.optim.AdamW:
    """AdamW; the decay applies to matrices, not to norms and biases."""
    parameters = [p for p in policy.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.adam_epsilon,
    )


def learning_rate(step: int, config: TrainerConfig) -> float:
    """The rate of batch `step`, counted from 0: linear warm-up, then the schedule down to
    `min_lr_ratio · lr` at the last batch."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    last = max(1, config.steps - 1 - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / last)
    left = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
    ratio = 1.0 if config.schedule == "constant" else config.min_lr_ratio
    return config.lr * (ratio + (1 - ratio) * left[config.schedule])


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` for every parameter group from now on."""
    for group in optimizer.param_groups:
        group["lr"] = rate
