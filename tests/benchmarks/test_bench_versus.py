"""`python -m benchmarks versus`: the figures of given training times and, as a slow test, both trainings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from areal_agents.errors import ConfigError
from benchmarks.__main__ import app
from benchmarks.versus import run as versus
from benchmarks.versus.run import Training, _training, run


def test_the_time_to_the_target_is_that_of_the_first_weights_that_reach_it(tmp_path: Path) -> None:
    code = tmp_path / "agent.py"
    code.write_text("# a comment\n\nx = 1\ny = 2\n")
    times = [20.0, 24.0, 30.0, 33.0, 37.0, 41.0]
    found = _training("x", times, {2: 0.8, 4: 0.9, 6: 0.95}, 4100.0, 1.5, [str(code)])
    assert (found.first_step_s, found.step_s, found.to_target_s) == (20.0, 4.0, 33.0)
    assert (found.tokens_per_s, found.code_lines, found.steps) == (100.0, 2, 6)
    never = _training("x", times, {6: 0.84}, 1.0, 1.5, [str(code)])
    assert never.to_target_s is None


def test_the_number_of_steps_must_be_a_multiple_of_the_evaluation_interval(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--steps has to be a multiple of --every 2, got 5"):
        run(out=tmp_path, json=False, steps=5, every=2, seed=0, tasks=16)


def test_results_of_other_settings_are_not_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "examples/search_agent/config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("seed: 1\n")
    monkeypatch.chdir(tmp_path)
    out, trained = tmp_path / "out", list[str]()

    def train(name: str) -> Callable[..., Training]:
        def trains(*settings: object) -> Training:
            trained.append(name)
            return Training(name, 4, 1.0, 2.0, None, {2: 0.5, 4: 0.6}, 10.0, 1.0, 20)

        return trains

    monkeypatch.setattr(versus, "_train_ours", train("ours"))
    monkeypatch.setattr(versus, "_train_trl", train("trl"))
    settings: dict[str, Any] = {"json": False, "steps": 4, "every": 2, "seed": 0, "tasks": 16}
    for _ in range(2):
        run(out=out, **settings)
    assert trained == ["ours", "trl"]
    with pytest.raises(ConfigError, match=r"out has results .*: --steps 4, now 8, --tasks 16, now 32; give"):
        run(out=out, **{**settings, "steps": 8, "tasks": 32})
    config.write_text("seed: 2\n")
    with pytest.raises(ConfigError, match=r"other settings: examples/search_agent/config\.yaml has changed"):
        run(out=out, **settings)
    (out / "settings.json").unlink()
    with pytest.raises(ConfigError, match=r"out has files, but no settings\.json"):
        run(out=out, **settings)
    assert trained == ["ours", "trl"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_both_train_the_quick_start(tmp_path: Path) -> None:
    """The second call reuses the results of the first."""
    arguments = ["versus", "--json", "--out", str(tmp_path), "--steps", "5", "--tasks", "16"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    ours, theirs = json.loads(done.stdout.splitlines()[-1])["trainings"]
    for found in (ours, theirs):
        assert found["steps"] == 5 and found["tokens_per_s"] > 0 and found["memory_gb"] > 0.1
        assert found["held_out"]["5"] > 0.2
    again = CliRunner().invoke(app, arguments)
    assert (
        "training" not in again.stderr and json.loads(again.stdout.splitlines()[-1])["trainings"][1] == theirs
    )
