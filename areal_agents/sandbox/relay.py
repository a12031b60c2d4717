"""Forwards connections from the loopback interface of a sandbox to the server that it may call.

The listening socket was made within the sandbox's network namespace and belongs to it, although this process
accepts its connections; so nothing of ours runs inside, and the command needs no other way out.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from urllib.parse import urlsplit, urlunsplit

MODEL_PORT = 8000  # of the loopback interface of a sandbox
MOST_CONNECTIONS = 128  # at the same time, of one command; a command could else use up this process's files
_CONNECT_S = 30.0
_PIECE = 65_536  # bytes

logger = logging.getLogger(__name__)


def relayed_url(url: str) -> str:
    """Return a URL with the relay in place of its server."""
    parts = urlsplit(url)
    return urlunsplit(("http", f"127.0.0.1:{MODEL_PORT}", parts.path, parts.query, parts.fragment))


class Relay:
    """Accepts connections on a socket of a sandbox until it is closed."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None, url
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._open: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None

    async def start(self, listener: socket.socket) -> None:
        """Accept connections from `listener`, which is closed with the relay.

        While MOST_CONNECTIONS are open, further ones wait in its backlog.
        """
        listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(listener))

    async def close(self) -> None:
        """Close every connection."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait({self._accepting})
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _accept(self, listener: socket.socket) -> None:
        loop, places = asyncio.get_running_loop(), asyncio.Semaphore(MOST_CONNECTIONS)
        with listener:
            while True:
                await places.acquire()
                connection, _ = await loop.sock_accept(listener)
                task = asyncio.create_task(self._connected(connection))
                self._open.add(task)
                task.add_done_callback(self._open.discard)
                task.add_done_callback(lambda _: places.release())

    async def _connected(self, connection: socket.socket) -> None:
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        loop = asyncio.get_running_loop()
        try:
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection)
        except BaseException:
            connection.close()
            raise
        try:
            await self._forward(reader, asyncio.StreamWriter(transport, protocol, reader, loop))
        finally:
            transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_CONNECT_S):
                far_reader, far_writer = await asyncio.open_connection(
                    self._host, self._port, ssl=self._tls, server_hostname=self._host if self._tls else None
                )
        except OSError as error:  # a time limit is one too
            logger.warning("a sandbox cannot reach the model at %s:%d: %s", self._host, self._port, error)
            return
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_copy(reader, far_writer))
                both.create_task(_copy(far_reader, writer))
        except* OSError:
            pass  # one side has gone (to shut it down is ENOTCONN then), and the other is closed too
        finally:
            far_writer.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(_PIECE):
        writer.write(piece)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
