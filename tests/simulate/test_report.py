"""`areal-agents simulate`: the split that it finds, its output, and the parameters that it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from areal_agents.cli import app
from areal_agents.errors import ConfigError
from areal_agents.simulate.parameters import Parameters, read_parameters
from areal_agents.simulate.report import run
from areal_agents.simulate.sizing import fastest, splits, synchronous, with_split

# A batch of 8 × 2 episodes of 100 tokens takes one engine 1.6 s of decoding, and one trainer 0.8 s.
SMALL = [
    "groups=8", "group_size=2", "tokens={mean: 100}", "base_s=0", "per_request_s=0.001", "slots=16",
    "trainer_s_per_token=0.0005", "max_staleness=4",
]  # fmt: skip


def test_the_best_split_balances_both_sides() -> None:
    parameters = read_parameters(SMALL)
    tried = splits(parameters, None, gpus=6)
    assert [(split.engines, split.trainers) for split in tried] == [(1, 5), (2, 4), (3, 3), (4, 2), (5, 1)]
    best = fastest(tried)
    assert (best.engines, best.trainers) == (4, 2)
    assert best.outcome.step_s == pytest.approx(0.4, rel=0.05)
    sync = synchronous(parameters, None, gpus=6)
    assert sync.outcome.step_s > best.outcome.step_s
    assert sync.outcome.overlap_s == 0


def test_engines_of_several_gpus_leave_the_rest_to_the_trainers() -> None:
    tried = splits(read_parameters([*SMALL, "gpus_per_engine=2"]), None, gpus=7)
    assert [(split.engines, split.trainers) for split in tried] == [(1, 5), (2, 3), (3, 1)]
    with pytest.raises(ConfigError, match="gpus must be at least 3, got 2"):
        splits(read_parameters([*SMALL, "gpus_per_engine=2"]), None, gpus=2)


def test_times_are_adapted_to_the_split() -> None:
    changed = with_split(
        Parameters(trainers=2, trainer_s_per_token=1e-3, concurrency=10), engines=3, trainers=8
    )
    assert changed.trainer_s_per_token == 0.25e-3
    assert changed.concurrency == 30


def test_the_report_is_printed_and_plotted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "deep" / "simulation.png"
    report = run(SMALL, source=None, gpus=3, plot=plot, json=True)
    printed = capsys.readouterr().out
    figures = json.loads(printed.splitlines()[-1])
    assert figures == json.loads(json.dumps(report.to_dict()))
    assert figures["best"]["engines"] + figures["best"]["trainers"] == 3
    assert sum(figures["staleness"].values()) == pytest.approx(1, abs=0.01)
    assert [row["max_staleness"] for row in figures["by_max_staleness"]] == [0, 1, 2, 4, 8, None]
    assert "best split of 3 GPUs" in printed and "staleness of the trained tokens" in printed
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_wrong_parameter_is_named() -> None:
    with pytest.raises(ConfigError, match="unknown key 'slot'; did you mean 'slots'"):
        read_parameters(["slot=3"])
    with pytest.raises(ConfigError, match="give the number of GPUs as --gpus 2"):
        read_parameters(["gpus=2"])
    with pytest.raises(ConfigError, match="base_s and per_request_s are both 0"):
        read_parameters(["base_s=0", "per_request_s=0"])
    refused = CliRunner().invoke(app, ["simulate", "groups=0"])
    assert refused.exit_code == 1 and isinstance(refused.exception, ConfigError)


def test_the_simulator_does_not_import_torch() -> None:
    code = (
        "import sys, areal_agents.simulate.report; print([m for m in ('torch', 'numba') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"
