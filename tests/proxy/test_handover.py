"""Connections that workers pass to one another: which ones move, and what happens if they cannot."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from workers_support import wait_for

from areal_agents.proxy.server import build_server
from areal_agents.proxy.workers.handover import Handover, WorkerSockets, open_inboxes
from areal_agents.proxy.workers.identity import PRIVATE_HOST, Workers, WorkerSpec
from areal_agents.sockets import listen


def app_of(index: int) -> ASGIApp:
    """Return an app that responds with the index of its worker and the size of the request's body."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for event in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{event}.complete"})
            return
        body = await Request(scope, receive).body()
        await PlainTextResponse(f"{index} {len(body)}")(scope, receive, send)

    return app


class Pair:
    """Two workers in threads, each with its own public listener.

    Paths that begin with /e/0 belong to the first worker, and paths that begin with /e/1 to the second.
    """

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.public = [stack.enter_context(listen("127.0.0.1", 0)) for _ in range(2)]
        self.private = [stack.enter_context(listen(PRIVATE_HOST, 0)) for _ in range(2)]
        ports = tuple(listener.getsockname()[1] for listener in self.private)
        self.inboxes, self.outboxes = open_inboxes(2, stack)
        self.workers = [Workers(WorkerSpec(folder, "run", index, 0, ports, "secret")) for index in range(2)]

    @contextlib.contextmanager
    def serving(self, index: int) -> Iterator[None]:
        """Run one of the workers within the with-block."""
        worker = WorkerSockets(self.workers[index], self.inboxes[index], tuple(self.outboxes))
        server = build_server(app_of(index), Handover(worker, lambda path: int(path[3])))
        listeners = [self.public[index].dup(), self.private[index].dup()]
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=listeners)))
        with self.workers[index].holding_lock():
            thread.start()
            try:
                wait_for(lambda: server.started)
                yield
            finally:
                server.should_exit = True
                thread.join(20)
                assert not thread.is_alive()

    def connect(self, listener: socket.socket) -> HTTPConnection:
        """Return a connection to one listener."""
        return HTTPConnection("127.0.0.1", listener.getsockname()[1], timeout=20)


def ask(connection: HTTPConnection, path: str, body: bytes = b"") -> str:
    """Send a request, and return the response; the connection must stay open for the next request."""
    connection.request("POST", path, body)
    connection.auto_open = 0
    return connection.getresponse().read().decode()


def has_arrival(inbox: socket.socket) -> bool:
    """Whether an inbox has data."""
    try:
        return bool(inbox.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with contextlib.ExitStack() as stack:
        yield Pair(tmp_path / "workers", stack)


def test_a_connection_moves_to_the_worker_of_its_next_request(pair: Pair) -> None:
    with pair.serving(0), pair.serving(1), contextlib.closing(pair.connect(pair.public[0])) as connection:
        body = b"x" * 50_000
        for path in ("/e/0a/v1", "/e/1a/v1", "/e/1b/v1", "/e/0a/v1", "/e/1a/v1"):
            assert ask(connection, path, body) == f"{path[3]} 50000"
        assert ask(connection, "/episodes") == "1 0"  # the path names no episode, so the connection stays


def test_a_connection_to_a_private_listener_is_not_passed_on(pair: Pair) -> None:
    with pair.serving(0), pair.serving(1), contextlib.closing(pair.connect(pair.private[0])) as connection:
        assert ask(connection, "/e/1a/v1") == "0 0"


def test_no_connection_is_passed_to_a_worker_that_is_down(pair: Pair) -> None:
    with pair.serving(0), contextlib.closing(pair.connect(pair.public[0])) as connection:
        assert ask(connection, "/e/1a/v1") == "0 0"
        with pair.serving(1):
            assert ask(connection, "/e/1a/v1") == "1 0"


def test_no_connection_is_passed_to_a_full_inbox(pair: Pair) -> None:
    with pair.serving(0), pair.workers[1].holding_lock():
        with contextlib.suppress(BlockingIOError):
            while True:
                pair.outboxes[1].send(b"x" * 10_000)
        with contextlib.closing(pair.connect(pair.public[0])) as connection:
            assert ask(connection, "/e/1a/v1", b"x" * 100_000) == "0 100000"


def test_a_connection_passed_to_a_worker_that_died_waits_for_its_restart(pair: Pair) -> None:
    with pair.serving(0), contextlib.closing(pair.connect(pair.public[0])) as connection:
        with pair.workers[1].holding_lock():  # it is running, but does not serve
            connection.request("POST", "/e/1a/v1", b"x" * 100)
            wait_for(lambda: has_arrival(pair.inboxes[1]))
        with pair.serving(1):
            assert connection.getresponse().read() == b"1 100"
