"""Opens the ends of pipes for asyncio. A descriptor that cannot be opened is closed."""

from __future__ import annotations

import asyncio
import os

from areal_agents.sandbox.remote.messages import PIECE


async def open_reader(fd: int) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    """Return a reader of a pipe, whose descriptor is closed with the transport."""
    reader = asyncio.StreamReader(limit=PIECE)
    pipe = os.fdopen(fd, "rb", 0)
    try:
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
    except BaseException:
        pipe.close()
        raise
    return reader, transport


async def open_writer(fd: int) -> asyncio.StreamWriter:
    """Return a writer to a pipe, whose descriptor is closed with it."""
    loop = asyncio.get_running_loop()
    pipe = os.fdopen(fd, "wb", 0)
    try:
        transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, pipe)
    except BaseException:
        pipe.close()
        raise
    return asyncio.StreamWriter(transport, protocol, None, loop)
