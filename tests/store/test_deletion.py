"""Deleted episodes leave nothing in the files of the store, and the trainer continues without them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import sqlalchemy as sa
from postgres_server import PostgresServer

from areal_agents.errors import StoreError
from areal_agents.store import Conflict, NotFound, Store
from areal_agents.store.postgres import engine_of, is_postgres
from tests.store.store_support import complete_group, make_turn, open_episode, reward

FilesWith = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    """A server whose files have no data of other modules."""
    if (missing := PostgresServer.missing()) is not None:
        pytest.skip(missing)
    with PostgresServer() as server:
        yield server


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url) as store:
        yield store


@pytest.fixture
def files_with(store: Store, request: pytest.FixtureRequest) -> FilesWith:
    """A function that returns the names of the store's files that contain a string."""

    def search(text: str) -> list[str]:
        if is_postgres(store.url):
            server: PostgresServer = request.getfixturevalue("postgres")
            files = server.table_files()
        else:
            files = list(store.path.parent.iterdir())
        return [path.name for path in files if text.encode() in path.read_bytes()]

    return search


def cleared(store: Store, files_with: FilesWith, *texts: str) -> bool:
    """Clear the log until no file contains a string of `texts`: autovacuum may still read deleted rows."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        store.clear_log(is_alone=True)
        if not any(map(files_with, texts)):
            return True
    return False


def converse(store: Store, name: str) -> None:
    open_episode(store, name, name, 1, implicit_key=f"project/{name}", metadata={"user": f"user of {name}"})
    store.add_turn(name, make_turn(f"{name}/a")).result()
    store.set_rewards(name, reward(1.0)).result()
    store.seal(name, "finished").result()


def test_nothing_of_a_deleted_episode_is_left_in_any_file(store: Store, files_with: FilesWith) -> None:
    for name in ("kept", "gone"):
        converse(store, name)
    assert files_with("question of gone/a") and files_with("user of gone")
    with Store.open(store.url) as other:  # as another process that has the store open
        assert other.load_episode("gone").turns
        assert store.delete_episodes(["gone", "unknown"]).result() == ["gone"]
        assert cleared(store, files_with, "question of gone/a", "answer of gone/a", "user of gone", "gone/a")
    with pytest.raises(NotFound):
        store.load_episode("gone")
    assert [turn.reply.content for turn in store.load_episode("kept").turns] == ["answer of kept/a"]
    assert store.group_counts()["complete"] == 1


def test_an_open_episode_must_be_ended_before_it_is_deleted(store: Store) -> None:
    open_episode(store, "open", "open", 1)
    with pytest.raises(Conflict, match="open"):
        store.delete_episodes(["open"]).result()
    store.seal("open", "aborted").result()
    assert store.delete_episodes(["open"]).result() == ["open"]
    assert not any(store.group_counts().values())


def test_the_trainer_ends_the_step_of_a_deleted_conversation_and_never_leases_it_again(
    store: Store, files_with: FilesWith
) -> None:
    for name in ("first", "second"):
        converse(store, name)
    store.become_trainer()
    assert store.lease_group_ids(2, step=1) == ["first", "second"]
    store.delete_episodes(["first"]).result()
    assert cleared(store, files_with, "question of first/a", "user of first")
    store.mark_trained(["first", "second"], step=1, version=1)
    assert store.group_counts()["trained"] == 2
    assert store.return_leases(0) == 1, "a resume from before the step trains the other one again"
    assert store.lease_group_ids(1, step=1) == ["second"]
    assert store.group_counts() == {"pending": 0, "complete": 0, "leased": 1, "trained": 0, "dropped": 1}


def test_a_group_without_one_of_its_episodes_is_not_trained_on(store: Store) -> None:
    complete_group(store, "t@0", [0.0, 1.0])
    store.delete_episodes(["t@0/1"]).result()
    assert store.group_counts()["dropped"] == 1
    assert store.load_episode("t@0/0").turns


def test_a_postgresql_store_in_use_is_vacuumed_once_no_transaction_reads_deleted_rows(
    postgres: PostgresServer,
) -> None:
    with Store.open(postgres.new_store()) as store:
        for name in ("kept", "gone"):
            converse(store, name)
        engine = engine_of(store.url, is_pooled=False).execution_options(isolation_level="REPEATABLE READ")
        with engine.connect() as reader:
            count = sa.text("SELECT count(*) FROM turns")
            assert reader.execute(count).scalar_one() == 2
            store.delete_episodes(["gone"]).result()
            with pytest.raises(StoreError, match="has been read by one transaction for 0.2 s"):
                store.clear_log(timeout_s=0.2)
            assert reader.execute(count).scalar_one() == 2
            ended = threading.Timer(0.2, reader.close)
            ended.start()
            store.clear_log()
            ended.join()
        with engine.connect() as reader:
            dead = "SELECT sum(n_dead_tup) FROM pg_stat_user_tables WHERE schemaname = current_schema()"
            tables = "AND relname IN ('episodes', 'turns', 'rewards', 'groups', 'tasks')"
            assert reader.execute(sa.text(f"{dead} {tables}")).scalar_one() == 0
