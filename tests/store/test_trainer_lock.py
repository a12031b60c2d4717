"""Only one trainer runs at a time, and which trainer's leases are valid does not depend on any clock."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from store_queries import lease_groups
from store_support import complete_group

from areal_agents.store import Conflict, Store
from areal_agents.store.trainer_lock import TrainerLock

TRAINER = """
import sys, time
from areal_agents.store import Store
with Store.open(sys.argv[1]) as store:
    print(len(store.lease_group_ids(1, step=1)), flush=True)
    time.sleep(600)
"""


def start_trainer(path: Path) -> subprocess.Popen[str]:
    """Start a process that leases a group, and does not end by itself."""
    process = subprocess.Popen([sys.executable, "-c", TRAINER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "1\n"
    process.stdout.close()
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize("jump_s", [-10 * 365 * 86400.0, 0.0, 10 * 365 * 86400.0])
def test_a_lease_lasts_as_long_as_its_trainer_whatever_the_clock_says(
    url: str, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    path = url
    with Store.open(path) as store:
        for name in ("a@0", "b@0"):
            complete_group(store, name, [0, 1])
        trainer = start_trainer(path)
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + jump_s)
        try:
            with pytest.raises(Conflict, match=f":{trainer.pid}:.* is training on"):
                lease_groups(store, 1, step=1)
            assert store.group_counts()["leased"] == 1
        finally:
            kill(trainer)
        store.become_trainer(wait_s=60)  # a PostgreSQL server notices it a moment later
        # the dead trainer's lease is void: its group is the oldest again
        assert [group.id for group in lease_groups(store, 2, step=1)] == ["a@0", "b@0"]


def test_a_trainer_that_is_ending_is_waited_for(url: str) -> None:
    path = url
    with Store.open(path) as store:
        complete_group(store, "a@0", [0])
        trainer = start_trainer(path)
        with pytest.raises(Conflict, match="end it first"):
            store.become_trainer(wait_s=0.05)
        ending = threading.Timer(0.3, kill, [trainer])
        ending.start()
        store.become_trainer(wait_s=60)
        ending.join()
        assert store.return_leases(after_step=7) == 1  # a lease of an earlier step, but of a dead trainer
        assert store.group_counts()["complete"] == 1


def test_a_trainer_waits_for_a_process_that_checks_the_lock(url: str) -> None:
    """An engine pool checks the lock regularly but is no trainer, so the first lease meets no Conflict."""
    path = url
    with Store.open(path) as store, ThreadPoolExecutor(1) as pool:
        complete_group(store, "a@0", [0])
        with TrainerLock.of(path).unheld() as alone:
            assert alone
            with TrainerLock.of(path).unheld() as also:
                assert not also  # of two checks at a time, only one finds the lock free
            leasing = pool.submit(store.lease_group_ids, 1, step=1)
            with pytest.raises(TimeoutError):
                leasing.result(0.2)
        assert leasing.result(60) == ["a@0"]
        with TrainerLock.of(path).unheld() as alone:
            assert not alone
            store.close()
            TrainerLock.of(path).take()  # a check that found the lock held blocks no trainer


def test_a_trainer_takes_the_lock_while_pools_check_it(url: str) -> None:
    """The lock is taken a hundred times, without waiting for an earlier trainer."""
    path, ended = url, threading.Event()
    Store.open(url).close()

    def look() -> int:
        looks = 0
        while not ended.is_set():
            with TrainerLock.of(path).unheld() as alone:
                looks += alone
        return looks

    with ThreadPoolExecutor(2) as pool:
        looking = [pool.submit(look) for _ in range(2)]
        try:
            for _ in range(100):
                lock = TrainerLock.of(path)
                lock.take()
                lock.release()
        finally:
            ended.set()
        assert sum(one.result() for one in looking) > 0


def test_the_oldest_group_is_the_one_that_was_started_first_even_if_the_clock_was_set_back(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store.open(url) as store:
        complete_group(store, "a@0", [0])
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() - 3600)
        complete_group(store, "b@0", [0])
        assert [group.id for group in lease_groups(store, 2, step=1)] == ["a@0", "b@0"]


def test_a_closed_store_leaves_training_to_others(url: str) -> None:
    with Store.open(url) as first, Store.open(url) as second:
        first.become_trainer()
        first.become_trainer()
        with pytest.raises(Conflict):
            second.become_trainer()
        first.close()
        second.become_trainer()
