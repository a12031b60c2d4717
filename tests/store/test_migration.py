"""A store of the previous schema is migrated when it is opened: whole, or not at all.

schema_3.sql is the dump of a store that the last release with schema 3 wrote: two trained groups, one that
its trainer dropped, one leased, one complete and one pending.
"""

from __future__ import annotations

import multiprocessing
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from store_queries import in_flight_episodes
from store_support import complete_group

from areal_agents.errors import StoreError
from areal_agents.store import RetainConfig, Retention, Store, UntrainedGroup, migrations

OLD = (Path(__file__).parent / "schema_3.sql").read_text()
DIES = """
import os, signal, sys
from areal_agents.store import Store, migrations
class Deadly(tuple):
    def __iter__(self):
        yield from migrations.STATEMENTS_OF_TEST[: int(sys.argv[2])]
        os.kill(os.getpid(), signal.SIGKILL)
migrations.STATEMENTS_OF_TEST = migrations._STATEMENTS
migrations._STATEMENTS = Deadly()
Store.open(sys.argv[1])
"""
HOLDS = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA journal_mode=WAL")
print(connection.execute("SELECT COUNT(*) FROM leases").fetchone()[0], flush=True)
for line in sys.stdin:
    connection.execute(line)
    print("done", flush=True)
"""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A store of schema 3, as its last process left it."""
    return write_old(tmp_path / "s.db")


def write_old(path: Path) -> Path:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.executescript(OLD)
    return path


