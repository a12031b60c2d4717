"""The program that runs a process as a Slurm step: placement, exit codes, signals, and the loss of a node."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import COMMAND_S, CPUS, SlurmCluster

from areal_agents.cluster.launchers.base import RoleProcess
from areal_agents.cluster.launchers.slurm.config import SlurmConfig
from areal_agents.cluster.launchers.slurm.launcher import SlurmLauncher
from areal_agents.cluster.launchers.slurm.step import LOOK_S
from areal_agents.errors import ConfigError
from areal_agents.launch.supervision import SUPERVISED

pytestmark = pytest.mark.cluster

MODULE = "areal_agents.cluster.launchers.slurm.step"
WHERE = "echo $SLURMD_NODENAME GPU $CUDA_VISIBLE_DEVICES"


class Job:
    """A job with both nodes, in which the test starts steps."""

    def __init__(self, slurm: SlurmCluster) -> None:
        self.slurm = slurm
        options = ["--nodes=2", "--exclusive", "--mem=0", "--gpus-per-node=2", "--no-kill", "--requeue"]
        wait = "--wrap=touch begun; exec sleep 600"
        self.id = slurm.command("sbatch", "--parsable", "--output=job.txt", *options, wait).stdout.strip()
        slurm.until((slurm.folder / "begun").exists, "the job to run")
        self.srun: list[str] = []  # messages of srun itself about the last process
        self._started: list[subprocess.Popen[str]] = []

    def start(
        self, name: str, script: str, *, node: int = 0, gpus: int = 0, through: tuple[str, ...] = ()
    ) -> subprocess.Popen[str]:
        variables = {
            "SLURM_JOB_ID": self.id,
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_GPUS_PER_NODE": "2",  # set in a batch script; srun would request these GPUs again
            SUPERVISED: "2",
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        options = [f"--name={name}", f"--node={node}", f"--gpus={gpus}", f"--cpus={gpus * CPUS // 2 or 1}"]
        process = subprocess.Popen(
            [*through, sys.executable, "-m", MODULE, *options, "--wait-s=5", "--", "sh", "-c", script],
            cwd=self.slurm.folder, env={**os.environ, **self.slurm.environment, **variables},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        self._started.append(process)
        return process

    def run(self, name: str, script: str, *, node: int = 0, gpus: int = 0) -> tuple[int, str]:
        process = self.start(name, script, node=node, gpus=gpus)
        output, _ = process.communicate(timeout=COMMAND_S)
        self.srun, own = [], []
        for line in output.splitlines():
            (self.srun if line.startswith("srun: ") else own).append(line)
        return process.returncode, "\n".join(own)

    def started(self, process: subprocess.Popen[str]) -> str:
        """Return the first line of a process, which is written once the process runs."""
        assert process.stdout is not None
        while (line := process.stdout.readline()).startswith("srun: "):
            pass
        return line.strip()

    def end(self) -> None:
        self.slurm.command("scancel", self.id)
        for process in self._started:
            process.communicate(timeout=COMMAND_S)


@pytest.fixture
def job(slurm: SlurmCluster) -> Iterator[Job]:
    begun = Job(slurm)
    try:
        yield begun
    finally:
        begun.end()


def test_steps_are_placed_and_their_exit_codes_are_passed_on(job: Job) -> None:
    assert job.run("proxy-0", f"{WHERE}; exit 4", node=0) == (4, "node1 GPU")
    assert job.run("proxy-1", WHERE, node=1) == (0, "node2 GPU")
    wait = "sleep 600"
    engines = [job.start(f"engine-{i}", f"{WHERE}; {wait}", node=i // 2, gpus=1) for i in range(3)]
    assert sorted(job.started(engine) for engine in engines) == ["node1 GPU 0", "node1 GPU 1", "node2 GPU 0"]
    assert job.run("trainer-0", WHERE, node=1, gpus=1) == (0, "node2 GPU 1")
    code, output = job.run("rollout-0", "kill -9 $$", node=1)  # shares cores with the steps that have GPUs
    assert code == -signal.SIGKILL, output

    code, output = job.run("trainer-1", WHERE, node=0, gpus=1)
    assert code == 1 and "Requested nodes are busy" in job.srun[-1]
    engines[0].terminate()
    assert engines[0].wait(COMMAND_S) == -signal.SIGTERM
    assert job.run("trainer-1", WHERE, node=0, gpus=1)[0] == 0


def test_a_process_can_finish_its_work_after_sigterm(job: Job) -> None:
    process = job.start(
        "trainer-0", "trap 'echo saving; sleep 1; echo saved; exit 3' TERM; echo runs; sleep 600 & wait"
    )
    assert job.started(process) == "runs"
    os.killpg(process.pid, signal.SIGTERM)  # as the supervisor does
    output, _ = process.communicate(timeout=COMMAND_S)
    assert process.returncode == 3 and "saving\nsaved\n" in output


def test_a_process_ends_with_its_supervisor(job: Job) -> None:
    process = job.start("proxy-0", "echo runs; cat; echo ended")
    assert job.started(process) == "runs"
    assert process.communicate(timeout=COMMAND_S)[0] == "ended\n"  # its standard input is closed


def test_the_gpus_of_a_process_whose_launcher_was_killed_go_to_the_next_process(job: Job) -> None:
    first = job.start("engine-0", f"{WHERE}; exec sleep 600", gpus=2)
    assert job.started(first) == "node1 GPU 0,1"
    os.killpg(first.pid, signal.SIGKILL)
    assert job.run("engine-0", WHERE, gpus=2) == (0, "node1 GPU 0,1")


@pytest.mark.parametrize("slurm", [{"missing_s": 600}], indirect=True)  # Slurm notices no loss by itself
def test_processes_of_a_lost_node_run_on_another_or_report_that_there_is_no_room(job: Job) -> None:
    lost = job.start("engine-1", f"{WHERE}; sleep 600", node=1, gpus=1)
    assert job.started(lost) == "node2 GPU 0"

    job.slurm.kill_node("node2")
    assert job.run("proxy-1", WHERE, node=1) == (0, "node1 GPU")  # before Slurm has noticed
    assert lost.poll() is None
    job.slurm.command("scontrol", "update", "nodename=node2", "state=down", "reason=killed")
    output, _ = lost.communicate(timeout=COMMAND_S)
    assert lost.returncode == -signal.SIGKILL and output.endswith("node2 was lost, and engine-1 with it\n")

    assert job.run("engine-1", WHERE, node=1, gpus=1) == (0, "node1 GPU 0")
    other = job.start("engine-0", f"{WHERE}; sleep 600", gpus=2)
    assert job.started(other) == "node1 GPU 0,1"
    code, output = job.run("engine-1", WHERE, node=1, gpus=1)
    assert code == 4 and output.endswith(f"in what is left of job {job.id}, which lost node2")


def test_a_process_that_ends_while_the_controller_is_down_keeps_its_exit_code(job: Job) -> None:
    process = job.start("rollout-0", "echo runs; read line; exit 0")
    assert job.started(process) == "runs"
    time.sleep(3 * LOOK_S)  # time for the launcher to find the step
    job.slurm.stop_controller()
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    time.sleep(20)  # longer than squeue waits for the controller
    job.slurm.start_controller()
    output, _ = process.communicate(timeout=COMMAND_S)
    assert process.returncode == 0, output


def test_a_launcher_whose_supervisor_and_node_are_lost_ends(job: Job) -> None:
    supervisor = job.start(
        "engine-1", f"{WHERE}; sleep 600", node=1, through=("sh", "-c", '"$@"; exit', "sh")
    )
    assert job.started(supervisor) == "node2 GPU"
    job.slurm.kill_node("node2")
    supervisor.kill()
    supervisor.communicate(timeout=COMMAND_S)  # until no process has its output open


def test_a_job_that_is_too_small_for_a_run_is_refused(
    slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**slurm.environment, "SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node[1-2]"}.items():
        monkeypatch.setenv(name, value)
    processes = [RoleProcess("engine", index, ("engine",), gpus=2) for index in range(3)]
    message = (
        "needs 3 nodes with 2 GPUs each, and job 12, in which this command runs, has 2; outside of a job"
    )
    with pytest.raises(ConfigError, match=message):
        SlurmLauncher(SlurmConfig(), processes, gpus_per_node=2).check()
    SlurmLauncher(SlurmConfig(), processes[:2], gpus_per_node=2).check()
