"""What a rollout process and a sandbox host send each other.

Each sandbox has a WebSocket of its own, and ends with it. The rollout process sends one request at a time
(start, run, end), and the host answers it; while a command runs, kill, eof and ack may follow. Control
messages are JSON. Bytes travel in binary messages of at most PIECE bytes, each after a byte that says what
they are: the data that a request or an answer announces by its length, or a piece of a stream of a running
command. Of a stream, only one piece at a time is under way in each direction; its receiver acknowledges it,
so that a program that does not read never stops the connection, whose silence ends the sandbox.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit, urlunsplit

from areal_agents.errors import SandboxError
from areal_agents.sandbox.sandbox import Limits, SandboxSpec

PATH = "/sandbox"
PIECE = 65_536  # bytes
LONGEST_MESSAGE = 1 << 24  # bytes, of a request with its arguments and variables
MOST_DATA = 1 << 30  # bytes, that a request or an answer announces
PING_S = 10.0  # between two pings, which both sides send
SILENT_S = 20.0  # a side that does not answer a ping for so long is considered dead
GOODBYE_S = 1.0  # longest wait for the other side to confirm the end of a connection

DATA, LOG, STREAM = b"d", b"l", b"s"


class Connection(Protocol):
    """The part of a WebSocket that both sides use."""

    async def send(self, message: str | bytes) -> None: ...

    async def recv(self) -> str | bytes: ...


def token_of(secret: str, index: int, epoch: int) -> str:
    """Return the token of the sandbox host that has the place `index`, in its `epoch`.

    It opens that host and nothing else, so that a host which an agent has taken over learns no other key.
    """
    return hmac.new(secret.encode(), f"sandbox {index} {epoch}".encode(), "sha256").hexdigest()


def at_server(url: str, server: str | None) -> str:
    """Return a URL with another server in place of its own; None: as it is."""
    if server is None:
        return url
    parts, there = urlsplit(url), urlsplit(server)
    return urlunsplit((there.scheme, there.netloc, parts.path, parts.query, parts.fragment))


async def send(connection: Connection, message: Mapping[str, Any], *data: bytes) -> None:
    """Send a control message, and the data that it announces as "lengths"."""
    await connection.send(json.dumps({**message, "lengths": [len(one) for one in data]}))
    for one in data:
        for start in range(0, len(one), PIECE):
            await connection.send(DATA + one[start : start + PIECE])


async def receive_data(connection: Connection, message: Mapping[str, Any]) -> list[bytes]:
    """Return the data that a control message has announced. Raises SandboxError if it is too much."""
    lengths = message["lengths"]
    if sum(lengths) > MOST_DATA:
        raise SandboxError(f"a sandbox on another machine gets at most {MOST_DATA >> 20} MiB at once")
    received = []
    for length in lengths:
        data = bytearray()
        while len(data) < length:
            piece = await connection.recv()
            assert isinstance(piece, bytes) and piece[:1] == DATA, "data follows the message at once"
            data += piece[1:]
        received.append(bytes(data))
    return received


def spec_as_json(spec: SandboxSpec) -> dict[str, Any]:
    """Return a spec without its folder, which travels as an archive."""
    tree = {one.name: getattr(spec, one.name) for one in fields(spec) if one.name != "folder"}
    return {
        **tree,
        "readable": [str(path.absolute()) for path in spec.readable],
        "environment": dict(spec.environment),
        "limits": asdict(spec.limits),
    }


def spec_from_json(tree: Mapping[str, Any], folder: Path | None) -> SandboxSpec:
    """Return the spec again, with its folder on this machine.

    Raises:
        SandboxError: this machine lacks a path that it names.
    """
    try:
        return SandboxSpec(
            **{
                **tree,
                "folder": folder,
                "writable": tuple(tree["writable"]),
                "readable": tuple(Path(path) for path in tree["readable"]),
                "limits": Limits(**tree["limits"]),
            }
        )
    except ValueError as error:
        raise SandboxError(str(error)) from None
