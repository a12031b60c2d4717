"""On-policy runs with the same seed are bitwise equal, whatever the timing of their episodes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from run_logs import ends_of_logs

HERE = Path(__file__).parent
EXAMPLE = HERE.parent.parent / "examples" / "search_agent" / "config.yaml"
SETTINGS = [
    f"agent={HERE / 'jitter_support.py'}:agent",
    f"data.path={HERE / 'jitter_support.py'}:tasks",
    *(
        "trial=false",
        "ablation=null",
        "eval=null",
        "rollout.max_staleness=0",
        "rollout.groups=2",
        "rollout.group_size=3",
    ),
    *("trainer.steps=2", "trainer.warmup_steps=0", "trainer.lr=0.002", "algorithm.minibatches=2"),
    *("trainer.microbatch_tokens=512", "trainer.trackers=[]"),
]
# The second run generates with different batches, slots and threads, and in a different order.
ENGINES = (
    ["rollout.concurrency=6", "engine.slots=32", "engine.threads=1"],
    ["rollout.concurrency=2", "engine.slots=5", "engine.threads=3"],
)
TIMEOUT_S = 270
TIMES = {"time", "trainer_idle", "rollout_idle", "mfu"}  # and all metrics whose names end in _s


def start(run_dir: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "areal_agents.cli", "train", str(EXAMPLE), *SETTINGS, *arguments]
    return subprocess.Popen(
        [*command, f"run_dir={run_dir}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=run_dir.parent,
    )


def figures(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics of each step, without those that measure time."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.endswith("_s") and k not in TIMES} for row in rows]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of two finished runs, which ran at the same time."""
    folder = tmp_path_factory.mktemp("runs")
    first, second = folder / "first", folder / "second"
    started = [start(run, *engine) for run, engine in zip((first, second), ENGINES, strict=True)]
    try:
        for process, run_dir in zip(started, (first, second), strict=True):
            output, _ = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, output + ends_of_logs(run_dir)
    finally:
        for process in started:
            process.terminate()
            process.wait(TIMEOUT_S)
    return first, second


def test_the_weights_are_equal(runs: tuple[Path, Path]) -> None:
    first, second = (run / "final" / "model.safetensors" for run in runs)
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes() != (EXAMPLE.parent / "model" / "model.safetensors").read_bytes()


def test_the_metrics_are_equal(runs: tuple[Path, Path]) -> None:
    first, second = map(figures, runs)
    assert first == second
    assert len(first) == 2 and all(row["grad_norm"] > 0 and row["reward_std"] > 0 for row in first)
    assert all(row["tokens"] == row["on_policy_tokens"] for row in first)
