"""A small HTTP/1.1 client for engines: it keeps connections open, and reads answers whole or in parts.

Every recorded call passes through it, so it does only what calls of engines need: POST and GET, TLS, and
answers with a length, in chunks, or until the connection ends. A general client takes more processor time.
This one follows no redirects, keeps no cookies, and asks for answers that are not compressed.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import socket
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, cast
from urllib.parse import quote, unquote, urlsplit

import httptools
from aiohappyeyeballs import start_connection

# Below the 5 s after which SGLang closes idle connections, so that no call uses a connection being closed.
KEEP_ALIVE_S = 3.0
_NEXT_ADDRESS_S = 0.25  # after which a host's next address is tried, too (RFC 8305)
_MOST_HEAD_BYTES = 64 * 2**10
_MOST_UNREAD_BYTES = 256 * 2**10  # of an answer that is read in parts; more is left to the operating system


class NotConnected(OSError):
    """There is no connection to the server, so the request has not reached it."""


class ConnectTimeout(NotConnected):
    """The server accepted no connection in time."""


class BadAnswer(Exception):
    """What the server sent is not an HTTP answer that this client reads."""


class TooLarge(Exception):
    """An answer that is read whole has more bytes than the limit."""


class HttpConnections:
    """Connections to the server at one address. Use it in one event loop.

    Args:
        base_url: the address, for example http://127.0.0.1:30000; it may have a user, a password and a path.
        headers: sent with every request.
        connect_timeout_s: longest wait for a connection.

    Raises:
        ValueError: the address is not an HTTP URL.
    """

    def __init__(self, base_url: str, headers: Mapping[str, str], *, connect_timeout_s: float) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"base_url must start with http:// or https:// and name a host, got {base_url!r}"
            )
        self._is_tls = parts.scheme == "https"
        self._host = parts.hostname
        self._port = parts.port or (443 if self._is_tls else 80)
        self._addresses = _numeric(self._host, self._port)
        self._path = quote(parts.path.rstrip("/"), safe="/%:@!$&'()*+,;=~").encode()
        self._connect_timeout_s = connect_timeout_s
        sent = {
            "Host": parts.netloc.rpartition("@")[2],
            "User-Agent": "areal-agents",
            "Accept": "*/*",
            "Accept-Encoding": "identity",
            **headers,
        }
        if parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            sent.setdefault("Authorization", "Basic " + base64.b64encode(login.encode()).decode())
        self._headers = "".join(f"{name}: {_checked(value)}\r\n" for name, value in sent.items()).encode(
            "latin-1"
        )
        self._context: ssl.SSLContext | None = None
        self._idle: list[tuple[_Connection, float]] = []  # with the times since which, the latest last
        self._pruning: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def whole(
        self, method: str, path: str, body: bytes | None, *, timeout_s: float, most_bytes: int
    ) -> tuple[int, bytes]:
        """Send a request, and return the status and the whole body of the answer.

        Raises:
            NotConnected: the server cannot be reached; ConnectTimeout if it did not answer in time.
            TimeoutError: the answer has not arrived within `timeout_s`.
            OSError: the server closed the connection before the end of its answer.
            BadAnswer: the answer is not HTTP, or is compressed.
            TooLarge: the answer has more than `most_bytes`.
        """
        async with asyncio.timeout(timeout_s):
            connection = self._kept()
            if connection is not None and method == "GET":
                # The server may close an idle connection just before the request reaches it.
                with contextlib.suppress(ConnectionResetError):
                    return await self._answer_on(connection, method, path, body, most_bytes)
                connection = None
            return await self._answer_on(connection or await self._opened(), method, path, body, most_bytes)

    @asynccontextmanager
    async def streamed(
        self, method: str, path: str, body: bytes | None, *, timeout_s: float
    ) -> AsyncIterator[StreamedAnswer]:
        """Send a request, and enter with the answer once its head has arrived. Raises as `whole` does.

        The end of the answer must arrive within `timeout_s`, too.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        async with asyncio.timeout_at(deadline):
            connection = self._kept() or await self._opened()
        with self._in_use(connection):
            async with asyncio.timeout_at(deadline):
                connection.send(self._head(method, path, body), body)
                await connection.head()
            yield StreamedAnswer(connection, deadline)

    def close(self) -> None:
        """Close the idle connections now, and each of the others when its answer has ended."""
        self._is_closed = True
        if self._pruning is not None:
            self._pruning.cancel()
        for connection, _ in self._idle:
            connection.abort()
        self._idle.clear()

    async def _answer_on(
        self, connection: _Connection, method: str, path: str, body: bytes | None, most_bytes: int
    ) -> tuple[int, bytes]:
        with self._in_use(connection):
            connection.send(self._head(method, path, body), body)
            answer = await connection.whole(most_bytes)
            return connection.status, answer

    def _head(self, method: str, path: str, body: bytes | None) -> bytes:
        length = b"" if body is None and method == "GET" else b"Content-Length: %d\r\n" % len(body or b"")
        return b"%b %b%b HTTP/1.1\r\n%b%b\r\n" % (
            method.encode(),
            self._path,
            path.encode(),
            self._headers,
            length,
        )

    @contextmanager
    def _in_use(self, connection: _Connection) -> Iterator[None]:
        """Keep a connection afterwards if its answer was read to the end, and close it otherwise."""
        try:
            yield
        finally:
            if connection.is_reusable and not self._is_closed:
                self._idle.append((connection, time.monotonic()))
                if self._pruning is None:
                    loop = asyncio.get_running_loop()
                    self._pruning = loop.call_later(KEEP_ALIVE_S, self._prune)
            else:
                connection.abort()

    def _kept(self) -> _Connection | None:
        """Return the idle connection that was used last, None without one."""
        oldest = time.monotonic() - KEEP_ALIVE_S
        while self._idle:
            connection, since = self._idle.pop()
            if connection.is_reusable and since > oldest:
                return connection
            connection.abort()
        return None

    def _prune(self) -> None:
        """Close the connections that have been idle for too long."""
        self._pruning = None
        oldest = time.monotonic() - KEEP_ALIVE_S
        kept = []
        for connection, since in self._idle:
            if connection.is_reusable and since > oldest:
                kept.append((connection, since))
            else:
                connection.abort()
        self._idle = kept
        if kept:
            loop = asyncio.get_running_loop()
            self._pruning = loop.call_later(kept[0][1] - oldest, self._prune)

    async def _opened(self) -> _Connection:
        if self._is_tls and self._context is None:
            self._context = ssl.create_default_context()
        name = self._host if self._is_tls else None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                connected = await self._connected()
                _, connection = await loop.create_connection(
                    _Connection, sock=connected, ssl=self._context, server_hostname=name
                )
        except TimeoutError as error:
            raise ConnectTimeout(f"no connection within {self._connect_timeout_s:g} s") from error
        except (OSError, UnicodeError) as error:  # UnicodeError: the host is no name
            raise NotConnected(str(error)) from error
        return connection

    async def _connected(self) -> socket.socket:
        """Return a socket connected to the first of the host's addresses that accepts a connection."""
        loop = asyncio.get_running_loop()
        addresses = self._addresses or await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        return await start_connection(addresses, happy_eyeballs_delay=_NEXT_ADDRESS_S)


