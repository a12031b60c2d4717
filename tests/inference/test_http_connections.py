"""The HTTP client of the engines, with servers that answer in every valid form and in invalid ones."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import uvloop
from polling import until
from tls_files import made_tls_files

from areal_agents.inference import http_connections
from areal_agents.inference.http_connections import BadAnswer, HttpConnections, NotConnected, TooLarge
from areal_agents.tls import trusting

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy:DeprecationWarning")
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\n"
WAIT_S = 60.0  # a limit that no test waits out


@pytest.fixture(autouse=True)
def keep_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """No idle connection is closed because of its age, unless a test sets a shorter time."""
    monkeypatch.setattr(http_connections, "KEEP_ALIVE_S", 600.0)


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    """The proxy runs uvloop; other users of engines run asyncio's loop."""
    policy: asyncio.AbstractEventLoopPolicy = request.param()
    return policy


class Server:
    """Plays back raw answers; `requests` are the received requests, `opened` the number of connections."""

    def __init__(self, *answers: bytes | None) -> None:
        self.answers = list(answers)  # None: the connection is closed without an answer
        self.requests: list[tuple[bytes, bytes]] = []
        self.opened = self.closed = 0
        self.url = ""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        try:
            while self.answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0] or 0)
                self.requests.append((head, await reader.readexactly(length)))
                answer = self.answers.pop(0)
                if answer is None:
                    return
                writer.write(answer)
                await writer.drain()
                if b"content-length" not in answer.lower() and b"chunked" not in answer.lower():
                    return
            await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.closed += 1
            writer.close()


@contextlib.asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@contextlib.asynccontextmanager
async def connected(*answers: bytes | None) -> AsyncIterator[tuple[HttpConnections, Server]]:
    server = Server(*answers)
    async with serving(server) as url:
        connections = HttpConnections(url, {}, connect_timeout_s=WAIT_S)
        try:
            yield connections, server
        finally:
            connections.close()


def sized(body: bytes, status: bytes = b"200 OK", more: bytes = b"") -> bytes:
    return b"HTTP/1.1 %b\r\n%bContent-Length: %d\r\n\r\n%b" % (status, more, len(body), body)


async def post(connections: HttpConnections, body: bytes = b"{}", most: int = 10**7) -> tuple[int, bytes]:
    return await connections.whole("POST", "/generate", body, timeout_s=WAIT_S, most_bytes=most)


ANSWERS = {
    "length": (sized(b"text"), 200, b"text"),
    "chunks": (
        OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nte\r\n2;x=y\r\nxt\r\n0\r\nA: b\r\n\r\n",
        200,
        b"text",
    ),
    "end of the connection": (OK + b"\r\ntext", 200, b"text"),
    "empty": (sized(b"", b"503 Service Unavailable"), 503, b""),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
    "after an interim answer": (b"HTTP/1.1 100 Continue\r\n\r\n" + sized(b"text"), 200, b"text"),
    "HTTP/1.0": (b"HTTP/1.0 200 OK\r\nContent-Length: 4\r\n\r\ntext", 200, b"text"),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_answers_of_every_form_are_read(name: str) -> None:
    answer, status, body = ANSWERS[name]
    async with connected(answer) as (connections, _):
        assert await post(connections) == (status, body)


@pytest.mark.parametrize("name", ANSWERS)
async def test_answers_of_every_form_are_streamed(name: str) -> None:
    answer, status, body = ANSWERS[name]
    async with connected(answer) as (connections, _):
        async with connections.streamed("POST", "/generate", b"{}", timeout_s=WAIT_S) as streamed:
            parts = []
            while (part := await streamed.part()) is not None:
                parts.append(part)
        assert (streamed.status, b"".join(parts)) == (status, body)


async def test_a_connection_is_used_again() -> None:
    async with connected(*[sized(b"text")] * 3) as (connections, server):
        for _ in range(3):
            await post(connections)
        assert server.opened == 1


@pytest.mark.parametrize("answer", [sized(b"text", more=b"Connection: close\r\n"), ANSWERS["HTTP/1.0"][0]])
async def test_a_connection_that_the_server_will_close_is_not_used_again(answer: bytes) -> None:
    async with connected(answer, sized(b"text")) as (connections, server):
        await post(connections)
        await post(connections)
        assert server.opened == 2


async def test_a_connection_is_not_used_again_if_the_answer_came_before_the_whole_request_was_sent() -> None:
    opened = 0

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sized(b"text"))
        await closing.wait()  # the server reads no more than fits its buffer
        writer.close()

    closing = asyncio.Event()
    async with serving(refuse) as url:
        connections = HttpConnections(url, {}, connect_timeout_s=WAIT_S)
        for _ in range(2):
            assert await post(connections, b"x" * 30_000_000) == (200, b"text")
        assert opened == 2
        connections.close()
        closing.set()


async def test_concurrent_requests_have_connections_of_their_own() -> None:
    async with connected(*[sized(b"text")] * 4) as (connections, server):
        assert await asyncio.gather(*(post(connections) for _ in range(4))) == [(200, b"text")] * 4
        assert server.opened == 4


