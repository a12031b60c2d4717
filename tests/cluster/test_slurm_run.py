"""A run of the quick start as a Slurm job on two nodes, which loses one node and is requeued."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from postgres_server import PostgresServer
from slurm_cluster import COMMAND_S, SlurmCluster

ROOT = Path(__file__).parents[2]
STEPS = 8
SMALL = (
    f"trainer.steps={STEPS}", "trainer.warmup_steps=0", "trainer.trackers=[]", "rollout.groups=2",
    "rollout.group_size=4", "eval.episodes=4", "eval.every=100", "trial=false",
    "engine.replicas=2", "cluster.proxies=2", "cluster.gpus_per_node=0", "cluster.slurm.nodes=2",
    "cluster.cpus.engine=1", "cluster.cpus.trainer=1", "cluster.cpus.rollout=1",
)  # fmt: skip
RUN_S = 400.0  # the longest wait, on two busy cores

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(8 * RUN_S)]  # more than all waits together


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    missing = PostgresServer.missing()
    if missing:
        pytest.skip(missing)
    with PostgresServer() as server:
        yield server


class Job:
    """A run that was submitted from a folder with a space in its name."""

    def __init__(self, slurm: SlurmCluster, store: str, folder: Path) -> None:
        self._slurm = slurm
        self.folder = folder / "my runs" / "run"
        self.folder.parent.mkdir()
        command = [
            sys.executable, "-m", "areal_agents", "train", str(ROOT / "examples/search_agent/config.yaml"),
            f"store.url={store}", "run_dir=run", *SMALL, "--launcher", "slurm", "--fresh",
        ]  # fmt: skip
        done = subprocess.run(
            command, cwd=self.folder.parent, env={**os.environ, **slurm.environment, "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, timeout=COMMAND_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        self.id = done.stdout.split()[1]
        assert done.stdout.startswith(f"job {self.id} is submitted; its output: tail -F ")

    @property
    def state(self) -> str:
        return self._slurm.job(self.id)["JobState"]

    @property
    def output(self) -> str:
        path = self.folder.with_name(f"run-slurm-{self.id}.log")
        return path.read_text() if path.exists() else ""

    def steps(self) -> list[int]:
        path = self.folder / "metrics.jsonl"
        return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []

    def nodes(self) -> dict[str, str]:
        """Return the node of each process."""
        listed = self._slurm.command("squeue", "--noheader", "--steps", "--format=%j %N").stdout
        return dict(line.split() for line in listed.splitlines())

    def until(self, condition: object, what: str) -> None:
        assert callable(condition)

        def holds() -> bool:
            assert self.state not in ("FAILED", "CANCELLED"), self.output
            return bool(condition())

        self._slurm.until(holds, what, timeout_s=RUN_S)


def test_a_run_survives_the_loss_of_a_node_and_is_requeued_at_its_time_limit(
    slurm: SlurmCluster, postgres: PostgresServer, tmp_path: Path
) -> None:
    job = Job(slurm, postgres.new_store(), tmp_path)
    job.until(job.steps, "a step to be trained")
    nodes = job.nodes()
    expected = {"engine-0": "node1", "engine-1": "node2", "proxy-0": "node1", "proxy-1": "node2"}
    assert {name: nodes.get(name) for name in expected} == expected

    slurm.kill_node("node2", noticed=True)
    job.until(lambda: job.nodes().get("engine-1") == "node1", "the engine to start on the other node")
    job.until(lambda: job.nodes().get("proxy-1") == "node1", "the proxy to start on the other node")
    trained = len(job.steps())
    job.until(lambda: len(job.steps()) > trained, "a step to be trained on the node that is left")

    slurm.start_node("node2")
    slurm.command("scancel", "--batch", f"--signal={signal.SIGUSR1.value}", job.id)  # as at the time limit
    job.until(lambda: slurm.job(job.id)["Restarts"] == "1", "the job to be requeued")
    trained = len(job.steps())
    assert f"job {job.id} is requeued: its time limit is near" in job.output
    job.until(lambda: job.state == "COMPLETED", "the run to end")
    assert job.steps() == list(range(1, STEPS + 1))
    assert f"which has trained {trained} steps" in job.output and "held-out after" in job.output
    assert slurm.job(job.id)["ExitCode"] == "0:0"
