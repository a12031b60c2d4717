"""How a process of a cluster run takes its place, and learns that it has lost this place."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_agents.cluster import place
from areal_agents.cluster.place import CUT_OFF_S, Place, address_for_store
from areal_agents.errors import ConfigError
from areal_agents.launch.run_folder import Endpoints
from areal_agents.store import Store
from areal_agents.store.postgres import host_of


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store.db") as opened:
        yield opened


def test_a_place_has_the_announced_address_and_is_free_at_the_end(store: Store) -> None:
    with Place.claim(store, "proxy", 0, host="127.0.0.1") as own:
        own.announce("http://127.0.0.1:1")
        assert store.addresses("proxy") == {0: "http://127.0.0.1:1"} and own.loss is None
    assert store.addresses("proxy") == {}


def test_a_place_of_another_running_process_is_refused(store: Store) -> None:
    store.claim_role("proxy", 0, host="elsewhere", pid=1)
    with pytest.raises(
        ConfigError, match=r"proxy 0 of this run is running: process 1 on elsewhere.*another index"
    ):
        Place.claim(store, "proxy", 0, host="127.0.0.1", wait_s=0.0)


def test_the_place_of_a_killed_process_of_this_machine_is_free_at_once(store: Store) -> None:
    code = (
        "import os, sys; from areal_agents.cluster.place import Place; from areal_agents.store import Store; "
        'Place.claim(Store.open(sys.argv[1]), "engine", 0, host="127.0.0.1"); os.kill(os.getpid(), 9)'
    )
    killed = subprocess.run([sys.executable, "-c", code, store.url], timeout=60)
    assert killed.returncode == -signal.SIGKILL
    with Place.claim(store, "engine", 0, host="127.0.0.1", wait_s=0.0) as own:
        assert own.row.epoch == 2
        with pytest.raises(ConfigError, match="is running"):
            Place.claim(store, "engine", 0, host="127.0.0.1", wait_s=0.0)


def test_a_place_is_not_free_while_a_child_of_its_process_is_still_running(store: Store) -> None:
    code = (
        "import os, subprocess, sys; from areal_agents.cluster.place import Place; "
        "from areal_agents.store import Store; "
        'own = Place.claim(Store.open(sys.argv[1]), "engine", 0, host="127.0.0.1"); '
        "child = subprocess.Popen(['sleep', '100'], stdout=subprocess.DEVNULL, pass_fds=(own.lock_fd,)); "
        "print(child.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code, store.url], timeout=60, stdout=subprocess.PIPE)
    try:
        with pytest.raises(ConfigError, match="is running"):
            Place.claim(store, "engine", 0, host="127.0.0.1", wait_s=0.0)
    finally:
        os.kill(int(killed.stdout), signal.SIGKILL)
    with Place.claim(store, "engine", 0, host="127.0.0.1", wait_s=10.0) as own:
        assert own.row.epoch == 2


def test_a_process_id_that_does_not_exist_here_does_not_free_a_place(store: Store) -> None:
    """Two containers can have the same address, but do not see each other's processes."""
    store.claim_role("engine", 0, host="127.0.0.1", pid=2**22 + 1)  # above the largest process id
    with pytest.raises(ConfigError, match="is running"):
        Place.claim(store, "engine", 0, host="127.0.0.1", wait_s=0.0)


def test_a_process_that_cannot_reach_the_store_considers_its_place_lost(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, "BEAT_S", 0.02)
    clock = Clock()
    monkeypatch.setattr(place, "time", clock)
    with Place.claim(store, "engine", 0, host="127.0.0.1") as own:
        clock.now += CUT_OFF_S / 2
        for _ in range(3):  # the second begins after the change of the clock, and ends before the third
            wait_for_heartbeat(store)
        clock.now += CUT_OFF_S / 2 + 1
        assert own.loss is None  # the last heartbeat is not as old as the place
        with sqlite3.connect(store.path, timeout=60, isolation_level=None) as other:
            other.execute("BEGIN EXCLUSIVE")
            clock.now += CUT_OFF_S + 1
            wait_for_loss(own, "engine 0 has not reached the store for 120 s, so another may have its place")
            other.execute("ROLLBACK")


class Clock:
    """Replaces the module `time`; it shows the time that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def wait_for_heartbeat(store: Store) -> None:
    """Wait until engine 0 writes its next heartbeat."""
    [earlier] = store.role_rows("engine")
    deadline = time.monotonic() + 60
    while store.role_rows("engine")[0].beat_at == earlier.beat_at:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for_loss(own: Place, expected: str) -> None:
    deadline = time.monotonic() + 60
    while own.loss is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert own.loss is not None and own.loss.startswith(expected)


def test_a_process_learns_from_its_heartbeat_that_its_place_was_taken(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, "BEAT_S", 0.02)
    with Place.claim(store, "engine", 0, host="127.0.0.1") as own:
        later = store.claim_role("engine", 0, host="elsewhere", pid=1, gone=own.row.epoch)
        wait_for_loss(own, "another process is engine 0 of the run now")
    [row] = store.role_rows("engine")
    assert (row.epoch, row.state, row.host) == (later.epoch, "running", "elsewhere")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("postgresql://a@db/x", ("db", 5432)),
        ("postgresql://a@db:6000/x", ("db", 6000)),
        ("postgresql:///x?host=/run/pg", ("/run/pg", 5432)),
        ("postgresql:///x?host=/run/pg&port=6000", ("/run/pg", 6000)),
        ("postgresql://a@[::1]:6000/x", ("::1", 6000)),
        ("postgresql://a@/x?host=one:1,two:2", ("one", 1)),
        ("postgresql://a@one:6000,two:6001/x?schema=s", ("one", 6000)),
        ("postgresql://a@[::1]:6000,two/x", ("::1", 6000)),
    ],
)
def test_the_first_host_and_port_are_read_from_a_database_url(url: str, expected: tuple[str, int]) -> None:
    assert host_of(url) == expected


def test_the_address_is_loopback_for_a_store_on_this_machine() -> None:
    assert address_for_store("/tmp/store.db") == "127.0.0.1"
    assert address_for_store("postgresql://a@127.0.0.1:1/x") == "127.0.0.1"


def test_an_ipv6_address_has_brackets_in_urls() -> None:
    endpoints = Endpoints((), "fd00::1", 8000, "key")
    assert (endpoints.proxy_url, endpoints.local_url) == ("http://[fd00::1]:8000",) * 2
