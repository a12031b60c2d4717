"""`areal-agents train` on two nodes, and with a trainer that is started elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_logs import ends_of_logs
from test_train import EXAMPLE, SMALL, finish, processes_of, wait_for

from areal_agents.config import load_config
from areal_agents.errors import ConfigError
from areal_agents.inference.ports import reserved_ports
from areal_agents.launch.run_folder import RunFolder
from areal_agents.launch.train import train

TIMEOUT_S = 240
NO_EVALUATION = [setting for setting in SMALL if not setting.startswith("eval.")] + ["eval=null"]


def start(command: list[str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "areal_agents.cli", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )


@pytest.mark.slow
def test_the_same_command_on_each_node_starts_one_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with reserved_ports(1) as (port,):
        place = ["trainer.ranks=2", "trainer.nodes=2", f"trainer.master=127.0.0.1:{port}"]
        command = ["train", str(EXAMPLE), *NO_EVALUATION, "trainer.steps=2", *place, f"run_dir={run_dir}"]
        second = start([*command, "trainer.node_rank=1"], tmp_path)
        first = start([*command, "trainer.node_rank=0"], tmp_path)
        outputs = [finish(process, TIMEOUT_S) for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), outputs
    assert f"trainer: 2 ranks on 2 nodes, which meet at 127.0.0.1:{port}" in outputs[0]
    assert "node 1 of 2: 1 of 2 ranks" in outputs[1] and "the results are on node 0" in outputs[1]
    rows = [json.loads(line) for line in RunFolder(run_dir).metrics.read_text().splitlines()]
    assert [row["version"] for row in rows] == [1, 2]
    assert RunFolder(run_dir).summary.exists() and processes_of(run_dir) == []


def test_a_run_waits_for_a_trainer_that_is_started_elsewhere(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    settings = ["trainer.steps=1", "trainer.start=false", f"run_dir={run_dir}"]
    supervisor = start(["train", str(EXAMPLE), *NO_EVALUATION, *settings], tmp_path)
    wait_for((run_dir / "endpoints.json").exists, supervisor)
    trainer = start(["processes", "trainer", "--folder", str(run_dir)], tmp_path)
    try:
        output = finish(supervisor, TIMEOUT_S)
        assert supervisor.returncode == 0, output
        said, _ = trainer.communicate(timeout=60)
    finally:
        trainer.kill()
        trainer.communicate()
    assert f"started elsewhere: areal-agents processes trainer --folder {run_dir}" in " ".join(output.split())
    assert trainer.returncode == 0, said + ends_of_logs(run_dir)
    assert not RunFolder(run_dir).log("trainer").exists() and RunFolder(run_dir).summary.exists()


def test_a_node_other_than_the_first_does_not_start_its_own_run(tmp_path: Path) -> None:
    place = ["trainer.ranks=2", "trainer.nodes=2", "trainer.node_rank=1", "trainer.master=127.0.0.1:1"]
    config = load_config(EXAMPLE, [*place, f"run_dir={tmp_path}/run"])
    with pytest.raises(ConfigError, match="this is node 1; the run is started on node 0"):
        train(config, console=None)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()
