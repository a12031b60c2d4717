"""An agent's process, which ends when it exits; the processes that it started are ended with it.

asyncio's `Process.wait` returns only when every pipe is closed (Python 3.11 and 3.12), which any process that
inherited a pipe can delay, and `create_subprocess_exec` cannot be cancelled safely. This module therefore
uses asyncio's subprocess transport, whose protocol is notified of the exit itself.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Self, cast
from uuid import uuid4

from areal_agents.process_control import (
    AGENT_MARK,
    INNER_AGENT_MARK,
    KILL_S,
    RUN_MARK,
    end_leftovers,
    signal_group,
    warn_unkillable,
)
from areal_agents.secret_variables import without_secrets

TERMINATE_GRACE_S = 2.0
PIPE_GRACE_S = 0.5  # time after the exit to read what is still in the pipes
START_S = 60.0  # longest wait for a process to start after its start was cancelled
LONGEST_LINE = 1 << 24  # bytes
LONGEST_LOG = 1 << 20  # bytes
_TAIL = 4096  # bytes of standard error, and of standard output, that are kept
_STDIN, _STDOUT, _STDERR = 0, 1, 2


class ChildProcess:
    """A child process that leads its own session, created by `start`. Its standard input is a pipe."""

    def __init__(
        self, transport: asyncio.SubprocessTransport, protocol: _Protocol, mark: tuple[str, str]
    ) -> None:
        """Args:
        mark: the variable, and its value, by which the processes that it leaves are found.
        """
        self._transport = transport
        self._protocol = protocol
        self._mark = mark

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        cwd: Path | None = None,
        lines: bool = False,
        tail: bool = False,
        log: BinaryIO | None = None,
    ) -> Self:
        """Start a process. If this is cancelled, no process remains.

        Args:
            command: the program and its arguments.
            environment: its variables, without the secrets of the run; marks are added, which its children
                inherit: one of its own, and those of this process, so that it is found if this process is
                killed.
            cwd: the folder that it starts in; None: that of this process.
            lines: whether to read its standard output with `line`, instead of discarding it.
            tail: whether to keep the end of its standard error, instead of passing it on to this process's,
                and the end of its standard output.
            log: an open file for the first LONGEST_LOG bytes of its standard output and, with `tail`, of its
                standard error; the caller closes it after `end`.

        Raises:
            OSError: the process cannot be started.
        """
        loop = asyncio.get_running_loop()
        outer = {name: os.environ[name] for name in (RUN_MARK, AGENT_MARK) if name in os.environ}
        mark = (INNER_AGENT_MARK if AGENT_MARK in outer else AGENT_MARK, uuid4().hex)
        # The start must not be cancelled halfway: asyncio would kill the process without its children, and
        # then wait for pipes that it has not connected yet.
        starting = asyncio.ensure_future(
            loop.subprocess_exec(
                lambda: _Protocol(log, lines),
                *command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if lines or log or tail else subprocess.DEVNULL,
                stderr=subprocess.PIPE if tail else None,
                env={**without_secrets(environment), **outer, mark[0]: mark[1]},
                cwd=cwd,
                start_new_session=True,
            )
        )
        try:
            return cls(*await asyncio.shield(starting), mark)
        except asyncio.CancelledError:
            await asyncio.wait({starting}, timeout=START_S)
            if starting.done() and starting.exception() is None:
                await cls(*starting.result(), mark).end()
            raise

    def send(self, data: bytes) -> None:
        """Write to its standard input, if that is open, without waiting until it reads."""
        if not self._protocol.is_lost(_STDIN):
            cast(asyncio.WriteTransport, self._transport.get_pipe_transport(_STDIN)).write(data)

    def close_input(self) -> None:
        """Close its standard input after all sent data is written."""
        if not self._protocol.is_lost(_STDIN):
            cast(asyncio.WriteTransport, self._transport.get_pipe_transport(_STDIN)).close()

    async def wait(self) -> int:
        """Wait, without a time limit, until it exits; return its exit status, -N if signal N ended it."""
        await self._protocol.exited.wait()
        status = self._transport.get_returncode()
        assert status is not None
        return status

    async def line(self) -> bytes:
        """Return the next line of its standard output; b"" when it has exited, or closed the pipe.

        Raises:
            ValueError: a line is longer than LONGEST_LINE.
        """
        return await self._protocol.output.readline()

    def tail(self) -> str:
        """Return the end of its standard error or, if that is empty, of its standard output.

        It is complete only after `end`.
        """
        return self._protocol.errors.decode(errors="replace").strip() or self.printed()

    def printed(self) -> str:
        """Return the end of its standard output, if it is not read with `line`; complete only after `end`."""
        return self._protocol.printed.decode(errors="replace").strip()

    async def end(self) -> None:
        """Send SIGTERM to its group, then SIGKILL to the group and to its processes in other sessions.

        Afterwards the rest of its output is read, for at most PIPE_GRACE_S.
        """
        pid = self._transport.get_pid()
        signal_group(pid, signal.SIGTERM)
        try:
            await _happens(self._protocol.exited, TERMINATE_GRACE_S)
        finally:
            signal_group(pid, signal.SIGKILL)  # also to the rest of the group
        try:
            if not await _happens(self._protocol.exited, KILL_S):
                warn_unkillable(pid)
            await asyncio.to_thread(end_leftovers, *self._mark)
            await _happens(self._protocol.closed, 2 * PIPE_GRACE_S)
        finally:
            self._protocol.close()


class _Protocol(asyncio.SubprocessProtocol):
    """The events of a process and its pipes, as the event loop reports them."""

    def __init__(self, log: BinaryIO | None, lines: bool) -> None:
        self._log = log
        self._lines = lines
        self._logged = 0  # bytes
        self.exited = asyncio.Event()
        self.closed = asyncio.Event()  # the process has exited, and its pipes are closed
        self.output = asyncio.StreamReader(limit=LONGEST_LINE)
        self.errors = b""
        self.printed = b""
        self._lost: set[int] = set()  # the pipes that are closed
        self._transport: asyncio.SubprocessTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.SubprocessTransport, transport)
        stdout = self._transport.get_pipe_transport(_STDOUT)
        if stdout is not None:
            self.output.set_transport(stdout)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if self._log is not None:
            kept = data[: LONGEST_LOG - self._logged]
            self._log.write(kept)
            self._logged += len(kept)
        if fd == _STDERR:
            self.errors = (self.errors + data)[-_TAIL:]
        elif self._lines:
            self.output.feed_data(data)
        else:
            self.printed = (self.printed + data)[-_TAIL:]

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._lost.add(fd)
        if fd == _STDOUT:
            self.output.feed_eof()

    def process_exited(self) -> None:
        self.exited.set()
        # Other processes may hold the pipes. What this process wrote is read long before.
        asyncio.get_running_loop().call_later(PIPE_GRACE_S, self.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self.close()
        self.closed.set()

    def is_lost(self, fd: int) -> bool:
        """Whether the pipe is closed."""
        return fd in self._lost

    def close(self) -> None:
        """Close the open pipes."""
        assert self._transport is not None
        stdin = cast(asyncio.WriteTransport, self._transport.get_pipe_transport(_STDIN))
        if not self.is_lost(_STDIN) and (not stdin.is_closing() or stdin.get_write_buffer_size()):
            stdin.abort()  # close() would wait until all data is written
        self._transport.close()


async def _happens(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for the event; return whether it was set in time."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
