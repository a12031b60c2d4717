"""Every preset trains on the quick-start task, with the command that a user runs.

PPO, which has a critic, always runs. All the other presets are marked `slow`.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from run_logs import ends_of_logs
from safetensors.torch import load_file

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.presets import PRESETS
from areal_agents.launch.run_folder import RunFolder

CONFIG = Path(__file__).parents[2] / "examples" / "search_agent" / "config.yaml"
SMALL = [
    "trial=false",
    "trainer.steps=2",
    "trainer.warmup_steps=0",
    "trainer.critic_lr=1e-4",
    "trainer.trackers=[]",
    "rollout.groups=4",
    "rollout.group_size=4",
    "rollout.concurrency=8",
    "eval.episodes=2",
    "eval.every=null",
]
EACH_TIME = ("ppo",)


def train(name: str, run_dir: Path) -> RunFolder:
    command = [sys.executable, "-m", "areal_agents.cli", "train", str(CONFIG), f"algorithm={name}"]
    process = subprocess.run(
        [*command, *SMALL, f"run_dir={run_dir}"], capture_output=True, text=True, timeout=280, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr + ends_of_logs(run_dir)
    return RunFolder(run_dir)


def check_parts(name: str, rows: list[dict[str, Any]]) -> None:
    """Check that the metrics of optional parts are present exactly for the presets with these parts."""
    algorithm = AlgorithmConfig.model_validate({"preset": name})
    for row in rows:
        assert (row["value_loss"] is not None) == algorithm.needs_critic
        assert (row["dpo_loss"] is not None) == (name == "dpo")
        assert row["microbatches"] >= algorithm.minibatches
        assert all(math.isfinite(row[key]) for key in ("loss", "grad_norm", "entropy", "kl_behavior_k3"))
    for row in rows[1:]:  # in the first of these steps, the policy still equals the reference
        assert (row["kl_reference"] != 0) == algorithm.needs_reference


@pytest.mark.parametrize(
    "name", [name if name in EACH_TIME else pytest.param(name, marks=pytest.mark.slow) for name in PRESETS]
)
def test_a_preset_trains_the_quick_start(name: str, tmp_path: Path) -> None:
    folder = train(name, tmp_path / "run")
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert [(row["step"], row["version"]) for row in rows] == [(1, 1), (2, 2)]
    trained = [row for row in rows if row["tokens"]]  # the groups of a batch may all have equal scores
    assert trained
    assert all(row["skipped_steps"] == 0 and row["groups_bad"] == 0 for row in rows)
    assert all(row["staleness_max"] <= 1 for row in rows)
    check_parts(name, trained)
    before = load_file(CONFIG.parent / "model" / "model.safetensors")
    after = load_file(folder.final_model / "model.safetensors")
    assert after.keys() == before.keys()
    assert any(not torch.equal(after[key], before[key]) for key in before)
    assert json.loads(folder.summary.read_text())["heldout_after"] is not None
