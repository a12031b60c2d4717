"""Whole runs of `areal-agents train` with a scripted engine; agents, proxy, rewards and trainer are real."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from run_logs import ends_of_logs

from areal_agents.testing import Script, ScriptedApp, running

TRAIN_S = 280
CONTEXT = 65_536
ONE_STEP = (
    "trial=false", "eval=null", "trainer.steps=1", "trainer.warmup_steps=0", "trainer.trackers=[]",
    "rollout.groups=1", "rollout.max_staleness=0",
)  # fmt: skip


def trained_step(
    config: Path, model: Path, script: Script, run_dir: Path, settings: Sequence[str] = ()
) -> dict[str, Any]:
    """Run a single training step and return its metrics; the store is `store.db` in `run_dir`."""
    app = ScriptedApp.from_folder(model, script, context_length=CONTEXT)
    with running(app) as url:
        engine = [f"engine.urls=[{url}]", "engine.kind=sglang", f"model={model}", f"run_dir={run_dir}"]
        command = [sys.executable, "-m", "areal_agents.cli", "train", str(config), *ONE_STEP]
        process = subprocess.run(
            [*command, *engine, *settings], capture_output=True, text=True, timeout=TRAIN_S, check=False
        )
    assert process.returncode == 0, process.stdout + process.stderr + ends_of_logs(run_dir)
    (row,) = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return dict(row)
