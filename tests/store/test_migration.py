"""A store of an earlier schema is migrated when it is opened, either completely or not at all.

schema_3.sql and schema_4.sql are dumps of SQLite stores that the last releases with these schemas wrote, and
schema_4_postgres.sql of one in PostgreSQL: two trained groups, one that its trainer dropped, one leased, one
complete and one pending.
"""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from migration_support import new_process, open_and_die, open_store
from postgres_server import PostgresServer
from store_queries import in_flight_episodes
from store_support import complete_group, open_episode

from areal_agents.errors import StoreError
from areal_agents.store import RetainConfig, Retention, Store, UntrainedGroup, migrations, sqlite
from areal_agents.store.postgres import engine_of, is_postgres, schema_of
from areal_agents.store.read_only import ReadOnlyStore
from areal_agents.store.schema import SCHEMA_VERSION, metadata

HERE = Path(__file__).parent
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
    return write_old(tmp_path / "s.db", 3)


@pytest.fixture
def previous(url: str) -> str:
    """The URL of a store of schema 4, on both backends."""
    if not is_postgres(url):
        write_old(Path(str(sa.make_url(url).database)), 4)
        return url
    statements = (HERE / "schema_4_postgres.sql").read_text()
    statements = statements.replace("old.", f"{schema_of(url)}.").replace(
        "SCHEMA old", f"SCHEMA {schema_of(url)}"
    )
    with connected(url) as connection:
        connection.exec_driver_sql(statements)
    return url


def write_old(path: Path, schema: int) -> Path:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.executescript((HERE / f"schema_{schema}.sql").read_text())
    return path


@contextmanager
def connected(url: str) -> Iterator[sa.Connection]:
    """A transaction on a store, which does not count as a process that has it open."""
    if is_postgres(url):
        engine = engine_of(url, is_pooled=False)
    else:
        engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        yield connection


def content(url: str) -> dict[str, Any]:
    """The columns and rows of every table."""
    with connected(url) as connection:
        inspector = sa.inspect(connection)
        return {
            table: (
                [column["name"] for column in inspector.get_columns(table)],
                sorted(repr(tuple(row)) for row in connection.exec_driver_sql(f'SELECT * FROM "{table}"')),
            )
            for table in inspector.get_table_names()
        }


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
        assert [turn.recorded_before for turn in turns] == [None] * 4  # which that release did not record
        assert [turn.completion.token_ids.tolist() for turn in turns] == [[8, 9]] * 4
        assert store.return_leases(after_step=2) == 2
        # Groups that the earlier release trained can be reused.
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


def test_retention_applies_to_a_migrated_store(old: Path) -> None:
    with Store.open(old) as store:
        for version in (3, 4):
            store.publish_version(version, step=version, path="v")
            store.commit_checkpoint(version)
        assert Retention(store, RetainConfig(versions=1)).run_once() == 3 * 4
        assert store.lease_replays(9, step=5, min_version=0, max_uses=9) == []  # their turns were deleted


def test_a_store_of_schema_4_continues(previous: str) -> None:
    with Store.open(previous) as store:
        assert store.group_counts() == {
            "pending": 1,
            "complete": 1,
            "leased": 1,
            "trained": 2,
            "dropped": 1,
        }
        open_episode(store, "pending@0/1", "pending@0", 2)
        assert len(store.load_episode("trained@0/1").turns) == 2
        assert store.claim_role("engine", 0, host="a", pid=10).epoch == 1
        store.publish_version(3, step=3, path="v3")
        assert store.lease_group_ids(2, step=3) == ["leased@0", "complete@0"]


@pytest.mark.parametrize("schema", [3, 4])
def test_sqlite_stores_get_the_tables_of_this_release(tmp_path: Path, schema: int) -> None:
    assert differences(f"sqlite:///{write_old(tmp_path / 's.db', schema)}") == []


def test_stores_get_the_tables_of_this_release(previous: str) -> None:
    assert differences(previous) == []


def test_new_stores_have_the_tables_of_this_release(url: str) -> None:
    assert differences(url) == []


def differences(url: str) -> list[Any]:
    """Open a store, and return what Alembic would change in it."""
    Store.open(url).close()
    options = {"compare_type": True, "compare_server_default": True}
    with connected(url) as connection:
        context = MigrationContext.configure(connection, opts=options)
        assert context.get_current_revision() == str(SCHEMA_VERSION)
        assert ScriptDirectory(str(migrations.FOLDER)).get_current_head() == str(SCHEMA_VERSION)
        # The last releases without Alembic look here, and refuse the store.
        mark = "SELECT value FROM store_meta WHERE key = 'schema_version'"
        assert connection.exec_driver_sql(mark).scalar_one() == "5"
        return compare_metadata(context, metadata)


def test_columns_that_schema_4_got_later_may_be_missing(previous: str) -> None:
    with connected(previous) as connection:
        for column in ("canary", "share", "canary_after", "verdict"):
            connection.exec_driver_sql(f"ALTER TABLE versions DROP COLUMN {column}")
    assert differences(previous) == []


def test_a_kill_during_the_migration_leaves_the_store_unchanged(previous: str, tmp_path: Path) -> None:
    urls = [previous]
    if not is_postgres(previous):
        urls.append(f"sqlite:///{write_old(tmp_path / 's.db', 3)}")
    for url in urls:
        before = content(url)
        deaths = 0
        while True:
            process = new_process(open_and_die, url, deaths + 1)
            process.start()
            process.join(60)
            if process.exitcode == 0:
                break
            assert process.exitcode == -signal.SIGKILL
            assert content(url) == before
            deaths += 1
        assert deaths >= 4
        with Store.open(url) as store:
            assert store.group_counts()["trained"] == 2


