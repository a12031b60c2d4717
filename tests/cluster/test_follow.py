"""What the supervisor sees of a process that something else starts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from areal_agents.cluster import follow
from areal_agents.cluster.place import Place
from areal_agents.launch.children import EXIT_REFUSED
from areal_agents.store import Store

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


def test_it_ends_with_a_process_that_has_ended_after_the_last_step(
    store: Store, background: ThreadPoolExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = threading.Event()
    code = background.submit(
        follow.follow, store, "trainer", 0, is_trained=trained.is_set, settled_s=0.1, absent_s=60.0
    )
    _wait_for_epoch(store, 1, code)
    with Place.claim(store, "trainer", 0, host=HOST):
        pass
    with Place.claim(store, "trainer", 0, host=HOST) as second:  # the first one failed
        second.announce("tcp://127.0.0.1:1")
        trained.set()
        assert not code.done()
    assert code.result(timeout=30) == 0
    assert "no process is trainer 0" in capsys.readouterr().out


def test_a_process_from_before_the_supervisor_loses_its_place(
    store: Store, background: ThreadPoolExecutor
) -> None:
    with Place.claim(store, "engine", 0, host=HOST) as earlier:
        code = background.submit(
            follow.follow, store, "engine", 0, is_trained=lambda: True, settled_s=0.0, absent_s=0.1
        )
        assert code.result(timeout=30) == EXIT_REFUSED  # nobody starts an engine
        assert not store.beat_role("engine", 0, earlier.row.epoch, url=None)


def _wait_for_epoch(store: Store, epoch: int, code: Future[int]) -> None:
    while not any(row.epoch == epoch and row.state == "ended" for row in store.role_rows("trainer")):
        assert not code.done()
