"""`python -m benchmarks versus`: what is made of the times of two trainings, and, in its long form, both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from areal_agents.errors import ConfigError
from benchmarks.__main__ import app
from benchmarks.versus.run import _training, run


def test_times_to_the_target_are_those_of_the_first_weights_that_reach_it(tmp_path: Path) -> None:
    code = tmp_path / "agent.py"
    code.write_text("# a comment\n\nx = 1\ny = 2\n")
    times = [20.0, 24.0, 30.0, 33.0, 37.0, 41.0]
    found = _training("x", times, {2: 0.8, 4: 0.9, 6: 0.95}, 4100.0, 1.5, [str(code)])
    assert (found.first_step_s, found.step_s, found.to_target_s) == (20.0, 4.0, 33.0)
    assert (found.tokens_per_s, found.code_lines, found.steps) == (100.0, 2, 6)
    never = _training("x", times, {6: 0.84}, 1.0, 1.5, [str(code)])
    assert never.to_target_s is None


def test_weights_are_evaluated_at_the_last_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--steps has to be a multiple of --every 2, got 5"):
        run(out=tmp_path, json=False, steps=5, every=2, seed=0, tasks=16)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_both_train_the_quick_start(tmp_path: Path) -> None:
    """And what was trained is not trained again."""
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
