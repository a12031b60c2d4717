"""Processes that add turns to a PostgreSQL store at the same time, and while others end episodes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import sqlalchemy as sa
from postgres_server import PostgresServer
from store_support import make_turn, open_episode, reward

from areal_agents.store import Conflict, Store


@pytest.fixture
def stores(postgres: PostgresServer) -> Iterator[list[Store]]:
    """A store that is opened four times, as by four processes."""
    url = postgres.new_store()
    with ExitStack() as opened:
        yield [opened.enter_context(Store.open(url)) for _ in range(4)]


def test_writes_that_add_turns_run_together_and_exclude_all_others(
    stores: list[Store], postgres: PostgresServer
) -> None:
    for name in "abc":
        open_episode(stores[0], name, name, 1)
    inside, leave = threading.Barrier(3), threading.Event()

    def held(connection: sa.Connection) -> None:
        connection.execute(sa.text("SELECT count(*) FROM turns"))
        inside.wait(60)
        leave.wait(60)

    # Two transactions that only add rows meet inside, which is impossible if one excludes the other.
    adding = [store._database.submit(held, only_adds=True) for store in stores[:2]]
    inside.wait(60)
    sealing = stores[2].seal("c", "finished", given=reward(1))
    deadline = time.monotonic() + 30
    try:
        while postgres.execute("SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted") == []:
            assert time.monotonic() < deadline and not sealing.done(), "it did not wait for the other two"
            time.sleep(0.02)
    finally:
        leave.set()
    for future in (*adding, sealing):
        future.result(timeout=60)


def test_no_turn_is_added_to_an_episode_that_has_ended(stores: list[Store]) -> None:
    """The number of turns that a seal returns is final, although other processes add turns meanwhile."""
    names = [f"e{number}" for number in range(40)]
    for name in names:
        open_episode(stores[0], name, name, 1)
    counted: dict[str, int] = {}

    def add(store: Store, writer: int) -> int:
        added = 0
        for name in names:
            index = 0
            while True:
                batch = [
                    store.add_turn(name, make_turn(f"{name}/{writer}/{index + offset}"))
                    for offset in range(4)
                ]
                index += len(batch)
                refused = [future for future in batch if is_refused(future)]
                added += len(batch) - len(refused)
                if refused:
                    break
        return added

    def seal(store: Store) -> None:
        for name in names:
            while store.episode_row(name).status == "open":
                if len(store.turns_of(name)) >= 3:
                    counted[name] = store.seal(name, "finished", given=reward(1)).result(timeout=60).turns

    with ThreadPoolExecutor() as threads:
        adding = [threads.submit(add, store, number) for number, store in enumerate(stores[:3])]
        threads.submit(seal, stores[3]).result(timeout=120)
        added = sum(thread.result(timeout=120) for thread in adding)
    found = {name: len(stores[0].turns_of(name)) for name in names}
    assert found == counted
    assert sum(found.values()) == added
    assert stores[0].group_counts()["complete"] == len(names)


def is_refused(future: Future[None]) -> bool:
    try:
        future.result(timeout=60)
    except Conflict:
        return True
    return False
