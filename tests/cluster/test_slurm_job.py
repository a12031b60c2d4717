"""The batch job of a run, in tests that do not need Slurm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from areal_agents.cluster.launchers.base import RoleProcess
from areal_agents.cluster.launchers.placing import assigned_nodes, nodes_for
from areal_agents.cluster.launchers.slurm.config import SlurmConfig
from areal_agents.cluster.launchers.slurm.job import batch_script, submit
from areal_agents.cluster.launchers.slurm.launcher import SlurmLauncher
from areal_agents.cluster.start import start_on_cluster
from areal_agents.config import load_config
from areal_agents.errors import ConfigError

EXAMPLES = Path(__file__).parents[2] / "examples"

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=search
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --partition=h100
#SBATCH --time=12:00:00
#SBATCH --chdir=/home/ada/search
#SBATCH --output=/shared/search/slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --export=ALL
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
#SBATCH --mail-type=END

module load cuda
exec areal-agents train cluster.yaml --launcher slurm 'agent=my agent.py:run'
"""


def test_the_batch_script_contains_the_settings_and_the_command() -> None:
    config = SlurmConfig(
        partition="h100",
        time="12:00:00",
        notice_s=300,
        setup=("module load cuda",),
        extra=("--mail-type=END",),
    )
    command = ["areal-agents", "train", "cluster.yaml", "--launcher", "slurm", "agent=my agent.py:run"]
    script = batch_script(
        config,
        command,
        name="search",
        nodes=3,
        gpus_per_node=8,
        folder=Path("/home/ada/search"),
        output=Path("/shared/search/slurm-%j.log"),
    )
    assert script == SCRIPT


def test_a_time_that_yaml_read_as_seconds_is_refused() -> None:
    with pytest.raises(
        ValueError, match='YAML read it as the number 43200; write it in quotes, as "12:00:00"'
    ):
        SlurmConfig.model_validate({"time": 43200})


@pytest.mark.parametrize("time", ["12h", "1 day", "12:00:00:00", "1-", "-1"])
def test_a_time_that_sbatch_does_not_accept_is_refused(time: str) -> None:
    with pytest.raises(ValueError, match=f"sbatch does not take '{time}'"):
        SlurmConfig(time=time)


@pytest.mark.parametrize("time", ["", "90", "90:00", "12:00:00", "1-12", "1-12:30", "1-12:00:00", "infinite"])
def test_a_time_that_sbatch_accepts_is_kept(time: str) -> None:
    assert SlurmConfig(time=time).time == time


def test_processes_with_gpus_fill_nodes_and_the_others_are_spread() -> None:
    engines = [RoleProcess("engine", index, ("engine",), gpus=2) for index in range(3)]
    trainers = [RoleProcess("trainer", index, ("trainer",), gpus=4) for index in range(2)]
    others = [RoleProcess("proxy", index, ("proxy",)) for index in range(3)]
    processes = [*engines, *others, *trainers]
    assert nodes_for(processes, 8) == 2
    assert assigned_nodes(processes, 8, 2) == {
        "trainer-0": 0, "trainer-1": 0, "engine-0": 1, "engine-1": 1, "engine-2": 1,
        "proxy-0": 0, "proxy-1": 1, "proxy-2": 0,
    }  # fmt: skip
    assert nodes_for(others, 8) == 1  # without GPUs, one node has room for all processes
    with pytest.raises(ConfigError, match=r"need 2 nodes with 8 GPUs each .* the job has 1"):
        assigned_nodes(processes, 8, 1)
    with pytest.raises(
        ConfigError, match="trainer-0 needs 4 GPUs on one node, .* use engine.tensor_parallel"
    ):
        nodes_for(processes, 2)


def test_without_slurm_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ConfigError, match="call it on a login node of the cluster, or print .* --dry-run"):
        submit(SCRIPT)
    processes = [RoleProcess("proxy", 0, ("proxy",))]
    with pytest.raises(ConfigError, match="no Slurm job"):
        SlurmLauncher(SlurmConfig(), processes, gpus_per_node=8).command(processes[0])


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_run_whose_agents_would_not_reach_the_model_is_not_submitted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dry_run: bool
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    job = {"kind": "slurm", "template": str(EXAMPLES / "agent_jobs/agent.sbatch")}
    agent = json.dumps({"command": "python agent.py", "job": job})
    given = [
        f"agent={agent}",
        "ablation=null",
        "store.url=postgresql://db/areal",
        f"run_dir={tmp_path / 'run'}",
    ]
    config = load_config(EXAMPLES / "search_agent/config.yaml", given, weights=False)
    with pytest.raises(ConfigError, match=r"^proxy\.public_url: the agent's jobs do not reach"):
        start_on_cluster("slurm", config, [], console=Console(), dry_run=dry_run)
