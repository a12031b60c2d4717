"""Schedules by hand, and where the decay applies."""

from __future__ import annotations

import pytest
import torch

from areal_agents.training.config import TrainerConfig
from areal_agents.training.optimizer import learning_rate, make_optimizer, set_learning_rate


def rates(**options: object) -> list[float]:
    config = TrainerConfig(steps=6, lr=1.0, **options)  # type: ignore[arg-type]
    return [learning_rate(step, config) for step in range(6)]


def test_schedules_by_hand() -> None:
    assert rates() == [1.0] * 6
    assert rates(warmup_steps=2) == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert rates(schedule="linear") == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.0])
    assert rates(schedule="linear", warmup_steps=2, min_lr_ratio=0.1) == pytest.approx(
        [0.5, 1.0, 1.0, 0.7, 0.4, 0.1]
    )
    cosine = rates(schedule="cosine", warmup_steps=1)
    assert cosine == pytest.approx([1.0, 1.0, 0.853553, 0.5, 0.146447, 0.0], abs=1e-6)


def test_a_warmup_as_long_as_the_run_is_only_warmup() -> None:
    assert rates(schedule="linear", warmup_steps=6) == pytest.approx([n / 6 for n in range(1, 7)])


def test_decay_is_for_matrices_only_and_the_rate_for_all() -> None:
    optimizer = make_optimizer(torch.nn.Linear(3, 2), TrainerConfig(lr=0.1, weight_decay=0.01))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
