"""Checkpoints: training goes on as if nothing had happened, and bad folders are named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from training_support import build_model, random_group

from areal_agents.errors import TrainingError
from areal_agents.training.checkpoint import (
    Progress,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from areal_agents.training.config import TrainerConfig
from areal_agents.training.distributed import Ranks
from areal_agents.training.model import Policy, load_policy
from areal_agents.training.optimizer import make_optimizer
from areal_agents.training.step import StepOptions, train_batch

OPTIONS = StepOptions(0.2, 0.28, 5.0, 1, 4096, True, 1.0)


class Run:
    """A policy and its optimizer."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self.ranks = ranks
        self.policy: Policy = load_policy(folder, ranks)
        self.optimizer = make_optimizer(self.policy, TrainerConfig(lr=1e-2, weight_decay=0.1))

    def step(self, seed: int) -> None:
        batch = random_group(np.random.default_rng(seed), group_id=str(seed))
        train_batch(self.policy, self.optimizer, batch, OPTIONS, ranks=self.ranks, version=0, seed=seed)

    def save(self, folder: Path, step: int, keep: int = 2) -> Path:
        return save_checkpoint(
            folder, self.policy, self.optimizer, Progress(step, step), self.ranks, keep=keep
        )

    def load(self, path: Path) -> Progress:
        return load_checkpoint(path, self.policy, self.optimizer, self.ranks)


def test_a_resumed_run_takes_the_same_steps(model_folder: Path, tmp_path: Path, group: Ranks) -> None:
    straight = Run(model_folder, group)
    for seed in range(2):
        straight.step(seed)
    path = straight.save(tmp_path, 2)
    for seed in range(2, 4):
        straight.step(seed)
    resumed = Run(model_folder, group)
    assert resumed.load(path) == Progress(2, 2)
    for seed in range(2, 4):  # the moments are there too, or AdamW would step elsewhere
        resumed.step(seed)
    want = straight.policy.full_state_dict()
    got = resumed.policy.full_state_dict()
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_the_random_state_is_restored(model_folder: Path, tmp_path: Path, group: Ranks) -> None:
    run = Run(model_folder, group)
    torch.manual_seed(5)
    path = run.save(tmp_path, 1)
    expected = torch.rand(3)
    torch.manual_seed(99)
    run.load(path)
    assert torch.equal(torch.rand(3), expected)


def test_the_last_k_are_kept_and_nothing_unfinished_is_found(
    model_folder: Path, tmp_path: Path, group: Ranks
) -> None:
    assert latest_checkpoint(tmp_path) is None
    run = Run(model_folder, group)
    for step in (2, 9, 10):
        run.save(tmp_path, step)
    (tmp_path / ".step-11.tmp").mkdir()
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-10", "step-9"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step-10"
    assert run.save(tmp_path, 10) == tmp_path / "step-10"  # again, over the old one


def test_a_checkpoint_of_another_model_is_refused(model_folder: Path, tmp_path: Path, group: Ranks) -> None:
    path = Run(model_folder, group).save(tmp_path / "checkpoints", 1)
    other = Run(build_model(tmp_path / "other", "llama"), group)
    with pytest.raises(TrainingError, match="step-1 is a checkpoint of another model"):
        other.load(path)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "no facts"])
def test_a_damaged_checkpoint_is_named(damage: str, model_folder: Path, tmp_path: Path, group: Ranks) -> None:
    run = Run(model_folder, group)
    run.step(0)
    path = run.save(tmp_path, 1)
    (shard,) = path.glob("*.distcp")
    data = bytearray(shard.read_bytes())
    if damage == "truncated":
        shard.write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        middle = len(data) // 2
        data[middle : middle + 64] = bytes(byte ^ 0xFF for byte in data[middle : middle + 64])
        shard.write_bytes(data)
    elif damage == "missing":
        shard.unlink()
    else:
        (path / "trainer.json").write_text("{")
    with pytest.raises(TrainingError, match="step-1 is damaged"):
        Run(model_folder, group).load(path)


def test_facts_are_plain_json(model_folder: Path, tmp_path: Path, group: Ranks) -> None:
    path = Run(model_folder, group).save(tmp_path, 3)
    facts = json.loads((path / "trainer.json").read_text())
    assert (facts["step"], facts["version"], facts["ranks"]) == (3, 3, 1)


def test_a_full_disk_is_a_training_error(model_folder: Path, tmp_path: Path, group: Ranks) -> None:
    blocked = tmp_path / "checkpoints"
    blocked.write_text("a file where the folder should be")
    with pytest.raises(TrainingError, match="cannot write the checkpoint"):
        Run(model_folder, group).save(blocked, 1)
