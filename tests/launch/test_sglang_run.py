"""Whole runs on a real SGLang, as a user starts them: on a started engine, and on a running server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from real_sglang import running_sglang
from test_train import EXAMPLE, finish, processes_of

from areal_agents.config import load_config
from areal_agents.errors import ConfigError
from areal_agents.launch.engines import check_running
from areal_agents.launch.run_folder import RunFolder
from areal_agents.store import Store

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

SMALL = [
    "trial=false",
    "rollout.groups=2",
    "rollout.group_size=4",
    "rollout.concurrency=8",
    "eval.episodes=4",
    "eval.every=2",
    "trainer.steps=3",
    "trainer.warmup_steps=0",
    "algorithm.drop_equal_groups=false",
    "engine.kind=sglang",
]
TIMEOUT_S = 600  # a server starts in half a minute on an idle machine


def train(run_dir: Path, *arguments: str) -> str:
    """Train to the end of the run; return the output."""
    command = [sys.executable, "-m", "areal_agents.cli", "train", str(EXAMPLE), *SMALL]
    command += [f"run_dir={run_dir}", *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=run_dir.parent
    )
    output = finish(process, TIMEOUT_S)
    assert process.returncode == 0, output
    return output


def assert_trained(run_dir: Path) -> None:
    """Check that three versions were trained within the staleness bound, and that the logprobs agree."""
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


def test_a_run_starts_sglang_itself_and_shares_its_memory(sglang_python: str, tmp_path: Path) -> None:
    """On a CPU there is no memory saver: only generation is paused, but the calls are the real ones."""
    run_dir = tmp_path / "run"
    output = train(
        run_dir, f"engine.python={sglang_python}", "engine.max_context=2048", "engine.colocate=sleep"
    )
    assert "engines: 1 × SGLang" in output and "on the CPU" in output
    assert_trained(run_dir)
    log = RunFolder(run_dir).log("engine").read_text()
    asked = ("release_memory_occupation", "resume_memory_occupation")
    assert [log.count(f'"POST /{path} HTTP/1.1" 200') for path in asked] == [3, 3]
    assert processes_of(run_dir) == []


def test_a_run_uses_a_server_that_streams_cumulative_chunks(sglang_python: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    model = EXAMPLE.parent / "model"
    with running_sglang(
        sglang_python, model, "--context-length", "2048", cumulative=True, start_timeout_s=TIMEOUT_S
    ) as url:
        for setting, flag in (
            ("trainer.publish.pause=in_place", "--disable-overlap-schedule"),
            ("engine.colocate=sleep", "--enable-memory-saver"),
            ("trainer.lora.rank=4", "--enable-lora"),
        ):
            with pytest.raises(ConfigError, match=f"{url} was started without {flag}, which"):
                check_running(load_config(EXAMPLE, ["engine.kind=sglang", f"engine.urls=[{url}]", setting]))
        output = train(run_dir, f"engine.urls=[{url}]")
    assert f"engines: running servers at {url}" in output
    assert_trained(run_dir)
    assert not RunFolder(run_dir).log("engine").exists()
