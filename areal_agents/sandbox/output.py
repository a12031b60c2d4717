"""Reads the output of a command without end: the last bytes are kept, the first ones go to a log."""

from __future__ import annotations

import asyncio
import os
from typing import BinaryIO, cast

from areal_agents.sandbox.sandbox import Output

LONGEST_LOG = 1 << 20  # bytes


class Log:
    """An open file for the first LONGEST_LOG bytes of the streams of a command."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._left = LONGEST_LOG

    def write(self, data: bytes) -> None:
        """Write what still fits."""
        if self._left:
            self._file.write(data[: self._left])
            self._left = max(0, self._left - len(data))


class Tail(asyncio.Protocol):
    """Receives a pipe and keeps its last bytes."""

    def __init__(self, most: int, log: Log | None) -> None:
        self._most = most
        self._log = log
        self._kept = bytearray()
        self._length = 0
        self.closed = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        """Keep what is within the last `most` bytes."""
        self._length += len(data)
        self._kept += data
        if (
            len(self._kept) > 2 * self._most + 65_536
        ):  # not at every piece, which would copy the tail each time
            del self._kept[: -self._most or None]
        if self._log is not None:
            self._log.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the pipe has ended."""
        if not self.closed.done():
            self.closed.set_result(None)

    def output(self) -> Output:
        """Return what was received."""
        return Output(bytes(self._kept[-self._most :]) if self._most else b"", self._length)


async def read_tail(fd: int, most: int, log: Log | None) -> tuple[asyncio.ReadTransport, Tail]:
    """Read a pipe, which is closed with the transport, and keep its last `most` bytes."""
    loop = asyncio.get_running_loop()
    return await loop.connect_read_pipe(lambda: Tail(most, log), os.fdopen(fd, "rb", 0))


class Input(asyncio.Protocol):
    """The writing side of a pipe to a command."""

    def __init__(self) -> None:
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.WriteTransport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the transport, which is closed."""
        self._transport = None

    def abort(self) -> None:
        """Give up what the command has not read."""
        if self._transport is not None:
            self._transport.abort()


async def write_all(fd: int, data: bytes) -> Input:
    """Write to a pipe in the background, and close it when all is written."""
    loop = asyncio.get_running_loop()
    transport, written = await loop.connect_write_pipe(Input, os.fdopen(fd, "wb", 0))
    transport.write(data)
    transport.close()
    return written
