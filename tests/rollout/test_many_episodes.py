"""Thousands of episodes at the same time: two proxy workers, two rollout processes, two scripted engines.

Each episode waits between two model calls until all others have begun, so all of them are open at once.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from store_queries import lease_groups

from areal_agents.rollout.config import LimitsConfig, RolloutConfig
from areal_agents.store import Store
from areal_agents.testing.server import running_process

HERE = Path(__file__).parent
MODEL = HERE.parents[1] / "examples" / "search_agent" / "model"
GROUP_SIZE = 8
HOUR_S = 3600.0
PROCESSES = 2  # the numbers of proxy workers, of rollout processes and of engines
LIMIT_BYTES = 4 * 10**9  # of all proxy and rollout processes together

ROLLOUT = """
import asyncio, sys
from areal_agents.rollout.config import DataConfig, RolloutConfig
from areal_agents.rollout.runner import run
from areal_agents.rollout.worker_share import WorkerShare
from areal_agents.sockets import allow_many_connections
from areal_agents.store import Store
url, store, data, rollout, agent, index, count = sys.argv[1:]
allow_many_connections()
with Store.open(store) as store:
    asyncio.run(run(store=store, proxy_url=url, admin_key=None, agent=agent,
        data=DataConfig.model_validate_json(data), rollout=RolloutConfig.model_validate_json(rollout),
        evaluation=None, steps=1,
        worker=WorkerShare(int(index), int(count), f"rollout-{index}", lambda runner: True)))
"""


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("episodes", [2_000, 10_000])
def test_thousands_of_episodes_are_open_at_once_and_none_is_lost(tmp_path: Path, episodes: int) -> None:
    go = tmp_path / "go"
    groups = episodes // GROUP_SIZE
    rows = [{"id": f"t{n}", "n": n, "go": str(go), "text": f"Begin with {n}."} for n in range(groups)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    rollout = RolloutConfig(
        groups=groups,
        group_size=GROUP_SIZE,
        max_staleness=0,
        concurrency=episodes,
        limits=LimitsConfig(time_s=HOUR_S),
    )
    path = tmp_path / "store.db"
    with Store.open(path) as store, ExitStack() as stack:
        engines = [
            stack.enter_context(running_process(MODEL, ["--reply-tokens", "16"])) for _ in range(PROCESSES)
        ]
        publish(store, engines, 0)
        proxy, url = stack.enter_context(proxy_of(engines, path))
        given = [json.dumps({"path": str(tmp_path / "tasks.jsonl")}), rollout.model_dump_json()]
        command = [sys.executable, "-c", ROLLOUT, url, str(path), *given]
        command.append(f"{HERE / 'many_agents.py'}:waits_for_all")
        rollouts = [
            stack.enter_context(ended([*command, str(index), str(PROCESSES)])) for index in range(PROCESSES)
        ]

        def counted(query: str) -> int:
            with closing(sqlite3.connect(path)) as connection:
                return int(connection.execute(query).fetchone()[0])

        most = Memory([proxy.pid, *(process.pid for process in rollouts)])
        is_open = "SELECT count(DISTINCT episode_id) FROM turns JOIN episodes ON episodes.id = episode_id"
        is_open += " WHERE status = 'open'"
        until(lambda: counted(is_open) == episodes, rollouts, most)
        began = time.monotonic()
        go.touch()
        whole = "SELECT count(*) FROM groups WHERE state = 'complete'"
        until(lambda: counted(whole) == groups, rollouts, most)
        print(
            f"{episodes} episodes: {most.bytes / 1e6:.0f} MB, {most.each}, "
            f"the second half in {time.monotonic() - began:.0f} s, "
            f"{[cpu_s(pid) for pid in most.pids]} s of CPU"
        )
        batch = lease_groups(store, groups, step=1)
        assert len(batch) == groups
        store.mark_trained([group.id for group in batch], step=1, version=1)
        publish(store, engines, 1)
        assert [process.wait(60) for process in rollouts] == [0] * PROCESSES
        assert not store.episodes(status="open") and store.group_counts()["trained"] == groups
        whole_ones = store.episodes(status="finished")
        assert len(whole_ones) == episodes and {e.turns for e in whole_ones} == {2}
    assert most.bytes < LIMIT_BYTES


class Memory:
    """The peak memory of processes and their children together."""

    def __init__(self, roots: list[int]) -> None:
        self._roots = roots
        self.bytes = 0
        self.pids: list[int] = []
        self.each: list[int] = []

    def look(self) -> None:
        """Measure once."""
        pids = [pid for root in self._roots for pid in family(root)]
        each = [pss(pid) for pid in pids]
        if sum(each) > self.bytes:
            self.bytes, self.pids, self.each = sum(each), pids, [one // 10**6 for one in each]


def family(root: int) -> list[int]:
    """A process and its descendants."""
    found = [root]
    for pid in found:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            for task in Path(f"/proc/{pid}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def pss(pid: int) -> int:
    """The proportional set size of a process, in bytes."""
    lines: list[str] = []
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def cpu_s(pid: int) -> int:
    """The processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) // os.sysconf("SC_CLK_TCK")


def until(is_so: Callable[[], bool], processes: list[subprocess.Popen[bytes]], most: Memory) -> None:
    """Wait until a condition is true, for at most 40 minutes, and measure memory meanwhile."""
    deadline = time.monotonic() + 2400
    while not is_so():
        assert time.monotonic() < deadline and all(process.poll() is None for process in processes)
        most.look()
        time.sleep(1.0)
    most.look()


def publish(store: Store, engines: list[str], version: int) -> None:
    """Publish a version, and have the engines serve it."""
    store.publish_version(version, step=version, path=str(MODEL))
    update = {"model_path": str(MODEL), "weight_version": str(version)}
    for engine in engines:
        httpx.post(f"{engine}/update_weights_from_disk", json=update, timeout=30).raise_for_status()


@contextmanager
def ended(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process for the duration of the with-block."""
    process = subprocess.Popen(command)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def proxy_of(engines: list[str], store: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a proxy of several workers for the engines; yield its process and its URL."""
    command = [sys.executable, "-m", "areal_agents.cli", "serve", "--model", str(MODEL)]
    command += [part for url in engines for part in ("--engine-url", url)]
    command += ["--store", str(store), "--port", "0", "--workers", str(PROCESSES)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield process, re.findall(r"http://[0-9.]+:\d+", line)[0]
    finally:
        process.terminate()
        process.wait(60)