class StreamedAnswer:
    """An answer whose head has arrived. Its methods raise as `HttpConnections.whole` does.

    Attributes:
        status: the HTTP status.
    """

    def __init__(self, connection: _Connection, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline
        self.status = connection.status

    async def part(self) -> bytes | None:
        """Return the next part of the body, None at its end."""
        async with asyncio.timeout_at(self._deadline):
            return await self._connection.part()

    async def whole(self, most_bytes: int, *, timeout_s: float | None = None) -> bytes:
        """Return the rest of the body, which must arrive within `timeout_s`, too, if that is given."""
        limit = self._deadline
        if timeout_s is not None:
            limit = min(limit, asyncio.get_running_loop().time() + timeout_s)
        async with asyncio.timeout_at(limit):
            return await self._connection.whole(most_bytes)


class _Connection(asyncio.Protocol):
    """One connection, on which one request after another is answered.

    Attributes:
        status: the status of the current answer; 0 before its head has arrived.
    """

    _transport: asyncio.Transport
    _parser: httptools.HttpResponseParser

    def __init__(self) -> None:
        self.status = 0
        self._parts: deque[bytes] = deque()  # of the body, not read yet
        self._unread = 0  # their size
        self._outside_bytes = 0  # received since the last part of the body
        self._is_read_whole = False  # whether the reader waits for the end of the answer
        self._most_bytes = 0  # of an answer that is read whole
        self._has_length = False  # whether the head tells where the body ends
        self._has_ended = True
        self._keeps_alive = True
        self._is_paused = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    # Requests, and reading their answers

    @property
    def is_reusable(self) -> bool:
        """Whether another request may be sent; not if the answer came before the whole request was sent."""
        is_open = self._keeps_alive and self._error is None and not self._transport.is_closing()
        return self._has_ended and is_open and self._transport.get_write_buffer_size() == 0

    def send(self, head: bytes, body: bytes | None) -> None:
        """Send a request; the earlier answer must have ended."""
        self.status = self._outside_bytes = self._unread = 0
        self._is_read_whole = self._has_length = self._has_ended = False
        self._parts.clear()
        self._parser = httptools.HttpResponseParser(self)
        self._transport.writelines((head, body) if body else (head,))

    async def head(self) -> None:
        """Wait until the head of the answer has arrived."""
        while not self.status:
            await self._more()

    async def part(self) -> bytes | None:
        """Return the next part of the body, None at its end."""
        while not self._parts:
            if self._has_ended:
                return None
            if self._is_paused:
                self._is_paused = False
                self._transport.resume_reading()
            await self._more()
        part = self._parts.popleft()
        self._unread -= len(part)
        return part

    async def whole(self, most_bytes: int) -> bytes:
        """Return the body, or what has not been read of it."""
        self._is_read_whole, self._most_bytes = True, most_bytes
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        while not self._has_ended:
            await self._more()
        if self._unread > most_bytes:
            raise TooLarge
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()  # the connection may be idle for a while
        return body

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    async def _more(self) -> None:
        """Wait until there is more of the answer, and raise what ended it."""
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if self._error is not None:
            raise self._error

    # What the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport of the new connection."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not inherit from it

    def data_received(self, data: bytes) -> None:
        """Parse data, and wake the reader."""
        if self._has_ended:  # no answer is expected
            self._fail(BadAnswer("it sent data without a request"))
            return
        self._outside_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail(BadAnswer("it changed to another protocol, unasked"))
            return
        except httptools.HttpParserError as error:
            self._fail(BadAnswer(f"it sent what is not HTTP: {error}"))
            return
        if self._error is not None:  # found by a callback of the parser
            self._fail(self._error)
        elif self._outside_bytes > _MOST_HEAD_BYTES and not self._has_ended:
            size = f"larger than {_MOST_HEAD_BYTES // 2**10} KiB"
            self._fail(BadAnswer(f"the head of its answer, or what is around the body, is {size}"))
        elif self._is_read_whole:
            if self._unread > self._most_bytes:
                self._fail(TooLarge())
            elif self._has_ended:
                self._wake()
        else:
            if self._unread > _MOST_UNREAD_BYTES and not self._has_ended and not self._is_paused:
                self._is_paused = True
                self._transport.pause_reading()
            self._wake()

    def eof_received(self) -> None:
        """Close the connection when the server has."""

    def connection_lost(self, exc: Exception | None) -> None:
        """End the answer, or fail it, when the connection ends."""
        self._keeps_alive = False
        if self._has_ended or self._error is not None:
            return
        if exc is None and self.status and not self._has_length:
            self._has_ended = True
            self._wake()
            return
        what = "before its answer" if not self.status else "before the end of its answer"
        error = ConnectionResetError(f"the server closed the connection {what}")
        error.__cause__ = exc
        self._fail(error)

    # What the parser calls

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note what a header says about the body."""
        name, value = name.lower(), value.strip().lower()
        if name == b"content-length" or (name == b"transfer-encoding" and value.endswith(b"chunked")):
            self._has_length = True
        elif name == b"content-encoding" and value not in (b"", b"identity"):
            self._error = BadAnswer(f"its answer is compressed ({value.decode('latin-1')[:40]}), unasked")

    def on_headers_complete(self) -> None:
        """Note the status; a head of a 1xx status precedes that of the answer."""
        if self._has_ended:
            self._error = BadAnswer("it sent two answers to one request")
            return
        status = self._parser.get_status_code()
        if status >= 200:
            self.status = status
            self._keeps_alive = self._parser.should_keep_alive()
            self._has_length = self._has_length or status in (204, 304)

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body."""
        self._parts.append(body)
        self._outside_bytes = 0
        self._unread += len(body)

    def on_message_complete(self) -> None:
        """Note the end of the answer."""
        if self.status:
            self._has_ended = True

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._keeps_alive = False
        self._transport.abort()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _numeric(host: str, port: int) -> list[Any]:
    """Return the address of a host that is given as a number, as `getaddrinfo` does; none for a name."""
    with contextlib.suppress(OSError, UnicodeError):
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    return []


def _checked(value: str) -> str:
    """Return the value of a header. Raise ValueError if it would end the header."""
    if "\r" in value or "\n" in value or "\0" in value:
        raise ValueError("the value of a header may not have a line end")
    return value
