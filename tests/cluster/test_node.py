"""The program of a node, which runs until its supervisor has ended. No test runs it in a cloud."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

import pytest

from areal_agents.cluster import node
from areal_agents.cluster.launchers.base import RoleProcess
from areal_agents.cluster.place import Place
from areal_agents.cluster.run_record import RunRecord, text_of
from areal_agents.config import load_config
from areal_agents.errors import ConfigError
from areal_agents.store import Store

QUICK_START = Path(__file__).parents[2] / "examples/search_agent/config.yaml"
IDLE = 1  # a node without processes: the first node has the only process of each role
URL = "unused, since no process is started"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store.db") as opened:
        yield opened


@contextmanager
def supervising(store: Store, folder: Path, *, pause_s: float = 0.0) -> Iterator[Path]:
    """Act as the supervisor: take its place, write its record `pause_s` later, and yield its run folder."""
    with Place.claim(store, "supervisor", 0, host="127.0.0.1") as place:
        time.sleep(pause_s)
        run = folder / f"run-{place.row.epoch}"
        text = text_of(load_config(QUICK_START, [f"run_dir={run}"]), folder)
        record = RunRecord.of(text, nodes=1, first_version=0, epoch=place.row.epoch)
        record.write(store)
        yield run


def wait_for_node(run: Path) -> None:
    """Wait until a node has begun to run the processes of the run in this folder."""
    deadline = time.monotonic() + 60
    while not (run / "logs").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("ends", [True, False])
def test_a_node_runs_the_processes_of_the_newest_supervisor_and_ends_with_it(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """The earlier supervisor ended before the node was started, or was killed while the node was running."""
    monkeypatch.setattr(node, "POLL_S", 0.02)
    first = tmp_path / "run-1"

    def supervise() -> None:
        if not ends:
            wait_for_node(first)
            store.claim_role("supervisor", 0, host="elsewhere", pid=1, gone=1)
            store.leave_role("supervisor", 0, 2)
        with supervising(store, tmp_path, pause_s=0.2) as second:
            wait_for_node(second)

    with ThreadPoolExecutor() as pool, ExitStack() as earlier:
        assert earlier.enter_context(supervising(store, tmp_path)) == first
        if ends:
            earlier.close()
        supervised = pool.submit(supervise)
        assert node.run_node(store, URL, IDLE, 2, supervisor=None) == 0
        supervised.result(timeout=30)
    assert (first / "logs").exists() is not ends
    [row] = store.role_rows("supervisor")
    assert row.state == "ended"


def test_the_supervisor_ends_when_its_node_is_killed(store: Store, tmp_path: Path) -> None:
    said = tmp_path / "pid"
    supervisor = (
        "import os, pathlib, sys, time; from areal_agents.launch.supervision import end_with_supervisor; "
        "end_with_supervisor(); pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(100)"
    )
    command = [
        sys.executable,
        "-m",
        "areal_agents.cluster.node",
        f"--run={store.url}",
        "--node=0",
        "--nodes=1",
    ]
    own = subprocess.Popen([*command, "--", sys.executable, "-c", supervisor, str(said)])
    deadline = time.monotonic() + 60
    while not (said.exists() and said.read_text()):
        assert own.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    with open(f"/proc/{said.read_text()}/stat") as stat:
        own.kill()
        own.wait(30)
        while _is_running(stat):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def _is_running(stat: TextIO) -> bool:
    """Whether the process of an open /proc/PID/stat is running; the file never refers to another process."""
    try:
        stat.seek(0)
        return stat.read().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False


def test_the_first_node_ends_with_the_exit_code_of_its_supervisor(store: Store, tmp_path: Path) -> None:
    supervisor = subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(7)"])
    with pytest.raises(ConfigError, match="the supervisor has ended before the run began"):
        supervisor.wait(30)
        node.run_node(store, URL, IDLE, 2, supervisor=supervisor)
    supervisor = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(7)"], stdin=subprocess.PIPE
    )
    assert supervisor.stdin is not None
    with supervising(store, tmp_path) as run, ThreadPoolExecutor() as pool:
        pool.submit(wait_for_node, run).add_done_callback(lambda _: supervisor.stdin.close())
        assert node.run_node(store, URL, IDLE, 2, supervisor=supervisor) == 7


def test_processes_of_a_node_share_no_gpu() -> None:
    processes = [RoleProcess("engine", index, (), gpus=gpus) for index, gpus in enumerate((2, 0, 4))]
    assert [gpus for _, gpus in node.with_gpus(processes)] == ["0,1", "", "2,3,4,5"]
