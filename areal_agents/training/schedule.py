"""The learning rate as a function of the step: a resumed run continues its schedule by counting."""

from __future__ import annotations

import math

import torch

from areal_agents.training.config import TrainerConfig


def rate_factor(step: int, config: TrainerConfig) -> float:
    """The share of the peak rate in batch `step`, counted from 0.

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
    """Use `rate` for every parameter group from now on."""
    for group in optimizer.param_groups:
        group["lr"] = rate
