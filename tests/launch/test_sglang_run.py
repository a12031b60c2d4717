"""The whole loop on a real SGLang: `engine: {kind: sglang, urls: […]}`, as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sglang_support import running_sglang

from areal_agents.launch.run_folder import RunFolder
from areal_agents.store import Store

EXAMPLE = Path(__file__).parents[2] / "examples" / "search_agent"
SMALL = [
    "rollout.groups=2",
    "rollout.group_size=4",
    "rollout.concurrency=8",
    "eval.episodes=4",
    "eval.every=2",
    "trainer.steps=3",
    "trainer.warmup_steps=0",
    "algorithm.drop_equal_groups=false",
]


@pytest.mark.sglang
@pytest.mark.parametrize("streaming", [(), ("--incremental-streaming-output",)], ids=["cumulative", "deltas"])
def test_a_run_trains_on_what_a_real_server_sampled(
    sglang_python: str, streaming: tuple[str, ...], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    with running_sglang(sglang_python, EXAMPLE / "model", "--context-length", "2048", *streaming) as url:
        command = [sys.executable, "-m", "areal_agents.cli", "train", str(EXAMPLE / "config.yaml"), *SMALL]
        command += ["engine.kind=sglang", f"engine.urls=[{url}]", f"run_dir={run_dir}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in RunFolder(run_dir).metrics.read_text().splitlines()]
    assert [row["version"] for row in rows] == [1, 2, 3]
    assert all(row["staleness_max"] <= 1 for row in rows)
    compared = [row for row in rows if row["on_policy_tokens"]]
    assert compared and all(row["logprob_diff_on_policy_max"] < 1e-4 for row in compared)
    with Store.open(RunFolder(run_dir).store) as store:
        assert store.group_counts()["trained"] == 6
        before = store.episodes(split="eval", status="finished", metadata={"eval": "before"})
        after = store.episodes(split="eval", status="finished", metadata={"eval": "after"})
    assert {(e.version_min, e.version_max) for e in before} == {(0, 0)}
    assert {(e.version_min, e.version_max) for e in after} == {(3, 3)}
