"""Connections that violate a limit are refused and closed, and other connections are still served."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from proxy_support import RunningProxy, running_proxy
from scripted_sampler import ScriptedSampler

from areal_agents.proxy import http_limits
from areal_agents.rendering import ChatRenderer

SHORT_S = 0.5
LIMIT_S = 60.0  # for what takes far less, even on a busy machine
BEGIN = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"


@contextmanager
def shortened(*names: str) -> Iterator[None]:
    """Shorten time limits that begin within the with-block."""
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(http_limits, name, SHORT_S)
        yield


def dial(proxy: RunningProxy) -> socket.socket:
    url = httpx.URL(proxy.url)
    return socket.create_connection((url.host, url.port or 80), timeout=LIMIT_S)


def used(proxy: RunningProxy) -> socket.socket:
    """Return a connection on which a request was answered, so that no time limit is running."""
    connection = dial(proxy)
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer = connection.recv(65536)  # it is sent in one write
    assert answer.startswith(b"HTTP/1.1 200 OK") and answer.endswith(b"}")
    return connection


def received(connection: socket.socket) -> bytes:
    """Return everything that arrives until the server closes the connection."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def answer_while_sending(connection: socket.socket, part: bytes) -> bytes:
    """Send `part` repeatedly, at intervals, until the server answers or closes; return what arrives."""
    connection.settimeout(0.05)
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        with suppress(BrokenPipeError, ConnectionResetError):  # the answer can still be read
            connection.sendall(part)
        with suppress(TimeoutError):
            return connection.recv(65536)
    raise AssertionError("the server neither answers nor closes")


def answer_of(data: bytes) -> tuple[int, dict[str, dict[str, str]]]:
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 "), data[:200]
    assert b"content-type: application/json" in head and b"connection: close" in head
    return int(head.split()[1]), json.loads(body)


