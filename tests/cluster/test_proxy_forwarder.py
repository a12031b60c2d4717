"""The forwarder to all proxies of a run, in front of small servers that hold the places of proxies."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa
from tls_files import made_tls_files

from areal_agents.cluster import proxy_forwarder
from areal_agents.cluster.proxy_forwarder import ProxyForwarder
from areal_agents.inference.ports import reserved_ports
from areal_agents.proxy.workers import places
from areal_agents.proxy.workers.places import ProxyTable
from areal_agents.store import Store
from areal_agents.store.roles import DEAD_AFTER_S
from areal_agents.store.schema import roles
from areal_agents.tls import TlsConfig, trusting

BODY = b"x" * 3_000_000  # larger than the buffers of sockets


class Servers:
    """Servers that hold the places of proxies, and respond with their index and the request body."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._open = contextlib.ExitStack()
        self.begun = threading.Event()
        self.release = threading.Event()

    def start(self, index: int, tls: TlsConfig | None = None) -> Callable[[], None]:
        """Start a server at a new address as the next process of a place; return a function that ends it."""
        servers = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                sent = self.rfile.read(int(self.headers["Content-Length"]))
                if sent == b"wait":
                    servers.begun.set()
                    servers.release.wait(30)
                answer = b"%d" % index + sent
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        if tls is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(tls.certificate, tls.key)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        ended = contextlib.ExitStack()
        for end in (thread.join, server.server_close, server.shutdown):
            ended.callback(end)
        self._open.push(ended.__exit__)
        earlier = next((row.epoch for row in self.store.role_rows("proxy") if row.index == index), None)
        epoch = self.store.claim_role("proxy", index, host="h", pid=1, gone=earlier).epoch
        scheme = "http" if tls is None else "https"
        url = f"{scheme}://127.0.0.1:{server.server_port}"
        assert self.store.beat_role("proxy", index, epoch, url=url)
        return ended.close

    def make_old(self, index: int) -> None:
        """Make the last heartbeat of a proxy so old that the proxy counts as dead."""
        engine = sa.create_engine(self.store.url)
        with engine.begin() as connection:
            old = roles.c.beat_at - DEAD_AFTER_S - 1
            connection.execute(sa.update(roles).where(roles.c.index == index).values(beat_at=old))
        engine.dispose()

    def replace(self, index: int) -> None:
        """Give the place and the address of a proxy to another process."""
        engine = sa.create_engine(self.store.url)
        with engine.begin() as connection:
            own = sa.and_(roles.c.role == "proxy", roles.c.index == index)
            connection.execute(sa.update(roles).where(own).values(epoch=roles.c.epoch + 1))
        engine.dispose()

    def close(self) -> None:
        self.release.set()
        self._open.close()


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    monkeypatch.setattr(places, "_READ_S", 0.05)
    monkeypatch.setattr(places, "_SOONEST_S", 0.0)
    monkeypatch.setattr(proxy_forwarder, "_CHECK_S", 0.05)
    with Store.open(tmp_path / "s.db") as store, contextlib.closing(Servers(store)) as made:
        yield made


@contextlib.contextmanager
def forwarded(servers: Servers, *, preferred: int) -> Iterator[httpx.Client]:
    """Yield a client of a forwarder for two proxies. The client keeps its connections open."""
    with reserved_ports(1) as [port], forwarded_at(port, servers, preferred=preferred) as client:
        yield client


@contextlib.contextmanager
def forwarded_at(port: int, servers: Servers, *, preferred: int) -> Iterator[httpx.Client]:
    """Yield a client of such a forwarder at a port that the caller has reserved."""
    table = ProxyTable(servers.store)
    forwarder = ProxyForwarder(table, count=2, preferred=preferred)
    with (
        table.watching(),
        forwarder.running("127.0.0.1", port),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False) as client,
    ):
        yield client


def ask(client: httpx.Client, body: bytes = b"") -> bytes:
    return client.post("/", content=body).raise_for_status().content


def test_connections_go_to_a_proxy_that_is_running(servers: Servers) -> None:
    servers.start(0)
    end = servers.start(1)
    with forwarded(servers, preferred=1) as client:
        assert ask(client, BODY) == b"1" + BODY
        end()
        client.headers["Connection"] = "close"  # the ended server still serves the open connection
        assert ask(client) == b"1"
        assert ask(client) == b"0"
        servers.start(1)
        assert ask(client) in (b"0", b"1")


def test_a_request_to_a_dead_proxy_is_aborted_and_the_next_one_reaches_another(servers: Servers) -> None:
    servers.start(0)
    servers.start(1)
    with forwarded(servers, preferred=0) as client:
        dying = threading.Thread(target=lambda: (servers.begun.wait(20), servers.make_old(0)))
        dying.start()
        with pytest.raises(httpx.RemoteProtocolError):
            ask(client, b"wait")
        dying.join()
        assert ask(client) == b"1"


def test_a_request_is_aborted_when_another_process_takes_the_address_of_its_proxy(servers: Servers) -> None:
    servers.start(0)
    with forwarded(servers, preferred=0) as client:
        replacing = threading.Thread(target=lambda: (servers.begun.wait(20), servers.replace(0)))
        replacing.start()
        with pytest.raises(httpx.RemoteProtocolError):
            ask(client, b"wait")
        replacing.join()
        assert ask(client) == b"0"


def test_a_connection_waits_until_there_is_a_proxy(servers: Servers) -> None:
    with forwarded(servers, preferred=0) as client:
        starting = threading.Timer(0.5, servers.start, args=(1,))
        starting.start()
        assert ask(client) == b"1"
        starting.join()


def test_without_any_proxy_a_connection_is_closed(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_forwarder, "_FIND_S", 0.1)
    with reserved_ports(1) as [port]:  # so that no other server listens on it after the forwarder
        with (
            forwarded_at(port, servers, preferred=0) as client,
            pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)),
        ):
            ask(client)
        with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), 60):
            pass


def test_a_forwarder_that_does_not_end_in_time_hides_no_error(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_forwarder, "_END_S", 0.1)
    held, release = threading.Event(), threading.Event()

    def owner_of(index: int) -> None:
        held.set()
        release.wait(30)

    table = ProxyTable(servers.store)
    monkeypatch.setattr(table, "owner_of", owner_of)
    forwarder = ProxyForwarder(table, count=1, preferred=0)
    with (
        pytest.raises(KeyError),
        reserved_ports(1) as [port],
        forwarder.running("127.0.0.1", port),
        socket.create_connection(("127.0.0.1", port), 5),
    ):
        assert held.wait(30)
        raise KeyError
    release.set()
    [thread] = [one for one in threading.enumerate() if one.name == "proxy-forwarder"] or [None]
    if thread is not None:
        thread.join(30)
        assert not thread.is_alive()


def test_connections_to_proxies_with_https_are_verified_and_encrypted(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls, other = made_tls_files(tmp_path / "tls"), made_tls_files(tmp_path / "other")
    servers.start(0, tls)
    with trusting(tls), forwarded(servers, preferred=0) as client:
        assert ask(client, BODY) == b"0" + BODY
    monkeypatch.setattr(proxy_forwarder, "_FIND_S", 0.5)
    with trusting(other), forwarded(servers, preferred=0) as client, pytest.raises(httpx.TransportError):
        ask(client)
