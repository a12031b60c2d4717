"""One address for all proxies of a run, which lasts as long as a rollout process.

An agent keeps the base URL with which its episode was opened, and a proxy that is started again has another
address. So a rollout process, its agents and sandboxes connect to a forwarder beside them, which passes the
bytes of each connection to a proxy that is running: any of them answers any call. A connection to a proxy
that has moved or is dead is closed, because nothing else may tell the client; when the client tries again, it
reaches another proxy.

The forwarder itself serves HTTP, to programs of its machine. Where the proxies serve HTTPS, it encrypts what
it passes on, and passes nothing to a server without a certificate for its address.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import cast
from urllib.parse import urlsplit

import uvloop

from areal_agents.errors import StoreError
from areal_agents.proxy.workers.places import ProxyTable
from areal_agents.sockets import BACKLOG, allow_many_connections, listen
from areal_agents.store import Store

_logger = logging.getLogger(__name__)

_CONNECT_S = 3.0  # until a proxy that does not answer is passed over
_FIND_S = 25.0  # how long a connection waits for a proxy; clients of the control API wait for 30 seconds
_RETRY_S = 0.2
_CHECK_S = 1.0  # between two looks at which proxies are still running
_AVOIDED_S = 5.0  # how long a proxy that could not be reached is the last that is tried
_END_S = 10.0
_FLUSH_S = 60.0  # for what a closed connection still has to write


class ProxyForwarder:
    """Passes connections to the proxies of a run.

    Args:
        table: where the proxies are; it is being watched.
        count: the number of proxies.
        preferred: the index of the proxy that is used while it is running.
    """

    def __init__(self, table: ProxyTable, *, count: int, preferred: int) -> None:
        self._table = table
        self._order = [(preferred + offset) % count for offset in range(count)]
        self._clients: set[_Client] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._tls = ssl.create_default_context()
        self._unreached: dict[str, float] = {}  # when an address could last not be reached

    @contextlib.contextmanager
    def running(self, host: str, port: int) -> Iterator[None]:
        """Forward, on a thread, within the with-block. Raises ConfigError if the port is taken."""
        allow_many_connections()
        listener = listen(host, port)
        loop = uvloop.new_event_loop()
        server = loop.run_until_complete(
            loop.create_server(
                lambda: _Client(self._begin, self._clients.discard), sock=listener, backlog=BACKLOG
            )
        )
        checking = loop.create_task(self._check())
        thread = threading.Thread(target=_run, args=(loop,), name="proxy-forwarder", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ending = asyncio.run_coroutine_threadsafe(self._end(server, checking), loop)
            try:
                ending.result(_END_S)
            except TimeoutError:  # an error of the with-block says more
                _logger.warning("connections to the proxies were not closed within %g s", _END_S)
            finally:
                loop.call_soon_threadsafe(loop.stop)
                thread.join(_END_S)

    def _begin(self, client: _Client) -> None:
        self._clients.add(client)
        connecting = asyncio.ensure_future(self._connect(client))
        self._connecting.add(connecting)
        connecting.add_done_callback(self._connecting.discard)

    async def _connect(self, client: _Client) -> None:
        """Connect a client to a proxy; without one, close its connection."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + _FIND_S
        try:
            while client.transport is not None and loop.time() < give_up_at:
                for index, url, owner in self._running():
                    parts = urlsplit(url)
                    host, port = parts.hostname or "", parts.port or 80
                    tls = self._tls if parts.scheme == "https" else None
                    try:
                        async with asyncio.timeout(_CONNECT_S):
                            _, side = await loop.create_connection(_Side, host, port, ssl=tls)
                    except OSError as error:  # TimeoutError is one too
                        self._unreached[url] = time.monotonic()
                        what = str(error) or "no answer"
                        _logger.warning("proxy %d at %s cannot be reached: %s", index, url, what)
                        continue
                    if client.join(side, index, owner):
                        return
                with contextlib.suppress(StoreError):  # it is read again, and the thread that reads it logs
                    await self._table.refresh()
                await asyncio.sleep(_RETRY_S)
            if client.transport is not None:
                _logger.error("no proxy of the run could be reached for %.0f s", _FIND_S)
        finally:
            if client.owner is None:
                client.abort()

    def _running(self) -> list[tuple[int, str, str]]:
        """Return (index, URL, owner name) of the proxies that are running, in the order of attempts."""
        found = []
        for index in self._order:
            owner = self._table.owner_of(index)
            if owner is not None and (url := self._table.address(index)) is not None:
                found.append((index, url, owner))
        now = time.monotonic()
        return sorted(found, key=lambda one: now - self._unreached.get(one[1], -1e9) < _AVOIDED_S)

    async def _check(self) -> None:
        """Close the connections to proxies that are dead, also if another process has their address."""
        while True:
            await asyncio.sleep(_CHECK_S)
            for client in list(self._clients):
                if client.owner is not None and self._table.owner_of(client.index) != client.owner:
                    client.abort()

    async def _end(self, server: asyncio.AbstractServer, checking: asyncio.Task[None]) -> None:
        server.close()
        tasks = [checking, *self._connecting]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for client in list(self._clients):
            client.abort()


@contextlib.contextmanager
def forwarding_to_proxies(
    store: Store, host: str, port: int, *, count: int, preferred: int
) -> Iterator[None]:
    """Forward the connections to a port of this machine to the proxies of the run, within the block.

    Args:
        count, preferred: see `ProxyForwarder`.
    """
    table = ProxyTable(store)
    forwarder = ProxyForwarder(table, count=count, preferred=preferred)
    with table.watching(), forwarder.running(host, port):
        yield


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped, and close it."""
    try:
        loop.run_forever()
    finally:
        loop.close()


class _Side(asyncio.Protocol):
    """One of two connections: what it receives is written to the other, no faster than that one takes it.

    When one is closed, the other is closed after it has written everything, or at the latest `_FLUSH_S`
    later, because a client may never read.
    """

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None  # None: it is closed
        self.other: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        assert self.other is not None, "a proxy says nothing before it is asked"
        self.other.write(data)

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        if self.other is not None:
            self.other.close()
            if self.other.get_write_buffer_size():
                asyncio.get_running_loop().call_later(_FLUSH_S, self.other.abort)


class _Client(_Side):
    """The connection of a client.

    Args:
        begin: called when it is made.
        end: called when it is closed.

    Attributes:
        index: the proxy to which it is passed.
        owner: the owner name of the process that this proxy is; None until there is one.
    """

    def __init__(self, begin: Callable[[_Client], None], end: Callable[[_Client], None]) -> None:
        super().__init__()
        self._begin = begin
        self._end = end
        self.index = -1
        self.owner: str | None = None
        self._early = b""  # received before there is a proxy

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._begin(self)

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.write(data)
        elif self.transport is not None:
            self._early += data
            self.transport.pause_reading()

    def join(self, side: _Side, index: int, owner: str) -> bool:
        """Pass this connection on to that of a proxy; return whether both are open."""
        if self.transport is None or side.transport is None:
            if side.transport is not None:
                side.transport.abort()
            return False
        self.index, self.owner = index, owner
        self.other, side.other = side.transport, self.transport
        self.other.write(self._early)
        self._early = b""
        self.transport.resume_reading()
        return True

    def abort(self) -> None:
        """Close both connections at once."""
        for transport in (self.transport, self.other):
            if transport is not None:
                transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._end(self)