def segments_received(connection: socket.socket) -> int:
    """Return the number of data segments that arrived, which on loopback is the number of writes."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    counted: int = struct.unpack_from("I", info, 152)[0]  # tcpi_data_segs_in of Linux
    return counted


def is_served(proxy: RunningProxy) -> bool:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    return httpx.post(f"{proxy.url}/v1/chat/completions", json=body, timeout=LIMIT_S).status_code == 200


def flood(connection: socket.socket, part: bytes, most: int) -> int:
    """Send `part` repeatedly until the server closes, and return the number of bytes that were sent."""
    sent = 0
    try:
        while sent < most:
            connection.sendall(part)
            sent += len(part)
    except (BrokenPipeError, ConnectionResetError):
        pass
    return sent


@pytest.mark.parametrize(
    "head",
    [
        BEGIN + b"X-A: " + b"a" * 200_000 + b"\r\n\r\n",
        BEGIN + b"X-A: a\r\n" * 10_000 + b"\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /?" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=["one header", "many headers", "path", "query"],
)
def test_a_large_head_is_refused_in_one_piece_and_in_several(proxy: RunningProxy, head: bytes) -> None:
    for size in (len(head), 5000):
        with dial(proxy) as connection:
            for start in range(0, len(head), size):
                connection.sendall(head[start : start + size])
            status, body = answer_of(received(connection))
        assert status == 431 and body["error"]["code"] == "request_head_too_large"
    assert is_served(proxy)


def test_a_head_of_just_under_the_limit_is_served(proxy: RunningProxy) -> None:
    value = "a" * (http_limits.MAX_HEAD_BYTES - 1000)
    assert proxy.http.get("/health", headers={"x-a": value}).status_code == 200


@pytest.mark.parametrize("part", [b"a" * 2**20, b"X-A: a\r\n" * 2**17], ids=["one header", "many headers"])
def test_a_head_without_an_end_is_cut_off(proxy: RunningProxy, part: bytes) -> None:
    with dial(proxy) as connection:
        connection.sendall(BEGIN + b"X-A: ")
        assert flood(connection, part, 2**30) < 2**28
    assert is_served(proxy)


def test_the_refusal_has_the_form_of_its_api(proxy: RunningProxy) -> None:
    with dial(proxy) as connection:
        connection.sendall(b"POST /v1/messages HTTP/1.1\r\nX-A: " + b"a" * 100_000)
        status, body = answer_of(received(connection))
    assert status == 431 and body["type"] == "error"


def test_data_that_is_not_http_is_refused_in_json(proxy: RunningProxy) -> None:
    with dial(proxy) as connection:
        connection.sendall(b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03")
        status, body = answer_of(received(connection))
    assert status == 400 and body["error"]["code"] == "invalid_http"


def test_a_connection_without_a_request_is_closed(proxy: RunningProxy) -> None:
    with shortened("HEAD_S"), dial(proxy) as connection:
        assert received(connection) == b""
    assert is_served(proxy)


@pytest.mark.parametrize("begin", [b"G", BEGIN, BEGIN + b"X-A: a"])
def test_a_connection_whose_head_does_not_arrive_is_closed(proxy: RunningProxy, begin: bytes) -> None:
    with used(proxy) as connection, shortened("HEAD_S"):
        connection.sendall(begin)
        assert answer_of(received(connection))[0] == 408
    assert is_served(proxy)


def test_a_head_that_arrives_byte_by_byte_is_refused(proxy: RunningProxy) -> None:
    with used(proxy) as connection, shortened("HEAD_S"):
        connection.sendall(BEGIN + b"X-A: ")
        assert answer_of(answer_while_sending(connection, b"a"))[0] == 408


@pytest.mark.parametrize(
    ("headers", "drop"),
    [
        (b"Content-Length: 1000000\r\n\r\n{", b" "),
        (b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        (b"Transfer-Encoding: chunked\r\n\r\n1;", b"a"),
    ],
    ids=["length", "chunked", "chunk extension"],
)  # fmt: skip
def test_a_slow_body_is_refused(proxy: RunningProxy, headers: bytes, drop: bytes) -> None:
    with shortened("BODY_GRACE_S", "_CHECK_S"), dial(proxy) as connection:
        connection.sendall(BEGIN + headers)
        status, body = answer_of(answer_while_sending(connection, drop))
    assert status == 408 and body["error"]["code"] == "request_timeout"
    assert is_served(proxy)


def test_a_body_without_an_end_is_refused_and_cut_off(proxy: RunningProxy) -> None:
    with shortened("LINGER_S"), dial(proxy) as connection:
        connection.sendall(BEGIN + b"Transfer-Encoding: chunked\r\n\r\n")
        sent = flood(connection, b"100000\r\n" + b" " * 2**20 + b"\r\n", 2**30)
    assert sent < 2**28
    assert is_served(proxy)


@pytest.mark.parametrize(
    ("begin", "part"),
    [(b"0\r\n", b"X-A: a\r\n" * 2**17), (b"1;", b"a" * 2**20)],
    ids=["trailers", "extension"],
)
def test_framing_without_an_end_is_cut_off(proxy: RunningProxy, begin: bytes, part: bytes) -> None:
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    with dial(proxy) as connection:
        connection.sendall(BEGIN + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(body), body))
        connection.sendall(begin)
        assert flood(connection, part, 2**30) < 2**28
    assert is_served(proxy)


def test_chunks_of_one_byte_are_served(proxy: RunningProxy) -> None:
    body = b'{"messages": [{"role": "user", "content": "%s"}]}' % (b"hi" * 500)
    chunks = b"".join(b"001\r\n%c\r\n" % byte for byte in body) + b"0\r\nX-Trailer: a\r\n\r\n"
    with dial(proxy) as connection:
        connection.sendall(BEGIN + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
        assert received(connection).startswith(b"HTTP/1.1 200 OK")


@pytest.fixture(scope="module")
def talkative(renderer: ChatRenderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    path: Path = tmp_path_factory.mktemp("talkative") / "s.db"
    engine = ScriptedSampler(renderer, max_context=100_000)
    engine.script = lambda call: [5] * (30_000 if call.streamed else 60_000)
    with running_proxy(path, engine) as running:
        yield running


def test_a_connection_whose_response_is_not_read_is_closed(
    talkative: RunningProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_limits, "UNREAD_S", SHORT_S)
    lost, connection_lost = threading.Event(), http_limits.LimitedProtocol.connection_lost

    def note(protocol: http_limits.LimitedProtocol, error: Exception | None) -> None:
        connection_lost(protocol, error)
        lost.set()

    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True, "logprobs": True})
    with dial(talkative) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        monkeypatch.setattr(http_limits.LimitedProtocol, "connection_lost", note)
        connection.sendall(BEGIN + b"Content-Length: %d\r\n\r\n" % len(body) + body.encode())
        assert lost.wait(LIMIT_S)
        # A small buffer takes minutes to drain.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        assert not received(connection).endswith(b"0\r\n\r\n")
    assert talkative.http.get("/health").status_code == 200


def test_pipelined_requests_on_one_connection_are_served(proxy: RunningProxy) -> None:
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    one = BEGIN + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with dial(proxy) as connection:
        connection.sendall(one * 3 + b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        data = received(connection)
    assert data.count(b"HTTP/1.1 200 OK") == 4


@pytest.mark.parametrize("headers", [b"Connection: close\r\n", b""], ids=["last answer", "kept alive"])
def test_a_slow_reader_gets_the_whole_response(
    talkative: RunningProxy, monkeypatch: pytest.MonkeyPatch, headers: bytes
) -> None:
    """Reading takes longer than the time limits, and the kernel takes the response in large pieces.

    At this speed, the kernel takes a piece every 0.8 s, and the last one after 3 s.
    """
    limit_s, bytes_per_s = 2.5, 1.75e6
    connection_made = http_limits.LimitedProtocol.connection_made

    def hurried(protocol: http_limits.LimitedProtocol, transport: asyncio.Transport) -> None:
        protocol.timeout_keep_alive = limit_s
        connection_made(protocol, transport)

    monkeypatch.setattr(http_limits, "UNREAD_S", limit_s)
    monkeypatch.setattr(http_limits.LimitedProtocol, "connection_made", hurried)
    body = b'{"messages": [{"role": "user", "content": "hi"}], "logprobs": true}'
    with dial(talkative) as connection:
        connection.sendall(BEGIN + headers + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        head, _, answer = connection.recv(65536).partition(b"\r\n\r\n")
        size = int(head.split(b"content-length: ")[1].split()[0])
        parts, count = [answer], len(answer)
        started, elapsed_s = time.monotonic(), 0.0
        while count < size and (part := connection.recv(65536)):
            parts.append(part)
            count += len(part)
            elapsed_s = time.monotonic() - started
            if elapsed_s < 1.2 * limit_s:
                time.sleep(max(count / bytes_per_s - elapsed_s, 0.0))
    assert elapsed_s > limit_s
    assert len(json.loads(b"".join(parts))["choices"][0]["logprobs"]["content"]) > 1000


@pytest.mark.parametrize("cut", [0, 30, -10], ids=["before the head", "in the head", "in the body"])
def test_a_pipelined_request_has_its_own_time_limits(
    proxy: RunningProxy, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    """The end of a response starts no time limit for the next request on the connection."""
    monkeypatch.setattr(http_limits, "LINGER_S", SHORT_S)
    proxy.engine.delay_s = 0.2
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    length = b"Content-Length: %d\r\n\r\n" % len(body)
    second = BEGIN + b"Connection: close\r\n" + length + body
    with dial(proxy) as connection:
        connection.sendall(BEGIN + length + body + second[:cut])
        first = connection.recv(65536)
        assert first.startswith(b"HTTP/1.1 200 OK")
        time.sleep(3 * SHORT_S)
        connection.sendall(second[cut:])
        assert received(connection).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize(
    "behind", [b"\0\r\n\r\n", BEGIN + b"X-A: " + b"a" * 70_000], ids=["no HTTP", "large"]
)
def test_a_refused_pipelined_request_leaves_the_earlier_response_whole(
    talkative: RunningProxy, caplog: pytest.LogCaptureFixture, behind: bytes
) -> None:
    """The response is not interrupted, no refusal follows it, and the connection is closed after it."""
    body = b'{"messages": [{"role": "user", "content": "hi"}], "stream": true}'
    with dial(talkative) as connection:
        connection.sendall(BEGIN + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        begin = connection.recv(1000)
        connection.sendall(behind)
        answer = begin + received(connection)
    assert answer.startswith(b"HTTP/1.1 200 OK") and answer.endswith(b"\r\n0\r\n\r\n")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.skipif(sys.platform != "linux", reason="segments are counted by Linux's TCP_INFO")
def test_a_response_is_sent_in_one_write(proxy: RunningProxy) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    head = BEGIN + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    with dial(proxy) as connection:
        for count in range(1, 6):
            connection.sendall(head + body)
            answer = connection.recv(65536)
            while not answer.endswith(b"}"):
                answer += connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert segments_received(connection) == count


def test_a_client_that_waits_to_continue_gets_the_whole_response(proxy: RunningProxy) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    headers = b"Expect: 100-continue\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    with dial(proxy) as connection:
        connection.sendall(BEGIN + headers)
        assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert json.loads(received(connection).partition(b"\r\n\r\n")[2])["object"] == "chat.completion"


def test_a_head_request_is_answered_and_its_connection_reused(proxy: RunningProxy) -> None:
    with dial(proxy) as connection:
        for _ in range(2):
            connection.sendall(b"HEAD /v1 HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"\r\n\r\n")
