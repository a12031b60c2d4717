"""Checkpoints: a resumed run continues exactly, and errors name damaged files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from training_support import build_model, random_group, training_data

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.errors import TrainingError
from areal_agents.training.checkpoint.checkpoint import (
    Checkpoints,
    TrainingProgress,
    latest_checkpoint,
    load_checkpoint,
)
from areal_agents.training.config import TrainerConfig
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.lora import LoraOptions
from areal_agents.training.model.model import ModelOptions, Policy, load_policy
from areal_agents.training.step.optimizer import make_optimizer
from areal_agents.training.step.step import StepOptions, train_batch

OPTIONS = StepOptions(microbatch_tokens=4096, share_prefixes=True, grad_clip=1.0)


class Run:
    """A policy and its optimizer."""

    def __init__(self, folder: Path, ranks: Ranks, *, lora: LoraOptions | None = None, **config: Any) -> None:
        self.ranks = ranks
        self.policy: Policy = load_policy(folder, ranks, options=ModelOptions(lora=lora))
        self.optimizer = make_optimizer(self.policy, TrainerConfig(lr=1e-2, weight_decay=0.1, **config))
        self.parts = {"policy": (self.policy, self.optimizer)}

    def step(self, *seeds: int) -> None:
        for seed in seeds:
            data = training_data(random_group(np.random.default_rng(seed), group_id=str(seed)))
            train_batch(
                self.policy, self.optimizer, data, AlgorithmConfig(), OPTIONS,
                ranks=self.ranks, version=0, seed=seed,
            )  # fmt: skip

    def save(self, folder: Path, step: int) -> Path:
        return Checkpoints(folder, self.ranks, wait=True).save(self.parts, TrainingProgress(step, step))

    def load(self, path: Path) -> TrainingProgress:
        return load_checkpoint(path, self.parts, self.ranks)

    def weights(self) -> dict[str, torch.Tensor]:
        return self.policy.full_state_dict()


def assert_equal(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ({}, {}),
        ({"offload": "optimizer"}, {}),  # a checkpoint does not depend on where the state was kept
        ({}, {"offload": "optimizer"}),
        ({"optimizer": "muon"}, {"optimizer": "muon", "offload": "optimizer"}),
    ],
)
def test_a_resumed_run_takes_the_same_steps(
    model_folder: Path, tmp_path: Path, group: Ranks, saved: dict[str, Any], resumed: dict[str, Any]
) -> None:
    straight = Run(model_folder, group, **saved)
    straight.step(0, 1)
    path = straight.save(tmp_path, 2)
    straight.step(2, 3)
    again = Run(model_folder, group, **resumed)
    assert again.load(path) == TrainingProgress(2, 2)
    again.step(2, 3)  # these steps differ unless the moments are restored too
    assert_equal(again.weights(), straight.weights())


def test_a_checkpoint_has_the_state_from_when_saving_began(
    model_folder: Path, tmp_path: Path, group: Ranks
) -> None:
    run = Run(model_folder, group)
    run.step(0)
    checkpoints = Checkpoints(tmp_path, group)
    path = checkpoints.save(run.parts, TrainingProgress(1, 4, 9))
    want = run.weights()
    run.step(1, 2)  # while the checkpoint is being written
    checkpoints.finish()
    again = Run(model_folder, group)
    assert again.load(path) == TrainingProgress(1, 4, 9)
    assert_equal(again.weights(), want)


def test_adapters_are_saved_without_the_frozen_weights(
    model_folder: Path, tmp_path: Path, group: Ranks
) -> None:
    lora = LoraOptions(rank=2)
    run = Run(model_folder, group, lora=lora)
    run.step(0, 1)
    path = run.save(tmp_path, 2)
    again = Run(model_folder, group, lora=lora)
    again.load(path)
    assert_equal(again.weights(), run.weights())
    saved = dcp.FileSystemReader(str(path)).read_metadata().state_dict_metadata
    assert saved and all("lora_" in name for name in saved)
    with pytest.raises(TrainingError, match="of another model"):
        Run(model_folder, group).load(path)


def test_the_random_state_is_restored(model_folder: Path, tmp_path: Path, group: Ranks) -> None:
    run = Run(model_folder, group)
    torch.manual_seed(5)
    path = run.save(tmp_path, 1)
    expected = torch.rand(3)
    torch.manual_seed(99)
    run.load(path)
    assert torch.equal(torch.rand(3), expected)


def test_the_last_and_the_best_are_kept_and_unfinished_checkpoints_are_ignored(
    model_folder: Path, tmp_path: Path, group: Ranks
) -> None:
    assert latest_checkpoint(tmp_path) is None
    (tmp_path / ".step-11.tmp").mkdir()  # left by a run that was killed
    written: list[int] = []
    run = Run(model_folder, group)
    checkpoints = Checkpoints(tmp_path, group, keep=2, keep_best=1, written=written.append)
    for step, score in ((2, 0.5), (3, 0.9), (9, 0.7), (10, None), (11, 0.1), (12, 0.2)):
        checkpoints.save(run.parts, TrainingProgress(step, step), score=score)
    checkpoints.finish()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-11", "step-12", "step-3"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step-12"
    assert written == [2, 3, 9, 10, 11, 12]  # each is reported once


def test_a_protected_checkpoint_outlasts_later_ones(model_folder: Path, tmp_path: Path, group: Ranks) -> None:
    run = Run(model_folder, group)
    checkpoints = Checkpoints(tmp_path, group, keep=1)
    checkpoints.protect(1)
    for step in (1, 2, 3):
        checkpoints.save(run.parts, TrainingProgress(step, step))
    checkpoints.finish()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-1", "step-3"]
    checkpoints.protect(3)
    checkpoints.save(run.parts, TrainingProgress(4, 4))
    checkpoints.finish()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-3", "step-4"]


def test_a_damaged_older_checkpoint_does_not_end_the_run(
    model_folder: Path, tmp_path: Path, group: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(model_folder, group)
    checkpoints = Checkpoints(tmp_path, group, keep=1, keep_best=1, written=lambda step: None)
    for step, score in ((1, 0.9), (2, 0.5)):
        checkpoints.save(run.parts, TrainingProgress(step, step), score=score)
    checkpoints.finish()
    (tmp_path / "step-1" / "trainer.json").write_text("{")
    checkpoints.save(run.parts, TrainingProgress(3, 3), score=0.1)
    checkpoints.finish()
    assert "step-1" in caplog.text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-2", "step-3"]  # the best readable one


def test_another_model_is_refused(model_folder: Path, tmp_path: Path, group: Ranks) -> None:
    path = Run(model_folder, group).save(tmp_path, 1)
    other = Run(build_model(tmp_path / "other", "qwen2"), group)
    with pytest.raises(TrainingError, match="step-1 is a checkpoint of another model"):
        other.load(path)


def test_another_algorithm_is_refused(model_folder: Path, tmp_path: Path, group: Ranks) -> None:
    run = Run(model_folder, group)
    path = run.save(tmp_path, 1)
    with pytest.raises(TrainingError, match="step-1 is a checkpoint of another algorithm"):
        load_checkpoint(path, {**run.parts, "critic": run.parts["policy"]}, group)


@pytest.mark.parametrize(("saved", "resumed"), [("adamw", "muon"), ("muon", "adamw")])
def test_another_optimizer_is_refused(
    model_folder: Path, tmp_path: Path, group: Ranks, saved: str, resumed: str
) -> None:
    run = Run(model_folder, group, optimizer=saved)
    run.step(0)
    path = run.save(tmp_path, 1)
    with pytest.raises(TrainingError, match="leave trainer.optimizer as it was"):
        Run(model_folder, group, optimizer=resumed).load(path)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "facts"])
def test_a_damaged_checkpoint_is_named_with_its_file(
    model_folder: Path, tmp_path: Path, group: Ranks, damage: str
) -> None:
    run = Run(model_folder, group)
    run.step(0)
    path = run.save(tmp_path, 1)
    (shard,) = path.glob("*.distcp")
    data = bytearray(shard.read_bytes())
    if damage == "truncated":
        shard.write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        data[len(data) // 2] ^= 1  # one bit
        shard.write_bytes(data)
    elif damage == "missing":
        shard.unlink()
    else:
        (path / "trainer.json").write_text("{")
    name = "trainer.json" if damage == "facts" else shard.name
    again = Run(model_folder, group)
    before = again.weights()
    with pytest.raises(TrainingError, match=rf"step-1 is damaged: .*{name}"):
        again.load(path)
    assert_equal(again.weights(), before)  # nothing was loaded from it


def test_the_facts_of_a_checkpoint_are_json(model_folder: Path, tmp_path: Path, group: Ranks) -> None:
    path = Run(model_folder, group).save(tmp_path, 3)
    facts = json.loads((path / "trainer.json").read_text())
    assert (facts["step"], facts["version"], facts["position"], facts["ranks"]) == (3, 3, 0, 1)


def test_a_full_disk_is_a_training_error(model_folder: Path, tmp_path: Path, group: Ranks) -> None:
    blocked = tmp_path / "checkpoints"
    blocked.write_text("a file where the folder should be")
    with pytest.raises(TrainingError, match="cannot write the checkpoint"):
        Run(model_folder, group).save(blocked, 1)


def test_a_checkpoint_gets_its_name_only_after_its_files_are_on_the_disk(
    model_folder: Path, tmp_path: Path, group: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    path = Run(model_folder, group).save(tmp_path, 1)
    unfinished, named = path.with_name(".step-1.tmp"), synced.index(path.parent)
    assert {unfinished, *(unfinished / file.name for file in path.iterdir())} <= set(synced[:named])


def test_an_error_while_writing_in_the_background_is_raised_by_finish(
    model_folder: Path, tmp_path: Path, group: Ranks
) -> None:
    run = Run(model_folder, group)
    checkpoints = Checkpoints(tmp_path, group, written=_refuse)
    checkpoints.save(run.parts, TrainingProgress(1, 1))
    with pytest.raises(TrainingError, match="cannot write the checkpoint .*step-1: no space"):
        checkpoints.finish()


def _refuse(step: int) -> None:
    raise OSError("no space")
