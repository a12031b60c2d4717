"""A trainer on two nodes, which are two process trees on loopback, started as torchrun and srun do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from run_logs import ends_of_logs
from training_support import record_groups

from areal_agents.config import load_config, save_config
from areal_agents.inference import running_engine
from areal_agents.inference.ports import reserved_ports
from areal_agents.launch.run_folder import Endpoints, RunFolder
from areal_agents.store import Store

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "search_agent" / "config.yaml"
TIMEOUT_S = 240
COMMAND = ["-m", "areal_agents", "processes", "trainer", "--folder"]
WITHOUT_INPUT = ["sh", "-c", 'exec "$@" <&-', "sh"]  # standard input is closed, not empty


def configured(folder: RunFolder, model: Path, engine_url: str, steps: int) -> None:
    """Write what every rank reads: the configuration, and where the engine is."""
    settings = {
        "model": model, "run_dir": folder.root, "rollout.groups": 2, "rollout.group_size": 4,
        "rollout.max_staleness": 20, "eval": "null", "algorithm.drop_equal_groups": "false",
        "trainer.ranks": 2, "trainer.steps": steps, "trainer.checkpoint_every": 1, "trainer.device": "cpu",
        "trainer.warmup_steps": 0, "trainer.threads": 1, "trainer.join_timeout_s": 120,
    }  # fmt: skip
    config = load_config(EXAMPLE, [f"{key}={value}" for key, value in settings.items()])
    folder.log("x").parent.mkdir(parents=True, exist_ok=True)
    save_config(config, folder.config)
    folder.write_endpoints(Endpoints((engine_url,), "127.0.0.1", 1, "admin"))


def torchrun(folder: RunFolder, node: int, port: int) -> list[str]:
    place = ["--nnodes=2", "--nproc-per-node=1", f"--node-rank={node}"]
    place += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    return [*WITHOUT_INPUT, sys.executable, "-m", "torch.distributed.run", *place, *COMMAND, str(folder.root)]


def as_srun(node: int, port: int) -> dict[str, str]:
    """The variables of a task of `srun --nodes=2 --ntasks-per-node=1`."""
    return {
        "SLURM_PROCID": str(node), "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0",
        "SLURM_NODEID": str(node),
        "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_JOB_NODELIST": "localhost,other", "SLURM_JOB_ID": "1",
        "MASTER_PORT": str(port),
    }  # fmt: skip


@contextmanager
def two_nodes(
    folder: RunFolder, command: Callable[[int], list[str]], variables: Callable[[int], dict[str, str]]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the processes of both nodes, each in a session of its own; kill all of them at the end."""
    started: list[subprocess.Popen[bytes]] = []
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    try:
        for node in range(2):
            with open(folder.log(f"node-{node}"), "ab") as log:
                started.append(
                    subprocess.Popen(
                        command(node),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env=environment | variables(node),
                        start_new_session=True,
                    )
                )
        yield started
    finally:
        for process in started:
            kill_node(process)
            process.wait(30)


def kill_node(process: subprocess.Popen[bytes]) -> None:
    """Kill a node's processes as a power failure does: the agent, and the ranks in sessions of their own."""
    for pid in [process.pid, *descendants(process.pid)]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def descendants(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(") ")[2].split()[1])
            except (OSError, IndexError):
                continue
            if parent == pid:
                found += [int(entry.name), *descendants(int(entry.name))]
    return found


def ended(process: subprocess.Popen[bytes], folder: RunFolder) -> int:
    try:
        return process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pytest.fail("a node did not end" + ends_of_logs(folder.root))


def steps_of(folder: RunFolder) -> list[int]:
    lines = folder.metrics.read_text().splitlines() if folder.metrics.exists() else []
    return [json.loads(line)["step"] for line in lines]


def test_two_nodes_train_and_publish_and_resume_after_one_is_lost(model_folder: Path, tmp_path: Path) -> None:
    """torchrun's agents start the run, and srun's tasks resume it. Neither has a standard input."""
    folder = RunFolder(tmp_path / "run")
    with (
        reserved_ports(2) as (port, other_port),
        running_engine(model_folder, kernel="torch", threads=1, slots=16, max_context=256) as url,
    ):
        configured(folder, model_folder, url, steps=3)
        with Store.open(folder.store) as store:
            record_groups(store, url, ["a", "b", "c", "d"])
            with two_nodes(folder, lambda node: torchrun(folder, node, port), lambda node: {}) as nodes:
                deadline = time.monotonic() + TIMEOUT_S
                checkpoint = folder.root / "checkpoints" / "step-2"
                while not checkpoint.exists():  # then both ranks wait, the first one for a batch
                    alive = all(node.poll() is None for node in nodes)
                    assert alive and time.monotonic() < deadline, ends_of_logs(folder.root)
                    time.sleep(0.1)
                kill_node(nodes[1])
                assert ended(nodes[0], folder) != 0
            said = folder.log("node-0").read_text()
            assert "rank 1 on node 1" in said and "is lost: its process ended" in said
            assert steps_of(folder) == [1, 2] and store.latest_version().version == 2  # type: ignore[union-attr]

            record_groups(store, url, ["e", "f"])
            command = [*WITHOUT_INPUT, sys.executable, *COMMAND, str(folder.root)]
            with two_nodes(folder, lambda node: command, lambda node: as_srun(node, other_port)) as nodes:
                codes = [ended(node, folder) for node in nodes]
            assert codes == [0, 0], ends_of_logs(folder.root)
            assert steps_of(folder) == [1, 2, 3]
            assert store.group_counts()["trained"] == 6
            latest = store.latest_version()
            assert latest is not None and (latest.step, latest.version > 3) == (3, True)
            assert folder.final_model.is_dir()
