"""A standby takes over from a PostgreSQL server that dies in the middle of writes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass

import psycopg
import pytest
from postgres_server import PostgresServer
from store_support import complete_group, make_turn, open_episode

from areal_agents.errors import StoreError
from areal_agents.inference.ports import reserved_ports
from areal_agents.store import Store
from areal_agents.store.postgres import parsed_url, shown
from areal_agents.store.read_only import ReadOnlyStore


@dataclass(frozen=True)
class Servers:
    """A server, and the standby that every commit waits for."""

    primary: PostgresServer
    standby: PostgresServer
    url: str  # of a store that does not exist yet, on whichever of them accepts writes

    def fail_over(self) -> None:
        self.primary.stop(signal.SIGQUIT)
        self.standby.promote()


@pytest.fixture
def servers() -> Iterator[Servers]:
    if (missing := PostgresServer.missing()) is not None:
        pytest.skip(missing)
    with ExitStack() as running:
        ports = running.enter_context(reserved_ports(2))
        primary = running.enter_context(PostgresServer(port=ports[0]))
        standby = running.enter_context(PostgresServer(port=ports[1], standby_of=primary))
        primary.wait_for_standby(synchronous=True)
        hosts = ",".join(f"127.0.0.1:{port}" for port in reversed(ports))  # the standby is tried first
        yield Servers(primary, standby, f"postgresql://areal@{hosts}/postgres?schema=run7")


@pytest.mark.cluster  # each test starts two servers, which takes several seconds
def test_no_acknowledged_commit_is_lost_and_none_is_repeated(servers: Servers) -> None:
    count = 600
    with ExitStack() as opened:
        stores = {name: opened.enter_context(Store.open(servers.url)) for name in ("a", "b", "c")}
        trainer = opened.enter_context(Store.open(servers.url))
        for name, store in stores.items():
            open_episode(store, name, None)
        complete_group(trainer, "g@0", [1.0])
        complete_group(trainer, "h@0", [1.0])
        assert trainer.lease_group_ids(1, step=1) == ["g@0"]
        cursor = trainer.cursor()
        started = threading.Barrier(len(stores) + 1)

        def write(name: str) -> None:
            written: list[Future[None]] = []
            for index in range(count):
                written.append(stores[name].add_turn(name, make_turn(f"{name}{index}")))
                if index == count // 3:
                    started.wait(60)
                if index % 7 == 0:
                    written.pop().result(timeout=60)
            for future in written:
                future.result(timeout=60)

        with ThreadPoolExecutor() as threads:
            writing = [threads.submit(write, name) for name in stores]
            started.wait(60)
            servers.fail_over()
            for thread in writing:
                thread.result(timeout=120)
        for name in stores:
            turns = trainer.load_episode(name).turns
            assert [turn.id for turn in turns] == [f"{name}{index}" for index in range(count)]
        assert trainer.wait(cursor, timeout_s=30) != cursor
        trainer.mark_trained(["g@0"], step=1, version=1)  # it took the lock again, on the other server
        assert trainer.lease_group_ids(1, step=2) == ["h@0"]
    with closing(ReadOnlyStore(servers.url)) as reader, reader.read():
        assert reader.mark()


@pytest.mark.cluster
def test_a_transaction_that_the_standby_did_not_get_is_repeated(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The standby gives the number of the lost transaction to one of another process, and commits that."""
    servers.primary.execute("ALTER SYSTEM SET wal_writer_delay = '10s'")  # only a commit sends the log
    servers.primary.execute("SELECT pg_reload_conf()")
    with Store.open(servers.url) as store, Store.open(servers.url) as other:
        open_episode(store, "e", None)
        open_episode(other, "f", None)
        backend = store._database._backend
        real = backend._begin  # type: ignore[attr-defined]
        numbers: list[int] = []

        def begin(driver: psycopg.Connection, *, only_adds: bool) -> int:
            count = real(driver, only_adds=only_adds)
            if numbers:
                return count
            numbers.append(current_number(driver))
            execute = driver.execute

            def lose(query: str, *arguments: object) -> object:
                if "COMMIT" not in query:
                    return execute(query, *arguments)  # type: ignore[call-overload]
                servers.fail_over()
                for index in range(20):
                    other.add_turn("f", make_turn(f"f{index}")).result(timeout=60)
                driver.close()
                raise psycopg.OperationalError("the server died")

            monkeypatch.setattr(driver, "execute", lose)
            return count

        monkeypatch.setattr(backend, "_begin", begin)
        store.add_turn("e", make_turn("a")).result(timeout=60)
        assert [turn.id for turn in store.load_episode("e").turns] == ["a"]
        status = servers.standby.execute(f"SELECT pg_xact_status('{numbers[0]}'::xid8)")
        assert status == [("committed",)], "the number was not given to another transaction"


def current_number(driver: psycopg.Connection) -> int:
    row = driver.execute("SELECT pg_current_xact_id()::text").fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.parametrize(
    ("url", "hosts", "ports"),
    [
        ("postgresql://u:p@h1:5433,h2/db?schema=s", "h1,h2", "5433,5432"),
        ("postgresql://h1,[::1]:7/db", "h1,::1", "5432,7"),
    ],
)
def test_a_url_may_name_several_hosts(url: str, hosts: str, ports: str) -> None:
    parsed = parsed_url(url)
    assert (parsed.query["host"], parsed.query["port"], parsed.database) == (hosts, ports, "db")
    assert parsed_url(shown(url)).query == parsed.query


@pytest.mark.parametrize("hosts", ["h1:x,h2", "h1:x", "h1,,h2"])
def test_malformed_hosts_are_refused_without_the_password(hosts: str) -> None:
    with pytest.raises(StoreError, match="of a store|of the store") as refused:
        Store.open(f"postgresql://u:secret@{hosts}/db")
    assert "secret" not in str(refused.value)