def test_a_migration_that_fills_the_disk_leaves_the_store_unchanged(old: Path) -> None:
    before = dump(old)

    def fill(_connection: object, cursor: Any, statement: str, *_: object) -> None:
        if statement.startswith("UPDATE alembic_version"):
            cursor.execute("PRAGMA max_page_count=1")
            cursor.execute("CREATE TABLE filler AS SELECT * FROM turns")

    sa.event.listen(sa.Engine, "before_cursor_execute", fill)
    try:
        with pytest.raises(StoreError, match="database or disk is full; it is unchanged"):
            Store.open(old)
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", fill)
    assert dump(old) == before
    Store.open(old).close()


@pytest.fixture
def holder(old: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has the store open as the earlier release does, between two transactions."""
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
    monkeypatch.setattr(sqlite, "_OTHERS_S", 0.3)
    before = dump(old)
    with pytest.raises(StoreError, match="another process has it open; end every process"):
        Store.open(old)
    assert dump(old) == before
    assert holder.stdin is not None and holder.stdout is not None
    holder.stdin.write("UPDATE leases SET state = 'trained', version = 3 WHERE group_id = 'leased@0'\n")
    holder.stdin.flush()
    assert holder.stdout.readline() == "done\n"  # that process continues
    holder.kill()
    holder.wait(30)
    with Store.open(old) as store:  # nothing that the process wrote is lost
        assert store.group_counts()["trained"] == 3


def test_a_store_that_is_about_to_be_closed_is_waited_for(
    old: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, looked = sqlite._schema, []

    def look(path: Path) -> int:
        looked.append(path)
        if len(looked) == 3:  # refused twice
            holder.kill()
            holder.wait(30)
        return real(path)

    monkeypatch.setattr(sqlite, "_schema", look)
    with Store.open(old) as store:
        assert store.group_counts()["trained"] == 2
    assert len(looked) == 3


def test_a_store_in_postgresql_that_another_process_has_open_is_not_migrated_under_it(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_agents.store.postgres._OTHERS_S", 0.3)
    url = postgres.new_store()
    with Store.open(url) as user:
        with connected(url) as connection:  # what an earlier release would have left
            connection.exec_driver_sql("DROP TABLE alembic_version, roles, writers, engine_weights")
            connection.exec_driver_sql("ALTER TABLE versions DROP COLUMN object_folder")
            connection.exec_driver_sql("UPDATE store_meta SET value = '4' WHERE key = 'schema_version'")
        with pytest.raises(StoreError, match="another process has it open; end every process"):
            Store.open(url)
        assert user.episodes() == []
        assert "alembic_version" not in content(url)
    assert differences(url) == []


def test_a_process_that_lost_its_connection_notices_a_migration(postgres: PostgresServer) -> None:
    with Store.open(url := postgres.new_store()) as store:
        open_episode(store, "e")
        with connected(url) as connection:
            connection.exec_driver_sql("UPDATE alembic_version SET version_num = '99'")
            connection.exec_driver_sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE application_name = 'areal-agents' AND pid <> pg_backend_pid()"
            )
        for _ in range(2):
            with pytest.raises(StoreError, match="migrated .* to store schema 99"):
                open_episode(store, "f")


def test_several_processes_may_open_and_migrate_a_store_together(previous: str) -> None:
    others = [new_process(open_store, previous) for _ in range(4)]
    for other in others:
        other.start()
    for other in others:
        other.join(60)
        assert other.exitcode == 0
    assert differences(previous) == []


def test_an_older_schema_is_refused(old: Path) -> None:
    with closing(sqlite3.connect(old, isolation_level=None)) as connection:
        connection.execute("UPDATE store_meta SET value = '2'")
    before = dump(old)
    refusal = f"schema 2, and this release reads {SCHEMA_VERSION} and migrates 3"
    with pytest.raises(StoreError, match=refusal):
        Store.open(old)
    assert dump(old) == before


@pytest.mark.parametrize("schema", [str(SCHEMA_VERSION + 1), "3fe2"])
def test_a_store_of_a_newer_release_is_refused(url: str, schema: str) -> None:
    Store.open(url).close()
    with connected(url) as connection:
        connection.exec_driver_sql(f"UPDATE alembic_version SET version_num = '{schema}'")
    before = content(url)
    refused = f"written by a newer release, with store schema {schema}, .*; use the release that wrote it"
    with pytest.raises(StoreError, match=refused):
        Store.open(url)
    with pytest.raises(StoreError, match=refused), closing(ReadOnlyStore(url)) as store, store.read():
        pass
    assert content(url) == before


def test_the_error_of_a_read_only_store_says_how_to_migrate_it(previous: str) -> None:
    with (
        closing(ReadOnlyStore(previous)) as store,
        pytest.raises(StoreError, match="schema 4, .* `areal-agents episodes ls") as refused,
        store.read(),
    ):
        pass
    program, *arguments = str(refused.value).split("`")[1].split()
    assert program == "areal-agents"
    command = [sys.executable, "-m", "areal_agents", *arguments]
    subprocess.run(command, check=True, timeout=60, stdout=subprocess.DEVNULL)
    with closing(ReadOnlyStore(previous)) as store, store.read():
        pass
