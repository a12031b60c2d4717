"""Child processes that can be ended for certain, with everything they started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

TERMINATE_GRACE_S = 2.0


async def end_process(process: asyncio.subprocess.Process) -> None:
    """SIGTERM to the process's group, then SIGKILL; returns when it is gone.

    The process must lead its own session (`start_new_session=True`).
    """
    _signal_group(process, signal.SIGTERM)
    try:
        async with asyncio.timeout(TERMINATE_GRACE_S):
            await process.wait()
    except TimeoutError:
        pass
    finally:
        _signal_group(process, signal.SIGKILL)  # the rest of the group too
    await process.wait()


def _signal_group(process: asyncio.subprocess.Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of them are gone
        os.killpg(process.pid, number)


class Tail:
    """The last bytes of a stream, read continuously so that its writer never blocks."""

    def __init__(self, stream: asyncio.StreamReader, *, size: int = 4096) -> None:
        self._size = size
        self._kept = b""
        self._reader = asyncio.create_task(self._read(stream))

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while chunk := await stream.read(65536):
            self._kept = (self._kept + chunk)[-self._size :]

    async def text(self) -> str:
        """What came last, after the stream has ended or half a second."""
        await asyncio.wait({self._reader}, timeout=0.5)
        return self._kept.decode(errors="replace").strip()

    def close(self) -> None:
        """Stop reading."""
        self._reader.cancel()
