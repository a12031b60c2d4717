"""The supervisor follows a process that it has not started itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from areal_agents.cluster import follow
from areal_agents.cluster.launchers.base import RoleProcess
from areal_agents.cluster.place import Place
from areal_agents.launch.children import EXIT_REFUSED
from areal_agents.store import Store
from areal_agents.store.roles import Role, RoleRow

HOST = "127.0.0.1"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store.db") as opened:
        yield opened


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "POLL_S", 0.02)


def test_following_ends_when_the_process_has_ended_after_the_last_step(
    store: Store,
    background: ThreadPoolExecutor,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = threading.Semaphore(0)  # released once for each time that the place is read
    role_rows = store.role_rows

    def counted(role: Role | None = None) -> list[RoleRow]:
        rows = role_rows(role)
        looks.release()
        return rows

    follow.take_places_away(store, [RoleProcess("trainer", 0, ())])
    trained = threading.Event()
    code = background.submit(
        follow.follow, store, "trainer", 0, is_trained=trained.is_set, settled_s=0.1, absent_s=60.0
    )
    with Place.claim(store, "trainer", 0, host=HOST):
        pass
    with Place.claim(store, "trainer", 0, host=HOST) as second:  # the first process failed
        second.announce("tcp://127.0.0.1:1")
        trained.set()
        monkeypatch.setattr(store, "role_rows", counted)
        for _ in range(3):  # what the first look shows has been acted on when the second is made
            assert looks.acquire(timeout=60), "the process is not followed any more"
        assert not code.done()
    assert code.result(timeout=60) == 0
    assert "no process is trainer 0" in capsys.readouterr().out


def test_a_process_that_started_before_the_supervisor_loses_its_place(store: Store) -> None:
    with Place.claim(store, "trainer", 0, host=HOST) as earlier:
        follow.take_places_away(store, [RoleProcess("trainer", 0, ())])
        assert not store.beat_role("trainer", 0, earlier.row.epoch, url=None)
    # Its end does not count as the end of the trainer that belongs to this supervisor.
    assert follow.follow(store, "trainer", 0, is_trained=lambda: True, settled_s=0.0, absent_s=0.1) == (
        EXIT_REFUSED
    )


def test_a_restarted_follower_does_not_disturb_the_process(store: Store) -> None:
    follow.take_places_away(store, [RoleProcess("trainer", 0, ())])
    with Place.claim(store, "trainer", 0, host=HOST) as place:
        absent_s = -1.0  # so that the place is read only once
        assert follow.follow(store, "trainer", 0, is_trained=lambda: True, absent_s=absent_s) == EXIT_REFUSED
        assert store.beat_role("trainer", 0, place.row.epoch, url=None)
    assert follow.follow(store, "trainer", 0, is_trained=lambda: True, settled_s=0.0) == 0
