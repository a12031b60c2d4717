"""Trains a recipe for a step or two, with the command of its README."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from run_logs import ends_of_logs

from areal_agents.launch.run_folder import RunFolder

SMALL = (
    "trial=false",
    "rollout.groups=4",
    "rollout.group_size=4",
    "rollout.concurrency=16",
    "trainer.warmup_steps=0",
    "trainer.trackers=[]",
    "eval.episodes=4",
    "eval.every=null",
)


@dataclass(frozen=True, slots=True)
class SmallRun:
    """The results of a finished run."""

    folder: RunFolder
    metrics: list[dict[str, Any]]
    summary: dict[str, Any]


def train(config: Path, run_dir: Path, *settings: str, timeout_s: float = 240) -> SmallRun:
    """Run `areal-agents train` with few episodes."""
    command = [sys.executable, "-m", "areal_agents.cli", "train", str(config), *SMALL, *settings]
    done = subprocess.run(
        [*command, f"run_dir={run_dir}"], capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr + ends_of_logs(run_dir)
    folder = RunFolder(run_dir)
    metrics = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    return SmallRun(folder, metrics, json.loads(folder.summary.read_text()))
