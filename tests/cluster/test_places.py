"""How a process of a cluster takes its place, and learns that it has lost it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from areal_agents.cluster.place import Place, own_address
from areal_agents.errors import ConfigError
from areal_agents.store import Store
from areal_agents.store.postgres import host_of
from areal_agents.store.roles import DEAD_AFTER_S
from areal_agents.store.schema import roles


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store.db") as opened:
        yield opened


def test_a_place_shows_its_address_and_is_left_at_the_end(store: Store) -> None:
    with Place.claim(store, "proxy", 0, host="127.0.0.1") as place:
        place.announce("http://127.0.0.1:1")
        assert store.addresses("proxy") == {0: "http://127.0.0.1:1"} and not place.is_lost
    assert store.addresses("proxy") == {}


def test_a_place_that_another_process_has_is_refused(store: Store) -> None:
    store.claim_role("proxy", 0, host="elsewhere", pid=1)
    with pytest.raises(
        ConfigError, match=r"proxy 0 of this run is running: process 1 on elsewhere.*another index"
    ):
        Place.claim(store, "proxy", 0, host="127.0.0.1", wait_s=0.0)


def test_the_place_of_a_process_of_this_machine_that_has_ended_is_free(store: Store) -> None:
    child = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(child, 0)
    store.claim_role("engine", 0, host="127.0.0.1", pid=child)
    with Place.claim(store, "engine", 0, host="127.0.0.1", wait_s=0.0) as place:
        assert place.row.epoch == 2


def test_a_process_learns_by_its_heartbeat_that_its_place_was_taken(store: Store) -> None:
    with Place.claim(store, "engine", 0, host="127.0.0.1") as place:
        _execute(store, sa.update(roles).values(beat_at=roles.c.beat_at - DEAD_AFTER_S))
        later = store.claim_role("engine", 0, host="elsewhere", pid=1)
        deadline = time.monotonic() + 30
        while not place.is_lost and time.monotonic() < deadline:
            time.sleep(0.05)
        assert place.is_lost
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
def test_the_first_host_of_a_database(url: str, expected: tuple[str, int]) -> None:
    assert host_of(url) == expected


def test_a_run_with_a_store_in_a_file_is_on_this_machine() -> None:
    assert own_address("/tmp/store.db") == "127.0.0.1"
    assert own_address("postgresql://a@127.0.0.1:1/x") == "127.0.0.1"


def _execute(store: Store, statement: sa.Executable) -> None:
    engine = sa.create_engine(f"sqlite:///{store.path}")
    with engine.begin() as connection:
        connection.execute(statement)
    engine.dispose()
