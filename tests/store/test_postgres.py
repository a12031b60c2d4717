"""Stores in PostgreSQL: they survive a restart of the server, and the trainer's session can be lost."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa
from postgres_server import PostgresServer
from store_support import complete_group, make_turn, open_episode, reward
from tls_files import made_tls_files

from areal_agents.errors import ConfigError, StoreError
from areal_agents.inference.ports import reserved_ports
from areal_agents.launch.run_folder import RunFolder
from areal_agents.store import Conflict, Store, pages, postgres, reads
from areal_agents.store.database import driver_of
from areal_agents.store.read_only import ReadOnlyStore


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """A server for one test only, because the test stops it."""
    if (missing := PostgresServer.missing()) is not None:
        pytest.skip(missing)
    with PostgresServer() as own:
        yield own


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT])
def test_a_restart_of_the_server_loses_and_repeats_nothing(
    server: PostgresServer, how: signal.Signals
) -> None:
    with Store.open(server.new_store()) as store:
        open_episode(store, "e")
        halfway = threading.Event()

        def write() -> list[Future[None]]:
            futures = []
            for index in range(2000):
                futures.append(store.add_turn("e", make_turn(f"t{index}")))
                if index == 500:
                    halfway.set()
            return futures

        with ThreadPoolExecutor(1) as thread:
            writing = thread.submit(write)
            assert halfway.wait(60)
            server.stop(how)
            server.start()
            futures = writing.result()
        for future in futures:
            future.result(timeout=60)
        cursor = store.cursor()
        assert [turn.id for turn in store.load_episode("e").turns] == [f"t{index}" for index in range(2000)]
        with Store.open(store.url) as other:
            other.add_turn("e", make_turn("later")).result()
        while (store.wait(cursor, timeout_s=30)) == cursor:  # the listener has connected again
            raise AssertionError("a commit of another process was not noticed")


def test_a_client_that_the_server_refuses_does_not_wait(server: PostgresServer) -> None:
    url = server.new_store().replace("//areal@", "//stranger@")
    began = time.monotonic()
    with pytest.raises(StoreError, match=r'"stranger" does not exist; give the password .* PGPASSWORD'):
        Store.open(url)
    assert time.monotonic() - began < postgres._LOST_S / 2


def test_a_commit_whose_answer_was_lost_is_not_repeated(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection breaks after the server has committed, and before the writer knows of the commit."""
    with Store.open(server.new_store()) as store:
        open_episode(store, "e")
        broken = threading.Event()
        backend = store._database._backend
        real = backend._begin  # type: ignore[attr-defined]

        def begin(driver: psycopg.Connection, *, only_adds: bool) -> int:
            number = real(driver, only_adds=only_adds)
            if not broken.is_set():
                broken.set()
                execute = driver.execute

                def lose_the_answer(query: str, *arguments: object) -> object:
                    result = execute(query, *arguments)  # type: ignore[call-overload]
                    if "COMMIT" in query:
                        driver.close()
                        raise psycopg.OperationalError("the answer was lost")
                    return result

                monkeypatch.setattr(driver, "execute", lose_the_answer)
            return number

        monkeypatch.setattr(backend, "_begin", begin)
        store.add_turn("e", make_turn("a")).result(timeout=60)  # a repeated write would be refused
        assert broken.is_set()
        assert [turn.id for turn in store.load_episode("e").turns] == ["a"]


def test_a_transaction_that_was_lost_before_its_commit_is_repeated(server: PostgresServer) -> None:
    with Store.open(server.new_store()) as store:
        open_episode(store, "e")
        runs: list[int] = []

        def job(connection: object) -> int:
            runs.append(len(runs))
            if len(runs) == 1:
                driver_of(connection).close()  # type: ignore[arg-type]
            driver_of(connection).execute("SELECT 1")  # type: ignore[arg-type]
            return len(runs)

        assert store._database.submit(job).result(timeout=60) == 2


