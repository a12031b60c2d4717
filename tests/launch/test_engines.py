"""A run with several engines: it starts them, restarts a killed one, and has them sleep during training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_train import EXAMPLE, SMALL, finish, processes_of, steps_done, wait_for

from areal_agents.launch.run_folder import RunFolder
from areal_agents.store import Store

STEPS = 8  # enough that some are left when an engine is killed after the first


@pytest.mark.slow
def test_a_run_with_two_replicas_continues_when_one_is_killed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "areal_agents.cli", "train", str(EXAMPLE), *SMALL, f"run_dir={run_dir}"]
    command += ["engine.replicas=2", "engine.colocate=sleep", f"trainer.steps={STEPS}", "eval=null"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path
    )
    wait_for(lambda: steps_done(run_dir) >= 1, process)
    engines = processes_of(run_dir, "engine")
    assert len(engines) == 2, engines
    os.kill(engines[1], signal.SIGKILL)
    output = finish(process)
    assert process.returncode == 0, output
    folder = RunFolder(run_dir)
    assert "engines: 2 × the embedded engine on the CPU" in output
    assert "process was killed by signal 9 and will be restarted" in output
    assert {"engine-0.log", "engine-1.log"} <= {log.name for log in (run_dir / "logs").iterdir()}
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["staleness_max"] <= 1 for row in rows)
    with Store.open(folder.store) as store:
        assert store.group_counts()["trained"] == 2 * STEPS
    assert processes_of(run_dir) == []
