"""Opens the ends of pipes for asyncio."""

from __future__ import annotations

import asyncio
import os

from areal_agents.sandbox.remote.messages import PIECE


async def open_reader(fd: int) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    """Return a reader of a pipe, whose descriptor is closed with the transport."""
    reader = asyncio.StreamReader(limit=PIECE)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", 0)
    )
    return reader, transport


async def open_writer(fd: int) -> asyncio.StreamWriter:
    """Return a writer to a pipe, whose descriptor is closed with it."""
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(fd, "wb", 0)
    )
    return asyncio.StreamWriter(transport, protocol, None, loop)
