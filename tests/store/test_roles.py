"""Places of the processes of a cluster: each has one holder, by the clock of the database."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import sqlalchemy as sa

from areal_agents.store import Conflict, NotFound, Store
from areal_agents.store.roles import DEAD_AFTER_S
from areal_agents.store.schema import roles


def test_a_place_has_one_process_until_it_leaves_it(url: str) -> None:
    with Store.open(url) as store:
        first = store.claim_role("engine", 1, host="a", pid=10)
        assert (first.epoch, first.url, first.is_alive) == (1, None, True)
        with pytest.raises(Conflict, match="engine 1 of this run is running: process 10 on a"):
            store.claim_role("engine", 1, host="b", pid=20)
        assert store.claim_role("engine", 0, host="b", pid=20).epoch == 1
        assert store.beat_role("engine", 1, first.epoch, url="http://a:1")
        assert [(row.index, row.url) for row in store.role_rows("engine")] == [(0, None), (1, "http://a:1")]
        store.leave_role("engine", 1, first.epoch)
        assert [(row.url, row.is_alive) for row in store.role_rows("engine")] == [(None, True), (None, False)]
        assert store.claim_role("engine", 1, host="b", pid=20).epoch == 2


def test_a_process_learns_from_its_heartbeat_that_its_place_was_taken(url: str) -> None:
    with Store.open(url) as store:
        first = store.claim_role("proxy", 0, host="a", pid=10)
        _let_time_pass(url, DEAD_AFTER_S + 1)
        second = store.claim_role("proxy", 0, host="b", pid=20)
        assert not store.beat_role("proxy", 0, first.epoch, url="http://a:1")
        store.leave_role("proxy", 0, first.epoch)
        [row] = store.role_rows("proxy")
        assert (row.epoch, row.host, row.url, row.is_alive) == (second.epoch, "b", None, True)


def test_the_place_of_a_process_that_is_known_to_be_gone_can_be_claimed_at_once(url: str) -> None:
    with Store.open(url) as store:
        store.claim_role("rollout", 0, host="a", pid=10)
        assert store.claim_role("rollout", 0, host="a", pid=20, gone=1).epoch == 2
        with pytest.raises(Conflict, match="process 20 on a"):  # another one has taken the place meanwhile
            store.claim_role("rollout", 0, host="a", pid=30, gone=1)


def test_one_of_many_simultaneous_claims_succeeds(url: str) -> None:
    won: list[int] = []
    barrier = threading.Barrier(4)

    def claim(number: int) -> None:
        with Store.open(url) as store:
            barrier.wait(30)
            try:
                store.claim_role("trainer", 0, host="a", pid=number)
            except Conflict:
                return
            won.append(number)

    threads = [threading.Thread(target=claim, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(won) == 1


@pytest.mark.parametrize("gone", [None, 1])
def test_a_heartbeat_that_comes_while_a_place_is_claimed_keeps_it(url: str, gone: int | None) -> None:
    """It does not if the process is known to be gone, or must lose the place."""

    def beat(_connection: sa.Connection, cursor: Any, statement: str, *_: object) -> None:
        if statement.startswith("UPDATE roles"):
            cursor.execute("UPDATE roles SET beat_at = beat_at + 30")

    with Store.open(url) as store:
        store.claim_role("engine", 0, host="a", pid=10)
        _let_time_pass(url, DEAD_AFTER_S + 1)
        sa.event.listen(sa.Engine, "before_cursor_execute", beat)
        try:
            if gone is None:
                with pytest.raises(Conflict, match="engine 0 of this run is running: process 10 on a"):
                    store.claim_role("engine", 0, host="b", pid=20)
            else:
                assert store.claim_role("engine", 0, host="b", pid=20, gone=gone).epoch == 2
        finally:
            sa.event.remove(sa.Engine, "before_cursor_execute", beat)


def test_the_record_of_the_run_is_replaced(url: str) -> None:
    with Store.open(url) as store:
        with pytest.raises(NotFound, match="no run on several machines"):
            store.read_run()
        store.write_run({"id": "a"})
        store.write_run({"id": "b"})
        assert store.read_run() == {"id": "b"}


def _let_time_pass(url: str, seconds: float) -> None:
    _execute(url, sa.update(roles).values(beat_at=roles.c.beat_at - seconds))


def _execute(url: str, statement: str | sa.Executable) -> None:
    from areal_agents.store.postgres import engine_of, is_postgres

    engine = engine_of(url) if is_postgres(url) else sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text(statement) if isinstance(statement, str) else statement)
    engine.dispose()
