"""The store benchmark in miniature: the measured turns were really written."""

from __future__ import annotations

from pathlib import Path

import pytest
from postgres_server import PostgresServer

from areal_agents.store import Store
from benchmarks.listeners import measure_listeners
from benchmarks.store import StoreFigures, measure_shared, measure_store


def test_the_measured_turns_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[int, int]] = []
    close = Store.close

    def look(store: Store) -> None:
        if store.open_episodes():
            summaries = store.episodes()
            found.append((sum(s.turns for s in summaries), sum(s.sampled_tokens for s in summaries)))
        close(store)

    monkeypatch.setattr(Store, "close", look)
    figures = measure_store(turns=200, writers=8, tokens=50, durability="power", folder=tmp_path)
    assert found[0] == (200, 200 * 50)
    assert (figures.turns, figures.writers, figures.tokens, figures.durability) == (200, 8, 50, "power")
    assert isinstance(figures, StoreFigures) and 0 < figures.commit_p50_ms <= figures.commit_p99_ms
    assert figures.turns_per_s > 0 and list(tmp_path.iterdir()) == []


def test_processes_share_a_store(tmp_path: Path) -> None:
    found = measure_shared(f"sqlite:///{tmp_path / 'store.db'}", processes=2, turns=32, writers=4)
    assert (found.turns, found.writers) == (32, 4) and found.turns_per_s > 0
    with Store.open(tmp_path / "store.db") as store:
        assert sum(summary.turns for summary in store.episodes()) == 32


def test_the_cost_of_listeners_is_measured() -> None:
    if (missing := PostgresServer.missing()) is not None:
        pytest.skip(missing)
    with PostgresServer() as server:
        url = server.new_store()
        found = measure_listeners(url, listeners=2, commits=40)
        with Store.open(url) as store:
            (episode,) = store.episodes()
            assert episode.turns == 40
    assert found.listeners == 2 and found.commit_server_ms > 0
    # The clock has a resolution of 10 ms, so these times may be zero for so few calls.
    assert min(found.commit_listeners_ms, found.heartbeat_server_ms, found.heartbeat_listeners_ms) >= 0
