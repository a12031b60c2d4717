"""A job is requeued at its time limit and after the loss of a node, but not after another failure."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster

pytestmark = pytest.mark.cluster

SUPERVISOR = """
import os, time
from pathlib import Path

from areal_agents.cluster.launchers.slurm.allocation import Allocation
from areal_agents.cluster.launchers.slurm.config import SlurmConfig
from areal_agents.cluster.launchers.slurm.job import requeued_when_cut_short
from areal_agents.errors import ArealAgentsError

with requeued_when_cut_short(SlurmConfig(), Allocation.of(os.environ), lambda text: print(text, flush=True)):
    Path("started-" + os.environ.get("SLURM_RESTART_COUNT", "")).touch()
    while not Path("fail").exists():
        time.sleep(0.05)
    raise ArealAgentsError("the engine-1 process ended")
"""


def submit(slurm: SlurmCluster, *options: str) -> str:
    (slurm.folder / "supervisor.py").write_text(SUPERVISOR)
    options = ("--nodes=2", "--no-kill", "--requeue", "--signal=B:USR1@60", "--output=job.txt", *options)
    command = f"--wrap=exec {sys.executable} supervisor.py"
    variables = {"PYTHONPATH": str(Path(__file__).parents[2])}
    job = slurm.command("sbatch", "--parsable", *options, command, environment=variables).stdout.strip()
    slurm.until((slurm.folder / "started-").exists, "the job to run")
    return job


def test_a_job_is_requeued_when_slurm_signals_that_its_time_limit_is_near(slurm: SlurmCluster) -> None:
    job = submit(slurm)
    # The signal that Slurm sends near a time limit. With the shortest limit, a minute, it would come at once,
    # and end a process that does not handle it yet.
    slurm.command("scancel", "--batch", f"--signal={signal.SIGUSR1.value}", job)
    slurm.until(lambda: slurm.job(job)["Restarts"] == "1", "the job to be requeued")
    output = (slurm.folder / "job.txt").read_text()
    assert (
        f"the time limit of the job is near: the run ends with a checkpoint\njob {job} is requeued" in output
    )


def test_a_job_that_lost_a_node_is_requeued_when_its_run_fails(slurm: SlurmCluster) -> None:
    job = submit(slurm)
    slurm.kill_node("node2", noticed=True)
    (slurm.folder / "fail").touch()
    slurm.until(lambda: slurm.job(job)["Restarts"] == "1", "the job to be requeued")
    (slurm.folder / "fail").unlink()
    output = (slurm.folder / "job.txt").read_text()
    assert output.startswith(f"the engine-1 process ended\njob {job} is requeued: it lost node2\n")

    slurm.start_node("node2")
    slurm.until((slurm.folder / "started-1").exists, "the job to run again")
    (slurm.folder / "fail").touch()  # this time the job has all its nodes
    slurm.until(lambda: slurm.job(job)["JobState"] == "FAILED", "the job to end")
    assert slurm.job(job)["Restarts"] == "1"