def test_a_process_that_is_stopped_in_its_transaction_does_not_block_the_others(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A heartbeat does not wait at all. A write waits until the server rolls the transaction back."""
    url = server.new_store()
    with Store.open(url) as other:
        place = other.claim_role("engine", 0, host="h", pid=1)
        monkeypatch.setattr(postgres, "_HELD_S", 120.0)
        with Store.open(url) as stopped, stopped_in_transaction(stopped) as counts:
            assert other.beat_role("engine", 0, place.epoch, url="http://h")
            idle = "SELECT count(*) FROM pg_stat_activity WHERE state = 'idle in transaction'"
            assert server.execute(idle) == [(1,)], "the transaction is still open"
        assert counts == [0]
        monkeypatch.setattr(postgres, "_HELD_S", 0.3)
        with Store.open(url) as stopped, stopped_in_transaction(stopped) as counts:
            open_episode(other, "e")
        # The transaction that was rolled back did not see the episode, and the one that repeats it does.
        assert counts[:2] == [0, 1]


@contextmanager
def stopped_in_transaction(store: Store) -> Iterator[list[int]]:
    """Let the writer of a store wait in a transaction within the with-block; it is committed at the end.

    Yield a list that gets the number of episodes that each attempt of the transaction has seen.
    """
    counts: list[int] = []
    begun, goes_on = threading.Event(), threading.Event()

    def job(connection: sa.Connection) -> None:
        counts.append(connection.exec_driver_sql("SELECT count(*) FROM episodes").scalar_one())
        begun.set()
        assert goes_on.wait(120)

    written = store._database.submit(job)
    try:
        assert begun.wait(60)
        yield counts
    finally:
        goes_on.set()
        written.result(timeout=60)


def test_only_processes_that_wait_for_commits_listen_for_them(server: PostgresServer) -> None:
    url = server.new_store()
    with Store.open(url) as writer, Store.open(url) as waiting:
        listeners = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN %'"
        open_episode(writer, "before")
        assert server.execute(listeners) == [(0,)]
        cursor = waiting.cursor()
        open_episode(writer, "e")
        assert waiting.wait(cursor, 30.0) != cursor
        assert server.execute(listeners) == [(1,)]


def test_queued_writes_wait_for_a_lost_server_together(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """This also holds for writes that are queued behind the first ones, in several batches."""
    with Store.open(server.new_store()) as store:
        open_episode(store, "e")
        server.stop(signal.SIGQUIT)
        monkeypatch.setattr(postgres, "_LOST_S", 0.5)
        futures = [store.add_turn("e", make_turn(f"t{index}")) for index in range(2000)]
        for future in futures:
            with pytest.raises(StoreError, match="could not be reached"):
                future.result(timeout=60)
        # Each wait begins with a warning. There were eight batches or more, of at most 256 writes.
        assert caplog.text.count("was lost, and is opened again") == 1
        monkeypatch.undo()
        server.start()
        store.add_turn("e", make_turn("later")).result(timeout=60)
        assert [turn.id for turn in store.load_episode("e").turns] == ["later"]


def test_a_connection_that_breaks_inside_a_statement_is_replaced(server: PostgresServer) -> None:
    """SQLAlchemy notices the loss first, and keeps the transaction that it began."""
    with Store.open(server.new_store()) as store:
        open_episode(store, "e")
        runs: list[int] = []

        def job(connection: sa.Connection) -> int:
            runs.append(len(runs))
            if len(runs) == 1:
                connection.execute(sa.text("SELECT pg_terminate_backend(pg_backend_pid())"))
            connection.execute(sa.text("SELECT 1"))
            return len(runs)

        assert store._database.submit(job).result(timeout=60) == 2
        open_episode(store, "f")
        assert [summary.id for summary in store.episodes()] == ["e", "f"]


def test_one_run_at_a_time_uses_a_store(postgres: PostgresServer, tmp_path: Path) -> None:
    url = postgres.new_store()
    with (
        RunFolder(tmp_path / "one").locked(url),
        pytest.raises(ConfigError, match="another run is using the store"),
        RunFolder(tmp_path / "two").locked(url),
    ):
        pass
    with RunFolder(tmp_path / "two").locked(url):
        pass


def test_a_trainer_that_lost_its_session_to_another_can_no_longer_write(server: PostgresServer) -> None:
    url = server.new_store()
    with Store.open(url) as first, Store.open(url) as second:
        complete_group(first, "g@0", [1.0])
        complete_group(first, "h@0", [1.0])
        first.become_trainer()
        with pytest.raises(Conflict, match="is training on"):
            second.become_trainer()
        server.stop()
        server.start()
        second.become_trainer(wait_s=5)
        for write in (
            lambda: first.publish_version(0, step=0, path="v0"),
            lambda: first.lease_group_ids(1, step=1),
            lambda: first.commit_checkpoint(1),
            first.check_trainer,
            first.object_folders,
        ):
            with pytest.raises(Conflict, match="is (training on|the trainer of)"):
                write()
        assert second.lease_group_ids(1, step=1) == ["g@0"]
        second.close()  # the lock is free now, but another trainer has held it
        with pytest.raises(Conflict, match="has been its trainer since"):
            first.commit_checkpoint(1)


def test_a_write_that_was_under_way_when_the_session_was_lost_is_refused(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer held the lock when the write was queued, and another one holds it when the write runs."""
    url = server.new_store()
    with Store.open(url) as first, Store.open(url) as second:
        first.become_trainer()
        server.stop()
        server.start()
        second.become_trainer(wait_s=5)
        monkeypatch.setattr(first._trainer, "take_back", lambda: None)
        with pytest.raises(Conflict, match="is the trainer of"):
            first.commit_checkpoint(1)


def test_a_trainer_takes_its_lost_session_back(server: PostgresServer) -> None:
    with Store.open(server.new_store()) as store:
        complete_group(store, "g@0", [1.0])
        complete_group(store, "h@0", [1.0])
        assert store.lease_group_ids(1, step=1) == ["g@0"]
        server.stop(signal.SIGQUIT)
        server.start()
        assert store.lease_group_ids(1, step=2) == ["h@0"]
        store.mark_trained(["g@0"], step=1, version=1)


def test_threads_of_a_trainer_take_its_lost_session_back_together(server: PostgresServer) -> None:
    with Store.open(server.new_store()) as store:
        store.become_trainer()
        server.stop(signal.SIGQUIT)
        server.start()
        with ThreadPoolExecutor(4) as threads:
            writes = [threads.submit(store.commit_checkpoint, step) for step in range(4)]
        for write in writes:
            write.result()


def test_stores_of_one_database_are_separate(postgres: PostgresServer) -> None:
    with Store.open(postgres.new_store()) as one, Store.open(postgres.new_store()) as other:
        open_episode(one, "e")
        one.become_trainer()
        other.become_trainer()
        assert other.episodes() == []
        with pytest.raises(StoreError, match="has no file"):
            _ = one.path


def test_strings_may_contain_any_character(postgres: PostgresServer) -> None:
    """PostgreSQL stores no NUL in a string."""
    with Store.open(postgres.new_store()) as store:
        open_episode(store, "e", metadata={"note": "a\0b"})
        store.set_rewards("e", reward(1)).result()
        open_episode(store, "f")
        store.seal("f", "failed", error="killed\0here").result()
        assert store.episode_row("e").metadata == {"note": "a\0b"}
        assert store.last_failure() == "killed\N{REPLACEMENT CHARACTER}here"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("postgresql://nobody@/nothing?host=/nowhere", "cannot open the store"),
        ("postgresql://a:secret@127.0.0.1:1/x", "cannot open the store"),
        ("postgresql://a@/b?schema=Run-7", "lower-case letters"),
    ],
)
def test_the_error_of_a_store_that_cannot_be_opened_hides_the_password(
    url: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(StoreError, match=says) as raised:
        Store.open(url)
    assert "secret" not in str(raised.value)


def shown_pages(url: str) -> list[object]:
    """Return what the page of a run shows of a store, without times."""
    store = ReadOnlyStore(url)
    mark = store.mark()
    with closing(store), store.read() as connection:
        listed = pages.episode_page(connection, pages.EpisodeFilter(), limit=50).episodes
        found = [
            [(e.id, e.task_preview, e.evaluation, e.score, e.turns, e.version_max, e.step) for e in listed],
            [g.id for g in pages.groups_of_step(connection, 1)],
            pages.group_of(connection, "g@0").state,
            pages.counts(connection),
            [(e.label, e.step, e.episodes, e.reward) for e in pages.evaluations(connection)],
            [version for version, *_ in pages.version_times(connection)],
            [step for step, _ in pages.checkpoint_times(connection)],
            max(pages.open_episodes_by_time(connection, 7, 3).counts),  # type: ignore[union-attr]
            pages.neighbours(connection, 2),
            reads.trained_steps(connection),
        ]
    assert store.exists() and mark
    return found


def test_pages_show_the_same_for_both_backends(postgres: PostgresServer, tmp_path: Path) -> None:
    urls = (f"sqlite:///{tmp_path / 'store.db'}", postgres.new_store())
    for url in urls:
        with Store.open(url) as store:
            store.publish_version(0, step=0, path="v0")
            complete_group(store, "g@0", [1.0, 0.5])
            complete_group(store, "h@0", [0.0, 0.0])
            for number in range(3):
                open_episode(
                    store, f"eval/{number}", None, split="eval", metadata={"eval": "before", "step": 0}
                )
                store.add_turn(f"eval/{number}", make_turn(f"eval/{number}/a")).result()
                store.seal(f"eval/{number}", "finished", given=reward(number)).result()
            assert store.lease_group_ids(2, step=1) == ["g@0", "h@0"]
            store.publish_version(1, step=1, path="v1")
            store.mark_trained(["g@0", "h@0"], step=1, version=1)
            store.commit_checkpoint(1)
    in_file, in_server = (shown_pages(url) for url in urls)
    assert in_file == in_server


def test_a_page_says_that_there_is_no_store(postgres: PostgresServer) -> None:
    with pytest.raises(StoreError, match="not a store"), ReadOnlyStore(postgres.new_store()).read():
        pass


def test_the_url_of_a_store_sets_whether_its_server_is_verified(tmp_path: Path) -> None:
    if (missing := PostgresServer.missing()) is not None:
        pytest.skip(missing)
    tls, other = made_tls_files(tmp_path / "tls"), made_tls_files(tmp_path / "other")
    with (
        reserved_ports(1) as [port],
        PostgresServer(port=port, certificate=(tls.certificate, tls.key)) as server,
    ):
        url = f"postgresql://areal@127.0.0.1:{port}/postgres?schema=s&sslmode=verify-full&sslrootcert="
        with Store.open(url + tls.authority) as store:
            open_episode(store, "e")
            sessions = "pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE client_addr IS NOT NULL"
            assert server.execute(f"SELECT bool_and(ssl) FROM {sessions}") == [(True,)]
        with pytest.raises(StoreError, match="certificate verify failed"):
            Store.open(url + other.authority)
