"""Clients that send slowly, without an end or with too large a head, or never read the response."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from attack_support import Neighbour, Row, dial, open_episode
from big_support import MIB, P99_MS

from benchmarks.proxy.processes import Server

CROWD = 50
LONGEST_S = 90.0  # that a connection without progress may stay open
HEAD_MB = 112
MEMORY_MB = 200.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a slow connection ended: when, whether the server closed it, and the bytes received and sent."""

    seconds: float
    closed: bool
    said: bytes
    taken: int


def slow(server: Server, neighbour: Neighbour, *, longest_s: float = LONGEST_S) -> Iterator[Row]:
    """Yield one row per kind of connection. The slow connections run concurrently."""
    key = open_episode(server.url)["key"]
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n"
    typed = head + "Content-Type: application/json\r\n"
    drips: dict[str, Callable[[], Ended]] = {
        "a head, one byte a second": lambda: _drip(server.url, b"GET /health HTTP/1.1\r\nX-A: ", longest_s),
        "a body, one byte a second": lambda: _drip(
            server.url, (typed + "Content-Length: 1000000\r\n\r\n{").encode(), longest_s
        ),
        "a chunked body, one byte a second": lambda: _drip(
            server.url, (typed + "Transfer-Encoding: chunked\r\n\r\n").encode(), longest_s, b"1\r\n \r\n"
        ),
        "nothing at all": lambda: _drip(server.url, b"", longest_s, b""),
    }
    began = time.monotonic()
    found = _side_by_side({name: [drip] * CROWD for name, drip in drips.items()})
    p99, longest, failed = neighbour.during(began, time.monotonic())
    for name, ends in found.items():
        closed = sum(end.closed for end in ends)
        yield Row(
            "slow",
            f"{CROWD} connections: {name}",
            f"closed within {longest_s:g} s; neighbour's p99 ≤ {P99_MS:g} ms",
            f"{closed} closed, the last after {max(end.seconds for end in ends):.0f} s; p99 {p99:.0f} ms",
            closed == CROWD and p99 <= P99_MS and not failed,
        )
    flood = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: "
    yield _flooded(server, neighbour, f"one header of {HEAD_MB} MB", flood, b"a" * MIB, HEAD_MB, 65)
    many = b"X-A: " + b"a" * 1000 + b"\r\n"
    yield _flooded(server, neighbour, "headers without an end", flood + b"a\r\n", many * 1000, HEAD_MB, 65)
    chunk = f"{MIB:x}\r\n".encode() + b" " * MIB + b"\r\n"
    endless = (typed + "Transfer-Encoding: chunked\r\n\r\n").encode()
    yield _flooded(server, neighbour, "a chunked body without an end", endless, chunk, 256, 96)
    yield _unread(server, neighbour, head)


def _drip(url: str, begin: bytes, longest_s: float, drop: bytes = b"a") -> Ended:
    began = time.monotonic()
    said, taken = b"", len(begin)
    with dial(url) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(begin)
        while (seconds := time.monotonic() - began) < longest_s:
            readable, _, _ = select.select([connection], [], [], 1.0)
            try:
                if readable:
                    part = connection.recv(65536)
                    said += part
                    if not part:
                        return Ended(seconds, True, said, taken)
                elif drop:
                    connection.sendall(drop)
                    taken += len(drop)
            except OSError:
                return Ended(seconds, True, said, taken)
    return Ended(longest_s, False, said, taken)


def _flooded(
    server: Server, neighbour: Neighbour, name: str, begin: bytes, part: bytes, limit_mb: int, most_mb: int
) -> Row:
    """Send data without an end. The defence holds if the server stops reading early.

    After its response, the server discards up to 64 MiB more, so that the client can read the response.
    """
    cpu, began, taken = server.cpu_s(), time.monotonic(), 0
    said = b""
    with dial(server.url) as connection:
        connection.settimeout(30.0)
        try:
            connection.sendall(begin)
            while taken < limit_mb * MIB:
                connection.sendall(part)
                taken += len(part)
        except OSError:
            pass  # refused, as expected
        with contextlib.suppress(OSError):
            said = connection.recv(65536)
    ended, cpu = time.monotonic(), server.cpu_s() - cpu
    p99, _, failed = neighbour.during(began, ended)
    status = said.split(b" ", 2)[1].decode() if said.startswith(b"HTTP/") else "no answer"
    return Row(
        "slow",
        name,
        f"refused within {most_mb} MiB and what the sockets buffer; neighbour's p99 ≤ {P99_MS:g} ms",
        f"{status} after {taken / MIB:.0f} MiB in {ended - began:.1f} s, {cpu:.1f} s of CPU "
        f"(the neighbour's calls included); p99 {p99:.0f} ms",
        taken <= (most_mb + 12) * MIB and p99 <= P99_MS and not failed,
    )


def _unread(server: Server, neighbour: Neighbour, head: str) -> Row:
    """Open streams whose client never reads.

    Until the buffers are full, these generations share the processor cores with the neighbour's, as those of
    well-behaved clients would. So the neighbour's p99 is only shown, but none of its calls may fail.
    """
    body = json.dumps({"messages": [{"role": "user", "content": "Go on."}], "stream": True}).encode()
    request = f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    before, _ = server.memory_mb()
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        for _ in range(CROWD):
            connection = stack.enter_context(dial(server.url))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(request)
        time.sleep(5.0)
        now, _ = server.memory_mb()
        p99, _, failed = neighbour.during(began, time.monotonic())
    return Row(
        "slow",
        f"{CROWD} streams that are never read",
        f"less than {MEMORY_MB:g} MB; no call of the neighbour fails",
        f"{now - before:+.0f} MB; p99 {p99:.0f} ms",
        now - before <= MEMORY_MB and not failed,
    )


def _side_by_side(work: dict[str, list[Callable[[], Ended]]]) -> dict[str, list[Ended]]:
    found: dict[str, list[Ended]] = {name: [] for name in work}
    threads = [
        threading.Thread(target=lambda name=name, task=task: found[name].append(task()))
        for name, tasks in work.items()
        for task in tasks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
