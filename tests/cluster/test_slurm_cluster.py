"""The emulated nodes behave as Slurm's manual says. The launcher relies on the behavior tested here."""

from __future__ import annotations

import pytest
from slurm_cluster import SlurmCluster

pytestmark = pytest.mark.cluster

WAITS = "--wrap=touch started-$SLURM_RESTART_COUNT; sleep 600"


def submit(slurm: SlurmCluster, *options: str) -> str:
    return slurm.command("sbatch", "--parsable", "--output=job.txt", *options).stdout.strip()


def test_srun_runs_on_each_node_and_returns_exit_codes(slurm: SlurmCluster) -> None:
    for node in slurm.nodes:
        where = slurm.command("srun", "-w", node, "sh", "-c", "echo $SLURMD_NODENAME").stdout
        assert where == f"{node}\n"
    assert slurm.command("srun", "sh", "-c", "exit 7", check=False).returncode == 7
    assert slurm.command("srun", "sh", "-c", "kill -9 $$", check=False).returncode == 137


def test_exact_steps_get_gpus_of_their_own_and_overlapping_steps_get_none(
    slurm: SlurmCluster,
) -> None:
    exact = "srun --exact --nodes=1 --ntasks=1 --mem=0 --cpus-per-task=2 --gpus-per-node=1"
    shared = "srun --overlap --nodes=1 --ntasks=1 --mem=0 --gpus-per-node=0"
    say = "sh -c 'echo $SLURMD_NODENAME GPU $CUDA_VISIBLE_DEVICES; until test -f all; do sleep 0.05; done'"
    script = f"unset SLURM_GPUS_PER_NODE\nfor i in 1 2 3 4; do {exact} {say} & done\n{shared} {say} &\nwait"
    job = submit(
        slurm, "--nodes=2", "--exclusive", "--mem=0", "--gpus-per-node=2", "--wrap", f"#!/bin/sh\n{script}"
    )
    output = slurm.folder / "job.txt"
    slurm.until(lambda: output.exists() and output.read_text().count("GPU") == 5, "all steps to run at once")
    (slurm.folder / "all").touch()
    slurm.until(lambda: slurm.job(job)["JobState"] == "COMPLETED", "the job to end")
    lines = sorted(output.read_text().splitlines())
    assert [line for line in lines if line[-1].isdigit()] == [
        "node1 GPU 0", "node1 GPU 1", "node2 GPU 0", "node2 GPU 1",
    ]  # fmt: skip
    assert len(lines) == 5


def test_scancel_ends_a_job(slurm: SlurmCluster) -> None:
    job = submit(slurm, WAITS)
    slurm.until(lambda: slurm.job(job)["JobState"] == "RUNNING", "the job to run")
    slurm.command("scancel", job)
    slurm.until(lambda: slurm.job(job)["JobState"] == "CANCELLED", "the job to be cancelled")
    slurm.until(lambda: set(slurm.node_states().values()) == {"idle"}, "the nodes to be free")


def test_a_requeued_job_starts_again(slurm: SlurmCluster) -> None:
    job = submit(slurm, "--requeue", WAITS)
    slurm.until((slurm.folder / "started-").exists, "the job to run")
    slurm.command("scontrol", "requeue", job)
    slurm.until((slurm.folder / "started-1").exists, "the job to run again")


def test_a_job_continues_without_a_killed_node_unless_it_is_the_first(slurm: SlurmCluster) -> None:
    job = submit(slurm, "--nodes=2", "--no-kill", "--requeue", WAITS)
    slurm.until((slurm.folder / "started-").exists, "the job to run")
    assert slurm.job(job)["NodeList"] == "node[1-2]"

    slurm.kill_node("node2")
    slurm.until(lambda: slurm.node_states()["node2"] == "down*", "Slurm to miss the node")
    assert (slurm.job(job)["NodeList"], slurm.job(job)["JobState"]) == ("node1", "RUNNING")
    slurm.start_node("node2")
    slurm.until(lambda: slurm.node_states()["node2"] == "idle", "the node to come back")

    slurm.kill_node("node1", noticed=True)
    slurm.until(lambda: slurm.job(job)["JobState"] == "PENDING", "Slurm to requeue the job")
    slurm.start_node("node1")
    slurm.until((slurm.folder / "started-1").exists, "the job to run again")
    assert slurm.job(job)["NodeList"] == "node[1-2]"


def test_a_cluster_leaves_no_processes_and_no_files(slurm: SlurmCluster) -> None:
    with SlurmCluster(nodes=1) as other:
        submit(other, WAITS)
        other.until((other.folder / "started-").exists, "the job to run")
        pids = other.pids()
        assert len(pids) > 5  # three daemons, and the processes of the job
    assert other.pids() == set() and not other.folder.exists()
    assert set(slurm.node_states().values()) == {"idle"}
