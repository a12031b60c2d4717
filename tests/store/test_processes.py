"""Several processes on one store: acknowledged writes survive kill -9, and races lose no writes."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from store_queries import lease_groups
from store_support import complete_group, make_turn, open_episode, reward

from areal_agents.store import Conflict, Store

HERE = Path(__file__).parent

WRITER = """
import itertools, sys
sys.path.insert(0, sys.argv[2])
from store_support import make_turn
from areal_agents.store import Store
store = Store.open(sys.argv[1])
for index in itertools.count():
    futures = [store.add_turn("e", make_turn(f"{index}/{n}")) for n in range(7)]
    for future in futures:
        future.result()
    print(index, flush=True)  # only now is it acknowledged
"""


def test_kill_9_loses_nothing_that_was_acknowledged(url: str) -> None:
    with Store.open(url) as store:
        open_episode(store, "e")
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, url, str(HERE)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    acknowledged = [int(process.stdout.readline()) for _ in range(40)]
    process.send_signal(signal.SIGKILL)
    acknowledged += [int(line) for line in process.stdout if line.endswith("\n")]
    process.wait()
    with Store.open(url) as store:
        turns = {turn.id for turn in store.load_episode("e").turns}
        assert {f"{index}/{n}" for index in acknowledged for n in range(7)} <= turns
        store.add_turn("e", make_turn("afterwards")).result()


def write_turns(path: str, name: str, count: int) -> None:
    """Run in another process."""
    with Store.open(path) as store:
        for index in range(count):
            store.add_turn("e", make_turn(f"{name}/{index}")).result()


def open_store(path: str) -> None:
    """Run in another process."""
    Store.open(path).close()


def spawn(target: Any, *arguments: Any) -> Any:
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments)
    process.start()
    return process


def test_several_processes_may_write_at_once(url: str) -> None:
    path = url
    with Store.open(path) as store:
        open_episode(store, "e")
        others = [spawn(write_turns, path, name, 150) for name in ("a", "b")]
        for index in range(150):
            store.add_turn("e", make_turn(f"c/{index}")).result()
        for other in others:
            other.join()
            assert other.exitcode == 0
        ids = [turn.id for turn in store.load_episode("e").turns]
    assert set(ids) == {f"{name}/{index}" for name in "abc" for index in range(150)}
    for name in "abc":
        assert [id for id in ids if id[0] == name] == [f"{name}/{index}" for index in range(150)]


def test_processes_may_create_the_store_together(url: str) -> None:
    path = url
    others = [spawn(open_store, path) for _ in range(3)]
    with Store.open(path) as store:
        open_episode(store, "e")
    for other in others:
        other.join()
        assert other.exitcode == 0


def lease_all(path: str, groups: int) -> None:
    """Run in another process: take the groups one by one."""
    with Store.open(path) as store:
        for step in range(groups):
            assert lease_groups(store, 1, step=step)


def test_a_reward_is_either_in_the_leased_group_or_refused(url: str) -> None:
    """Proxy and trainer race for each group: the trainer sees every reward that is accepted."""
    path = url
    with Store.open(path) as store:
        names = [f"g{index}@0" for index in range(60)]
        for name in names:
            complete_group(store, name, [0.0])
        trainer = spawn(lease_all, path, len(names))
        accepted = dict.fromkeys(names, 0)
        while trainer.is_alive():
            for name in names:
                try:
                    store.set_rewards(f"{name}/0", reward(accepted[name] + 1)).result()
                except Conflict:
                    continue
                accepted[name] += 1
        assert trainer.exitcode == 0
        for name in names:
            with pytest.raises(Conflict):
                store.set_rewards(f"{name}/0", reward(-1)).result()
            assert store.load_groups([name])[0].rollouts[0].episode.score == accepted[name]


def publish(path: str, after_s: float) -> None:
    """Run in another process."""
    with Store.open(path) as store:
        time.sleep(after_s)
        store.publish_version(0, step=0, path="v0")


def test_waiting_sees_commits_of_every_process(url: str) -> None:
    path = url
    with Store.open(path) as store:
        cursor = store.cursor()
        assert store.wait(cursor, timeout_s=0.05) == cursor  # nothing happened
        other = spawn(publish, path, 0.1)
        changed = store.wait(cursor, timeout_s=30)
        while store.latest_version() is None:  # opening the store may have committed something first
            changed = store.wait(changed, timeout_s=30)
        other.join()
        cursor = store.cursor()
        threading.Timer(0.05, lambda: store.publish_version(1, step=1, path="v1")).start()
        assert store.wait(cursor, timeout_s=30) != cursor
        assert store.max_version() == 1
