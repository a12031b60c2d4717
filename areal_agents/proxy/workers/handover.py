"""Passes an open connection to the worker that owns the episode of its next request.

All workers accept connections on the one public port, so any of them may receive a request. Before a request
is parsed, its first bytes are searched for an episode's key. If the episode belongs to another worker, the
socket and the bytes read so far are sent to that worker, which serves the connection as if it had accepted
it. The calls of an agent thus cost no more than with a single worker. A connection that cannot be passed
stays with its worker, which forwards the requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import uvicorn

from areal_agents.proxy.http_limits import LimitedProtocol
from areal_agents.proxy.workers.identity import Workers

_logger = logging.getLogger(__name__)

_LONGEST_METHOD = 8  # "OPTIONS "
_LONGEST_KEY = 128
_MOST_BYTES = 2**18  # the most bytes that are read from a connection at once
_ARRIVALS_AT_ONCE = 64


def open_inboxes(count: int, stack: contextlib.ExitStack) -> tuple[list[socket.socket], list[socket.socket]]:
    """Return (inboxes, outboxes): for each worker the socket that it receives connections from, and its peer.

    The supervisor holds both ends, so connections that were sent to a dead worker wait until it is restarted.
    """
    inboxes, outboxes = [], []
    for _ in range(count):
        inbox, outbox = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        outbox.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * _MOST_BYTES)  # the kernel may grant less
        for end in (inbox, outbox):
            end.setblocking(False)
            stack.enter_context(end)
        inboxes.append(inbox)
        outboxes.append(outbox)
    return inboxes, outboxes


@dataclass(frozen=True, slots=True)
class WorkerSockets:
    """One of several workers, and the sockets that it inherited for passing connections.

    Attributes:
        workers: this worker and its siblings.
        inbox: the socket that receives connections for this worker's episodes.
        outboxes: [N] the sockets that send connections, by the index of the receiving worker.
    """

    workers: Workers
    inbox: socket.socket
    outboxes: tuple[socket.socket, ...]


class Handover:
    """Sends connections to other workers, and serves those that they send.

    Args:
        worker: this worker and its sockets.
        worker_of: returns the index of the worker that a request path belongs to; must not block.
    """

    def __init__(self, worker: WorkerSockets, worker_of: Callable[[str], int]) -> None:
        self._workers = worker.workers
        self._inbox = worker.inbox
        self._outboxes = worker.outboxes
        self._worker_of = worker_of
        self._receiving: set[asyncio.Task[None]] = set()

    @property
    def private(self) -> tuple[str, int]:
        """(host, port) of the listener for forwarded requests, whose connections are never passed on."""
        return self._workers.private

    def passes(self, transport: asyncio.Transport, data: bytes) -> bool:
        """Send the connection to another worker if the request that begins with `data` belongs there.

        Returns:
            Whether it was sent. If so, the transport is closed, but the connection stays open in the other
            worker.
        """
        path = _episode_path(data)
        index = self._workers.index if path is None else self._worker_of(path)
        if index == self._workers.index or len(data) > _MOST_BYTES or transport.get_write_buffer_size():
            return False
        if not self._workers.is_up(index):
            return False
        connection = transport.get_extra_info("socket")
        try:
            socket.send_fds(self._outboxes[index], [data], [connection.fileno()])
        except OSError as error:  # for example a full inbox; the request is then forwarded
            _logger.info("a connection could not be passed to worker %d: %s", index, error)
            return False
        transport.close()
        return True

    @contextlib.contextmanager
    def receiving(self, server: uvicorn.Server) -> Iterator[None]:
        """Within the with-block, serve the connections that siblings send. Needs a running event loop."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._inbox, self._receive, server)
        try:
            yield
        finally:
            loop.remove_reader(self._inbox)

    def _receive(self, server: uvicorn.Server) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(_ARRIVALS_AT_ONCE):
            try:
                data, descriptors, _, _ = socket.recv_fds(
                    self._inbox, _MOST_BYTES, 1, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            if not descriptors:
                _logger.error(
                    "a connection from another worker was lost because this process has too many open files; "
                    "raise its limit (ulimit -n)"
                )
                continue
            connection = socket.socket(fileno=descriptors[0])
            connection.setblocking(False)
            task = loop.create_task(self._serve(server, connection, data))
            self._receiving.add(task)
            task.add_done_callback(self._receiving.discard)

    async def _serve(self, server: uvicorn.Server, connection: socket.socket, data: bytes) -> None:
        config = server.config

        def protocol() -> asyncio.Protocol:
            return PassedOn(
                self, data,
                config=config, server_state=server.server_state, app_state=server.lifespan.state,
            )  # fmt: skip

        try:
            await asyncio.get_running_loop().connect_accepted_socket(protocol, connection)
        except OSError as error:  # the client has disconnected
            _logger.info("a connection ended while it was passed between workers: %s", error)
            connection.close()


class PassedOn(LimitedProtocol):
    """uvicorn's HTTP protocol, extended to pass a connection to the worker that its next request belongs to.

    Args:
        handover: decides which connections are passed.
        received: bytes that a sibling has read from the connection; their request is always served here.
        **uvicorns: the arguments that uvicorn passes to each protocol.
    """

    def __init__(self, handover: Handover, received: bytes = b"", **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._handover = handover
        self._received = received
        self._is_public = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Initialise a connection, and process the bytes that a sibling has read from it."""
        super().connection_made(transport)
        self._is_public = self.server != self._handover.private
        if self._received:
            received, self._received = self._received, b""
            super().data_received(received)

    def data_received(self, data: bytes) -> None:
        """Pass the connection on if `data` begins a request for another worker, else parse `data`."""
        if self._is_public and self._is_between_requests() and self._handover.passes(self.transport, data):
            return
        super().data_received(data)

    def _is_between_requests(self) -> bool:
        """Whether all requests read so far are complete and were answered."""
        if self.is_in_head or self.pipeline:
            return False
        cycle = self.cycle
        return cycle is None or (cycle.response_complete and not cycle.more_body)


class HandoverServer(uvicorn.Server):
    """uvicorn's server, which also serves the connections that sibling workers send."""

    def __init__(self, config: uvicorn.Config, handover: Handover) -> None:
        super().__init__(config)
        self._handover = handover
        self._receiving = contextlib.ExitStack()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to serve, also the connections that siblings send."""
        await super().startup(sockets)
        self._receiving.enter_context(self._handover.receiving(self))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections, and finish the running requests."""
        self._receiving.close()
        await super().shutdown(sockets)


def protocol_of(handover: Handover) -> type[asyncio.Protocol]:
    """Return a factory of protocols; it is typed as a class because uvicorn's configuration expects one."""

    def make(**uvicorns: Any) -> PassedOn:
        return PassedOn(handover, **uvicorns)

    return cast(type[asyncio.Protocol], make)


def _episode_path(data: bytes) -> str | None:
    """Return a request's path up to the episode's key, None if `data` does not begin with such a path."""
    start = data.find(b" /e/", 0, _LONGEST_METHOD + 3)
    if start < 0:
        return None
    end = data.find(b"/", start + 4, start + 4 + _LONGEST_KEY)
    return data[start + 1 : end].decode("ascii", "replace") if end > 0 else None
