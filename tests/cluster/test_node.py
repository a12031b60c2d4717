"""What a node of a run does until its supervisor has ended; `make test-cluster` has no cloud to try it on."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from areal_agents.cluster import node
from areal_agents.cluster.launchers.base import RoleProcess
from areal_agents.cluster.place import Place
from areal_agents.cluster.run_record import RunRecord, text_of
from areal_agents.config import load_config
from areal_agents.errors import ConfigError
from areal_agents.store import Store

QUICK_START = Path(__file__).parents[2] / "examples/search_agent/config.yaml"
IDLE = 1  # the number of a node that has no process: the first has the only one of each role
URL = "unused, since no process is started"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store.db") as opened:
        config = load_config(QUICK_START, [f"run_dir={tmp_path / 'run'}"])
        record = RunRecord.of(text_of(config, tmp_path), nodes=1, first_version=0, admin_key="")
        record.write(opened)
        yield opened


def test_a_node_ends_with_the_supervisor(store: Store, tmp_path: Path) -> None:
    with Place.claim(store, "supervisor", 0, host="127.0.0.1"):
        pass  # one that has ended before is not that of this start

    def supervise() -> None:
        with Place.claim(store, "supervisor", 0, host="127.0.0.1"):
            deadline = time.monotonic() + 60
            while not (tmp_path / "run" / "logs").exists() and time.monotonic() < deadline:
                time.sleep(0.02)

    with ThreadPoolExecutor() as pool:
        supervised = pool.submit(supervise)
        assert node.run_node(store, URL, IDLE, 2, supervisor=None) == 0
        supervised.result(timeout=30)
    [row] = store.role_rows("supervisor")
    assert (row.epoch, row.state) == (2, "ended")


def test_the_first_node_ends_as_its_supervisor(store: Store) -> None:
    supervisor = subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(7)"])
    with pytest.raises(ConfigError, match="the supervisor has ended before the run began"):
        supervisor.wait(30)
        node.run_node(store, URL, IDLE, 2, supervisor=supervisor)
    with Place.claim(store, "supervisor", 0, host="127.0.0.1"):
        assert node.run_node(store, URL, IDLE, 2, supervisor=supervisor) == 7


def test_processes_of_a_node_share_no_gpu() -> None:
    processes = [RoleProcess("engine", index, (), gpus=gpus) for index, gpus in enumerate((2, 0, 4))]
    assert [gpus for _, gpus in node.with_gpus(processes)] == ["0,1", "", "2,3,4,5"]
