"""The node and the rank of a process, from the configuration or its launcher, and how ranks end."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from test_train import EXAMPLE

from areal_agents.config import load_config
from areal_agents.errors import ConfigError
from areal_agents.launch.local_ranks import run_ranks
from areal_agents.launch.nodes import Nodes, hosts_of, nodes_of, rank_variables, ranks_beside_engines
from areal_agents.launch.stopping import parameters_of, stop_timeout_s
from areal_agents.launch.supervision import SUPERVISED
from areal_agents.training.config import TrainerConfig

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "MASTER_ADDR": "head", "MASTER_PORT": "29500",
}  # fmt: skip
RAY = {name: value for name, value in TORCHRUN.items() if name != "GROUP_RANK"} | {"NODE_RANK": "1"}
SRUN = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_JOB_NODELIST": "gpu[08-09]", "SLURM_JOB_ID": "1234567",
}  # fmt: skip
ONCE = {  # one process per node
    "torchrun": TORCHRUN | {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
    "srun": SRUN | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)"},
}


def trainer(**settings: Any) -> TrainerConfig:
    return TrainerConfig(**{"ranks": 8, **settings})


def test_nodes_are_read_from_the_configuration() -> None:
    given = trainer(nodes=2, node_rank=1, master="head:29500")
    assert nodes_of(given, {}) == Nodes(2, 1, "head", 29500)
    assert nodes_of(given, ONCE["srun"]) == Nodes(2, 1, "head", 29500)
    assert nodes_of(trainer(nodes=2, node_rank=0, master="[::1]:29500"), {}).host == "::1"
    assert nodes_of(given, {}).local_ranks(8) == 4


def test_nodes_that_are_not_configured_are_read_from_the_environment() -> None:
    assert nodes_of(trainer(), {}) == Nodes()
    assert nodes_of(trainer(), ONCE["srun"]) == Nodes(2, 1, "gpu08", 24567)
    assert nodes_of(trainer(nodes=2, master="head:1"), ONCE["srun"]) == Nodes(2, 1, "head", 1)
    # torchrun itself listens on its port
    assert nodes_of(trainer(), ONCE["torchrun"]) == Nodes(2, 1, "head", 29501)
    # a batch script, a shell in an allocation, and a single task run on one machine
    script = {name: value for name, value in SRUN.items() if "STEP" not in name} | {"SLURM_NTASKS": "8"}
    assert nodes_of(trainer(), script | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}) == Nodes()
    assert nodes_of(trainer(), {"SLURM_JOB_NODELIST": "gpu[08-09]", "SLURM_NTASKS": "2"}) == Nodes()
    assert nodes_of(trainer(), SRUN | {"SLURM_STEP_NUM_TASKS": "1"}) == Nodes()
    assert nodes_of(trainer(nodes=1), ONCE["srun"]) == Nodes()


@pytest.mark.parametrize(
    ("settings", "environment", "message"),
    [
        ({"nodes": 2}, {}, "trainer.nodes is 2, and trainer.node_rank is not known; set trainer.nodes"),
        ({"nodes": 2, "node_rank": 0}, {}, "trainer.master is not known"),
        (
            {},
            SRUN,
            "srun started 4 processes on a node, .* once per node .--ntasks-per-node=1.*each rank",
        ),
        ({}, TORCHRUN, r"started 4 processes on a node, .* \(--nproc-per-node=1\)"),
        ({"nodes": 4}, ONCE["srun"], "trainer.nodes is 4, but srun started 2 processes"),
        ({"ranks": 3}, ONCE["srun"], "3 ranks cannot be spread evenly over 2 nodes; use a multiple of 2"),
        ({}, {"RANK": "0"}, "RANK or WORLD_SIZE is set, but not WORLD_SIZE, LOCAL_RANK, MASTER_ADDR"),
    ],
)
def test_inconsistent_nodes_are_refused(
    settings: dict[str, Any], environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        nodes_of(trainer(**settings), environment)


def test_settings_that_contradict_one_another_are_refused() -> None:
    with pytest.raises(ValueError, match="ranks must be a multiple of nodes, got 8 on 3"):
        trainer(nodes=3)
    with pytest.raises(ValueError, match="node_rank must be from 0 to 1, got 2"):
        trainer(nodes=2, node_rank=2)
    with pytest.raises(ValueError, match="master"):
        trainer(master="head")


@pytest.mark.parametrize("environment", [TORCHRUN, RAY, SRUN], ids=["torchrun", "ray", "srun"])
def test_each_launcher_gives_the_same_ranks(environment: dict[str, str]) -> None:
    found = rank_variables(trainer(), environment)
    ours = {name: found[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    assert ours == {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    if environment is SRUN:
        assert (found["MASTER_ADDR"], found["MASTER_PORT"], found["GROUP_RANK"]) == ("gpu08", "24567", "1")
        named = rank_variables(trainer(), SRUN | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"})
        assert (named["MASTER_ADDR"], named["MASTER_PORT"]) == ("10.0.0.1", "1")


def test_a_number_of_ranks_other_than_the_started_one_is_refused() -> None:
    """Otherwise each of eight processes would train its own run in the same folder."""
    assert rank_variables(trainer(ranks=1), {}) == {}
    with pytest.raises(ConfigError, match=r"trainer.ranks is 1, and .* started is 8 .*make them the same"):
        rank_variables(trainer(ranks=1), SRUN)
    with pytest.raises(ConfigError, match="trainer.ranks is 8, and the number of ranks .* is 1"):
        rank_variables(trainer(), {})


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("gpu1", ["gpu1"]),
        ("gpu[08-10,12],login", ["gpu08", "gpu09", "gpu10", "gpu12", "login"]),
        ("rack[1-2]-node[3,5].x", ["rack1-node3.x", "rack1-node5.x", "rack2-node3.x", "rack2-node5.x"]),
        ("a,b-1", ["a", "b-1"]),
    ],
)
def test_a_list_of_hosts_is_read_as_slurm_writes_it(nodelist: str, hosts: list[str]) -> None:
    assert hosts_of(nodelist) == hosts


@pytest.mark.parametrize("nodelist", ["", "gpu[a-b]", "gpu[1", "gpu]1["])
def test_a_list_of_hosts_that_cannot_be_read_is_refused(nodelist: str) -> None:
    with pytest.raises(ConfigError, match="SLURM_JOB_NODELIST: .*give the first .* as MASTER_ADDR"):
        hosts_of(nodelist)


def test_a_stopped_trainer_may_take_as_long_as_its_checkpoint_needs(tmp_path: Path) -> None:
    """Qwen3-8B has 98 GB of weights and moments, written twice if a checkpoint is already in progress."""
    header = json.dumps({
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "BF16", "shape": [4_000_000, 1024], "data_offsets": [0, 8_192_000_000]},
        "b": {"dtype": "BF16", "shape": [4_000_000_000], "data_offsets": [0, 8_000_000_000]},
    }).encode()  # fmt: skip
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (tmp_path / "damaged.safetensors").write_bytes(b"x")
    assert parameters_of(tmp_path) == 8_096_000_000
    config = load_config(EXAMPLE)
    large = config.model_copy(update={"model": str(tmp_path)})
    assert stop_timeout_s(large) == pytest.approx(60 + 2 * 12 * 8.096e9 / 200e6)
    assert 60 < stop_timeout_s(config) < 65
    assert stop_timeout_s(load_config(EXAMPLE, ["trainer.stop_timeout_s=7"])) == 7
    assert stop_timeout_s(load_config(EXAMPLE, ["trainer.lora.rank=4"])) == 60


WAITING = """
import os, sys, time
from areal_agents.launch.supervision import end_with_supervisor
end_with_supervisor()
print("supervised" if "AREAL_AGENTS_SUPERVISED_S" in os.environ else "the variable is gone", flush=True)
time.sleep(float(sys.argv[1]))
print("slept", flush=True)
"""


def test_a_closed_standard_input_ends_only_processes_that_a_supervisor_started() -> None:
    def waiting(seconds: float, environment: dict[str, str], stdin: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", WAITING, str(seconds)],
            stdin=stdin, stdout=subprocess.PIPE, text=True, env=os.environ | environment,
        )  # fmt: skip

    supervised = waiting(600, {SUPERVISED: "30"}, subprocess.PIPE)
    alone = waiting(0.5, {}, subprocess.DEVNULL)
    assert alone.communicate(timeout=60)[0] == "the variable is gone\nslept\n" and alone.returncode == 0
    assert supervised.stdout is not None and supervised.stdin is not None
    assert supervised.stdout.readline() == "the variable is gone\n"
    supervised.stdin.close()
    assert supervised.wait(60) == -signal.SIGTERM
    supervised.stdout.close()


RANK = """
import os, signal, sys, time
def end(*_):
    time.sleep(float(sys.argv[3]))
    sys.exit(3)