def dump(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return list(connection.iterdump())


def rows(path: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchall()


def shape(path: Path) -> dict[str, list[Any]]:
    """Columns, keys and indices of every table. A column that was added later is the last of its table."""
    out: dict[str, list[Any]] = {}
    with closing(sqlite3.connect(path)) as connection:
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
        for (table,) in tables.fetchall():
            out[table] = [
                *connection.execute(
                    f"SELECT name, type, [notnull], pk FROM pragma_table_info('{table}') ORDER BY 1"
                ),
                *connection.execute(f"SELECT * FROM pragma_foreign_key_list('{table}')"),
                *sorted(
                    (name, unique, tuple(connection.execute(f"SELECT * FROM pragma_index_info('{name}')")))
                    for _, name, unique, *_ in connection.execute(
                        f"SELECT * FROM pragma_index_list('{table}')"
                    )
                ),
            ]
    return out


def test_a_store_of_the_previous_schema_continues(old: Path, tmp_path: Path) -> None:
    before = rows(old, "SELECT group_id, state, step, holder, version, reason FROM leases ORDER BY 1")
    assert [row[:2] for row in before] == [
        ("dropped@0", "dropped"),
        ("leased@0", "leased"),
        ("older@0", "trained"),
        ("trained@0", "trained"),
    ]
    with Store.open(old) as store, Store.open(tmp_path / "new.db"):
        assert shape(old) == shape(tmp_path / "new.db")
        after = rows(old, "SELECT group_id, state, step, holder, version, reason, use FROM leases ORDER BY 1")
        assert after == [(*row, 0) for row in before]
        assert store.group_counts() == {
            "pending": 1,
            "complete": 1,
            "leased": 1,
            "trained": 2,
            "dropped": 1,
        }
        assert in_flight_episodes(store) == 2 + 2 + 1
        assert store.untrained_groups() == [
            UntrainedGroup("leased@0", False),
            UntrainedGroup("complete@0", False),
            UntrainedGroup("pending@0", True),
        ]
        assert store.recorded_groups() == ["trained@0", "older@0", "leased@0", "complete@0"]
        turns = [t for rollout in store.load_groups(["trained@0"])[0].rollouts for t in rollout.episode.turns]
        assert [turn.recorded_before for turn in turns] == [None] * 4  # which that release did not note
        assert [turn.completion.token_ids.tolist() for turn in turns] == [[8, 9]] * 4
        assert store.return_leases(after_step=2) == 2
        # What that release trained can be reused; its groups say no version of their own turns.
        assert store.lease_group_ids(3, step=3) == ["dropped@0", "leased@0", "complete@0"]
        assert store.lease_replays(9, step=3, min_version=0, max_uses=2) == [
            ("older@0", 1),
            ("trained@0", 1),
        ]
    assert rows(old, "PRAGMA integrity_check") == [("ok",)]
    assert rows(old, "PRAGMA foreign_key_check") == []
    with Store.open(old) as again:
        assert again.group_counts()["trained"] == 2


def test_columns_that_schema_3_got_later_may_be_missing(old: Path) -> None:
    with closing(sqlite3.connect(old)) as connection:
        for table, column in (("groups", "surplus"), ("groups", "version"), ("episodes", "owner")):
            connection.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
    with Store.open(old) as store:
        assert [group.version for group in store.waiting_groups()] == [0, 0]
        complete_group(store, "new@0", [0.0, 1.0])
        assert store.group_counts()["complete"] == 2


def test_retention_continues(old: Path) -> None:
    with Store.open(old) as store:
        for version in (3, 4):
            store.publish_version(version, step=version, path="v")
            store.commit_checkpoint(version)
        assert Retention(store, RetainConfig(versions=1)).run_once() == 3 * 4
        assert store.lease_replays(9, step=5, min_version=0, max_uses=9) == []  # nothing is left of them


@pytest.mark.parametrize("statements", range(len(migrations._STATEMENTS) + 1))
def test_a_death_in_the_middle_leaves_the_store_as_it_was(old: Path, statements: int) -> None:
    before = dump(old)
    done = subprocess.run([sys.executable, "-c", DIES, str(old), str(statements)], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert dump(old) == before
    with Store.open(old) as store:
        assert store.group_counts()["trained"] == 2


def test_a_migration_that_the_disk_refuses_leaves_the_store_as_it_was(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = dump(old)
    full = (
        *migrations._STATEMENTS[:-1],
        "PRAGMA max_page_count=1",
        "CREATE TABLE filler AS SELECT * FROM turns",
    )
    with monkeypatch.context() as patched:
        patched.setattr(migrations, "_STATEMENTS", full)
        with pytest.raises(StoreError, match="database or disk is full; it is unchanged"):
            Store.open(old)
    assert dump(old) == before
    Store.open(old).close()


@pytest.fixture
def holder(old: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the store open as its own release does, between two transactions."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(old)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "4\n"
    yield process
    process.stdin.close()
    process.wait(30)
    process.stdout.close()


def test_a_store_that_another_process_has_open_is_not_migrated_under_it(
    old: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrations, "_WAIT_S", 0.3)
    before = dump(old)
    with pytest.raises(StoreError, match="another process has it open; end every process"):
        Store.open(old)
    assert dump(old) == before
    assert holder.stdin is not None and holder.stdout is not None
    holder.stdin.write("UPDATE leases SET state = 'trained', version = 3 WHERE group_id = 'leased@0'\n")
    holder.stdin.flush()
    assert holder.stdout.readline() == "done\n"  # it goes on
    holder.kill()
    holder.wait(30)
    with Store.open(old) as store:  # and nothing that it wrote is lost
        assert store.group_counts()["trained"] == 3


def test_a_store_that_is_about_to_be_closed_is_waited_for(
    old: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    has_previous, looked = migrations._has_previous_schema, []

    def look(path: Path) -> bool:
        looked.append(path)
        if len(looked) == 3:  # refused twice
            holder.kill()
            holder.wait(30)
        return has_previous(path)

    monkeypatch.setattr(migrations, "_has_previous_schema", look)
    with Store.open(old) as store:
        assert store.group_counts()["trained"] == 2
    assert len(looked) == 3


def open_store(path: str) -> None:
    """Run in another process."""
    with Store.open(path) as store:
        assert store.group_counts()["trained"] == 2


def test_processes_may_open_it_together(old: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    others = [spawn.Process(target=open_store, args=(str(old),)) for _ in range(4)]
    for other in others:
        other.start()
    for other in others:
        other.join(60)
        assert other.exitcode == 0
    with Store.open(old) as store:
        assert store.group_counts()["trained"] == 2


def test_an_older_schema_is_refused(old: Path) -> None:
    with closing(sqlite3.connect(old, isolation_level=None)) as connection:
        connection.execute("UPDATE store_meta SET value = '2'")
    before = dump(old)
    with pytest.raises(StoreError, match="schema 2, and this release reads 4 and migrates 3"):
        Store.open(old)
    assert dump(old) == before