async def test_an_idle_connection_is_closed_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connections, "KEEP_ALIVE_S", 0.05)
    async with connected(sized(b"text"), sized(b"text")) as (connections, server):
        await post(connections)
        await until(lambda: server.closed)
        await post(connections)
        assert server.opened == 2


async def test_an_expired_connection_is_not_used_even_if_the_event_loop_was_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_connections, "KEEP_ALIVE_S", 0.05)
    async with connected(sized(b"text"), sized(b"text")) as (connections, server):
        await post(connections)
        time.sleep(0.1)  # noqa: ASYNC251 - the timer that closes the connection cannot run
        await post(connections)
        assert server.opened == 2


async def test_closing_ends_idle_connections() -> None:
    async with connected(sized(b"text"), sized(b"text")) as (connections, server):
        await post(connections)
        connections.close()
        await until(lambda: server.closed)


async def test_a_get_is_sent_again_if_the_server_has_closed_an_idle_connection_and_a_post_is_not() -> None:
    async with connected(sized(b"1"), None, sized(b"2"), None) as (connections, server):
        get = {"timeout_s": WAIT_S, "most_bytes": 10}
        assert await connections.whole("GET", "/health", None, **get) == (200, b"1")
        assert await connections.whole("GET", "/health", None, **get) == (200, b"2")
        assert server.opened == 2
        with pytest.raises(ConnectionResetError, match="closed the connection before its answer"):
            await post(connections)


@pytest.mark.parametrize("body", [b"", b"{}", b"x" * 3_000_000])
async def test_requests_arrive_whole(body: bytes) -> None:
    server = Server(sized(b""))
    async with serving(server) as url:
        with_login = url.replace("://", "://us%40er:pass@") + "/a b/"
        connections = HttpConnections(with_login, {"X-Key": "value"}, connect_timeout_s=WAIT_S)
        await post(connections, body)
        connections.close()
    (head, received), *_ = server.requests
    assert received == body
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /a%20b/generate HTTP/1.1"
    assert {"X-Key: value", "Host: " + url.removeprefix("http://"), f"Content-Length: {len(body)}"} <= set(
        lines
    )
    assert "Authorization: Basic dXNAZXI6cGFzcw==" in lines


BAD_ANSWERS = {
    "not HTTP": (b"SSH-2.0-OpenSSH\r\n", BadAnswer, "not HTTP"),
    "a head without end": (OK + b"A: " + b"x" * 100_000, BadAnswer, "larger than 64 KiB"),
    "headers without end": (OK + b"A: b\r\n" * 20_000, BadAnswer, "larger than 64 KiB"),
    "a trailer without end": (
        OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nA: " + b"x" * 400_000,
        BadAnswer,
        "larger than 64 KiB",
    ),
    "compressed": (sized(b"text", more=b"Content-Encoding: gzip\r\n"), BadAnswer, "compressed"),
    "another protocol": (
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
        BadAnswer,
        "another protocol",
    ),
    "two answers": (sized(b"text") + sized(b"more"), BadAnswer, "two answers"),
    "a short body": (OK + b"Content-Length: 9\r\n\r\ntext", ConnectionResetError, "end of its answer"),
    "a cut chunk": (OK + b"Transfer-Encoding: chunked\r\n\r\n9\r\ntext", ConnectionResetError, "its answer"),
    "a chunk without length": (OK + b"Transfer-Encoding: chunked\r\n\r\nx\r\n", BadAnswer, "not HTTP"),
    "too much": (sized(b"x" * 1_000_001), TooLarge, None),
    "too much without a length": (OK + b"\r\n" + b"x" * 1_000_001, TooLarge, None),
    "nothing": (None, ConnectionResetError, "before its answer"),
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
async def test_an_invalid_answer_is_an_error_and_closes_the_connection(name: str) -> None:
    answer, error, message = BAD_ANSWERS[name]

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        try:
            if answer is not None:
                writer.write(answer)
            writer.write_eof()
            await reader.read()
        except ConnectionError:  # the client closed the connection before it read everything
            pass
        closed.set_result(None)

    closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    async with serving(play) as url:
        connections = HttpConnections(url, {}, connect_timeout_s=WAIT_S)
        with pytest.raises(error, match=message):
            await post(connections, b"", most=1_000_000)
        await asyncio.wait_for(closed, WAIT_S)


async def test_data_on_an_idle_connection_closes_it() -> None:
    writers: list[asyncio.StreamWriter] = []
    ended: list[asyncio.StreamWriter] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"{}"):
                writer.write(sized(b"text"))
        ended.append(writer)

    async with serving(answer) as url:
        connections = HttpConnections(url, {}, connect_timeout_s=WAIT_S)
        await post(connections)
        writers[0].write(sized(b"forged"))
        await until(lambda: ended)
        assert await post(connections) == (200, b"text")
        assert len(writers) == 2
        connections.close()


async def test_a_request_without_an_answer_times_out_and_closes_its_connection() -> None:
    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        closed.set_result(await reader.read())

    closed: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    async with serving(wait) as url:
        connections = HttpConnections(url, {}, connect_timeout_s=WAIT_S)
        with pytest.raises(TimeoutError) as late:
            await connections.whole("POST", "/", b"{}", timeout_s=0.1, most_bytes=1)
        assert not isinstance(late.value, NotConnected)
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(closed, WAIT_S)


