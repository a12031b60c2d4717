"""The laptop configuration of the deep-search agent trains on the corpus and the tasks of its folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from run_logs import ends_of_logs

from areal_agents.config import load_config
from areal_agents.evaluation.stored import results_in
from areal_agents.launch.run_folder import RunFolder
from areal_agents.store import Store
from areal_agents.user_functions import load_function

EXAMPLE = Path(__file__).parents[2] / "examples" / "deep_search"
SMALL = [
    "trainer.steps=2", "trainer.warmup_steps=0", "trainer.trackers=[]", "rollout.groups=2",
    "rollout.group_size=4", "rollout.concurrency=8", "eval.episodes=6", "eval.every=null",
]  # fmt: skip


@pytest.mark.slow
def test_the_laptop_configuration_trains(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "areal_agents.cli", "train", str(EXAMPLE / "config.yaml"), *SMALL]
    run = tmp_path / "run"
    done = subprocess.run(
        [*command, f"run_dir={run}"], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr + ends_of_logs(run)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["branches_mean"] == 1 and 1 <= row["turns_mean"] <= 5
        assert 0 < row["tool_calls_by_name"]["search"] <= row["tool_calls_mean"]
    summary = json.loads((run / "summary.json").read_text())
    assert 0 <= summary["heldout_before"] <= 1 and "heldout_after" in summary
    with Store.open(RunFolder(run).store) as store:
        attempts = results_in(store, "after").values()
    assert len(attempts) == 6 and sum(attempt.tool_calls.get("search", 0) for attempt in attempts) > 0


@pytest.mark.parametrize(("name", "limits"), [("24gb", "ONE_GPU"), ("node", "LONG")])
def test_the_configurations_for_gpus_fit_their_engines(name: str, limits: str, model_folder: Path) -> None:
    given = [f"model={model_folder}", "engine.python=/sglang/bin/python"]  # these are not installed here
    config = load_config(EXAMPLE / f"config.{name}.yaml", given)
    agent = load_function(str(config.agent), ValueError)
    assert agent.__wrapped__.__globals__[limits].context_tokens <= config.engine.max_context
    data = config.data.sources or [config.data]
    for function in (config.reward.episode, config.eval.answer, *(source.path for source in data)):
        assert load_function(str(function), ValueError)