signal.signal(signal.SIGTERM, end)
print(os.environ["RANK"], os.environ["MASTER_ADDR"], file=open(f"{sys.argv[1]}/{os.environ['RANK']}", "w"))
if os.environ["RANK"] == sys.argv[2]:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600 if sys.argv[2] else 0)
"""


@pytest.fixture
def rank_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in place of a rank; its arguments are FOLDER RANK_THAT_IS_KILLED SECONDS_TO_END."""
    (tmp_path / "modules").mkdir()
    monkeypatch.setattr("areal_agents.launch.local_ranks.MODULE", "rank_of_the_tests")
    (tmp_path / "modules" / "rank_of_the_tests.py").write_text(RANK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"), prepend=os.pathsep)
    return tmp_path


def test_the_ranks_of_a_node_are_started_and_end_with_status_0(rank_program: Path) -> None:
    arguments = [str(rank_program), "", "0"]
    assert run_ranks(arguments, 4, Nodes(2, 1, "head", 29500), stop_timeout_s=60) == 0
    assert {f.name for f in rank_program.iterdir() if f.is_file()} == {"2", "3"}
    assert (rank_program / "3").read_text() == "3 head\n"


def test_a_rank_that_is_killed_ends_the_others_of_its_node(
    rank_program: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("areal_agents.launch.local_ranks.FAILED_S", 0.5)
    assert run_ranks([str(rank_program), "1", "0"], 2, Nodes(), stop_timeout_s=60) == 128 + 9
    assert "rank 1 of the trainer was killed by signal 9" in caplog.text


@pytest.mark.parametrize(("ending_s", "limit_s", "expected"), [("0.5", 60, 3), ("600", 1, 128 + 9)])
def test_terminated_ranks_may_take_up_to_the_limit_to_end(
    rank_program: Path, ending_s: str, limit_s: float, expected: int
) -> None:
    ended = threading.Event()

    def tell() -> None:
        while not all((rank_program / rank).exists() for rank in "01"):  # a rank sets its handler before
            if ended.wait(0.01):
                return
        os.kill(os.getpid(), signal.SIGTERM)

    teller = threading.Thread(target=tell)
    teller.start()
    try:
        code = run_ranks([str(rank_program), "none", ending_s], 2, Nodes(), stop_timeout_s=limit_s)
    finally:
        ended.set()
        teller.join()
    assert code == expected


@pytest.mark.parametrize(
    ("settings", "nodes", "ranks"),
    [
        ({"ranks": 16}, 2, 8),
        ({"ranks": 16, "start": False}, 1, 0),  # the ranks may be on any machine
        ({"ranks": 16, "start": False, "nodes": 2}, 1, 8),
    ],
)
def test_the_number_of_ranks_whose_gpus_engines_must_not_use(
    settings: dict[str, Any], nodes: int, ranks: int
) -> None:
    assert ranks_beside_engines(TrainerConfig(**settings), nodes) == ranks
