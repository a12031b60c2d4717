"""Whole runs on a real vLLM, as a user starts them: on a started engine, and on a running server."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_vllm import running_vllm
from test_sglang_run import assert_trained, train
from test_train import EXAMPLE, processes_of

from areal_agents.launch.run_folder import RunFolder

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def test_a_run_starts_vllm_itself_and_broadcasts_to_it(vllm_python: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    output = train(
        run_dir,
        "engine.kind=vllm",
        f"engine.python={vllm_python}",
        "engine.max_context=2048",
        "trainer.publish.transport=broadcast",
    )
    assert "engines: 1 × vLLM" in output and "on the CPU" in output
    assert_trained(run_dir)
    log = RunFolder(run_dir).log("engine").read_text()
    assert "Injected" in log
    assert processes_of(run_dir) == []


def test_a_run_uses_a_vllm_server_that_is_already_running(vllm_python: str, tmp_path: Path) -> None:
    model = EXAMPLE.parent / "model"
    with running_vllm(vllm_python, model, "--max-model-len", "2048") as url:
        run_dir = tmp_path / "run"
        train(run_dir, "engine.kind=vllm", f"engine.urls=[{url}]", "trainer.publish.transport=disk")
    assert_trained(run_dir)