async def test_a_stream_that_stalls_ends_at_its_limit() -> None:
    async def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK + b"Transfer-Encoding: chunked\r\n\r\n4\r\ntext\r\n")
        with contextlib.suppress(ConnectionError):
            await reader.read()

    async with serving(begin) as url:
        connections = HttpConnections(url, {}, connect_timeout_s=WAIT_S)
        read: list[bytes | None] = []
        timeout_s = 0.1
        while not read:  # on a slow machine the limit may expire before the first part
            timeout_s *= 2
            with pytest.raises(TimeoutError):
                async with connections.streamed("POST", "/", b"{}", timeout_s=timeout_s) as streamed:
                    read.append(await streamed.part())
                    read.append(await streamed.part())
        assert read == [b"text"]


async def test_a_cancelled_call_closes_its_connection() -> None:
    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        closed.set_result(await reader.read())

    asked = asyncio.Event()
    closed: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    async with serving(wait) as url:
        connections = HttpConnections(url, {}, connect_timeout_s=WAIT_S)
        call = asyncio.ensure_future(post(connections))
        await asyncio.wait_for(asked.wait(), WAIT_S)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(closed, WAIT_S)


async def test_a_server_waits_for_a_slow_reader() -> None:
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK + b"\r\n")
        for _ in range(2_000):
            writer.write(b"x" * 50_000)
            await writer.drain()
            sent += 50_000
        writer.close()

    async with serving(flood) as url:
        connections = HttpConnections(url, {}, connect_timeout_s=WAIT_S)
        async with connections.streamed("POST", "/", b"{}", timeout_s=60) as streamed:
            before = -1
            while before != sent:  # until the server waits for the reader
                before = sent
                await asyncio.sleep(0.3)
            assert sent < 50_000_000
            read = 0
            while (part := await streamed.part()) is not None:
                read += len(part)
        assert read == 100_000_000


async def test_certificates_are_checked(tmp_path: Path) -> None:
    tls = made_tls_files(tmp_path / "tls")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tls.certificate, tls.key)
    served = Server(sized(b"text"), sized(b"text"))
    server = await asyncio.start_server(served, "127.0.0.1", 0, ssl=context)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    connections = HttpConnections(url, {}, connect_timeout_s=WAIT_S)
    with pytest.raises(NotConnected, match="certificate verify failed"):
        await post(connections)
    with trusting(tls):
        connections = HttpConnections(url, {}, connect_timeout_s=WAIT_S)
        for _ in range(2):
            assert await post(connections, b"x" * 300_000) == (200, b"text")
    connections.close()
    server.close()
    assert [len(body) for _, body in served.requests] == [300_000] * 2


async def test_a_port_without_a_server_is_an_os_error() -> None:
    with socket.socket() as held:  # bound, but it does not listen
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(NotConnected):
            await post(HttpConnections(url, {}, connect_timeout_s=WAIT_S))


@pytest.mark.parametrize("name", [None, "tls"])
async def test_an_address_that_does_not_answer_does_not_delay_the_next_address_of_the_host(
    name: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tls = made_tls_files(tmp_path / "tls")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tls.certificate, tls.key)
    served = Server(sized(b"text"))
    server = await asyncio.start_server(served, "127.0.0.1", 0, ssl=context if name else None)
    with contextlib.ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.2", 0), backlog=0))
        for _ in range(
            4
        ):  # the queue of its connections is full, so the system answers no further connection
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(silent.getsockname())
        addresses = [silent.getsockname(), server.sockets[0].getsockname()]
        found = [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", each) for each in addresses]
        monkeypatch.setattr(
            http_connections, "_numeric", lambda host, port: found
        )  # in place of a name server
        stack.enter_context(trusting(tls))
        connections = HttpConnections(
            "https://127.0.0.1" if name else "http://host", {}, connect_timeout_s=60
        )
        assert await asyncio.wait_for(post(connections), 30) == (200, b"text")
        connections.close()
        server.close()


async def test_a_host_that_is_given_by_its_name_is_looked_up() -> None:
    async with serving(Server(sized(b"text"))) as url:
        connections = HttpConnections(url.replace("127.0.0.1", "localhost"), {}, connect_timeout_s=WAIT_S)
        assert await post(connections) == (200, b"text")
        connections.close()


async def test_an_invalid_host_name_is_an_os_error() -> None:
    with pytest.raises(NotConnected):
        await post(HttpConnections(f"http://{'a' * 70}.example", {}, connect_timeout_s=WAIT_S))


@pytest.mark.parametrize(
    "url", ["127.0.0.1:80", "ftp://host", "http://", "http://host:port", "https:///path"]
)
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError):
        HttpConnections(url, {}, connect_timeout_s=WAIT_S)


def test_a_header_with_a_line_end_is_refused() -> None:
    with pytest.raises(ValueError, match="line end"):
        HttpConnections("http://host", {"Authorization": "Bearer a\r\nB: c"}, connect_timeout_s=WAIT_S)
