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
        self._server: asyncio.Server | None = None
        self._is_closed = False

    async def start(self, listener: socket.socket) -> None:
        """Accept connections from `listener`, which is closed with the relay."""
        self._server = await asyncio.start_server(self._connected, sock=listener)

    async def close(self) -> None:
        """Close every connection."""
        self._is_closed = True  # also for connections that were accepted, and that nothing forwards yet
        if self._server is not None:
            self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._is_closed or len(self._open) >= MOST_CONNECTIONS:
            writer.transport.abort()
            return
        self._open.add(task)
        try:
            await self._forward(reader, writer)
        except asyncio.CancelledError:
            pass  # by `close`, which waits for the end; asyncio would log the cancellation as an error
        finally:
            self._open.discard(task)
            writer.transport.abort()

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
        except* ConnectionError:
            pass  # one side has gone, and the other is closed too
        finally:
            far_writer.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(_PIECE):
        writer.write(piece)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
