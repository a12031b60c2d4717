"""The weights that engines report: one row per engine, of the process that runs beside it now."""

from __future__ import annotations

import sqlalchemy as sa

from areal_agents.store import Store
from areal_agents.store.engine_weights import EngineWeights
from areal_agents.store.roles import DEAD_AFTER_S
from areal_agents.store.schema import engine_weights


def test_an_engine_has_one_row_until_its_process_leaves(url: str) -> None:
    with Store.open(url) as store:
        assert store.engine_weights() == []
        store.show_engine_weights(EngineWeights(1, "a"))
        store.show_engine_weights(EngineWeights(0, "b", 3, None, 0.5, 2.0, 10_000_000_000, 1.0, 9.5))
        store.show_engine_weights(EngineWeights(1, "c", 2, "the disk is full"))
        assert [row.weights for row in store.engine_weights()] == [
            EngineWeights(0, "b", 3, None, 0.5, 2.0, 10_000_000_000, 1.0, 9.5),
            EngineWeights(1, "c", 2, "the disk is full"),
        ]
        store.leave_engine_weights(1, "a")  # the earlier process, which ends late
        store.leave_engine_weights(0, "b")
        [row] = store.engine_weights()
        assert row.weights.index == 1 and row.is_alive
        silent = sa.update(engine_weights).values(beat_at=engine_weights.c.beat_at - DEAD_AFTER_S)
        store._database.submit(lambda connection: connection.execute(silent)).result()
        assert not store.engine_weights()[0].is_alive


def test_a_process_that_lost_its_place_overwrites_nothing(url: str) -> None:
    with Store.open(url) as store:
        assert store.show_engine_weights(EngineWeights(0, "old", 10, epoch=1))
        assert store.show_engine_weights(EngineWeights(0, "new", epoch=2))
        assert not store.show_engine_weights(EngineWeights(0, "old", 11, epoch=1))
        store.leave_engine_weights(0, "old")
        assert [row.weights for row in store.engine_weights()] == [EngineWeights(0, "new", epoch=2)]
        assert store.show_engine_weights(EngineWeights(0, "new", 11, epoch=2))
        # a later run on one machine, in which places have no epochs, and then one on several
        assert store.show_engine_weights(EngineWeights(0, "alone", 12))
        assert store.show_engine_weights(EngineWeights(0, "newer", epoch=3))


def test_a_store_keeps_its_run_id(url: str) -> None:
    with Store.open(url) as store:
        first = store.run_id()
        assert first.startswith("run-") and store.run_id() == first
    with Store.open(url) as store:
        assert store.run_id() == first
