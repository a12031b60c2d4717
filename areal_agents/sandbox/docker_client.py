"""Calls the docker command line: once, or to keep a container that ends with this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from areal_agents.errors import SandboxError
from areal_agents.sandbox.output import Log, Tail, read_tail, write_all

_CLI_S = 120.0  # time limit of one call of docker in seconds
_PIPE_S = 1.0
_SHOWN = 500  # last characters of what docker says that are in an error
# The first process of a container, whose standard input is a pipe from its owner. It ends with that pipe,
# also if the owner was killed, and the engine then kills whatever else runs in the container.
WAIT = "echo started; exec cat >/dev/null"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a call of docker ended."""

    status: int
    stdout: Tail
    stderr: Tail
    timed_out: bool


async def docker(
    program: str,
    words: Sequence[str],
    *,
    stdin: bytes = b"",
    may_fail: bool = False,
    timeout_s: float = _CLI_S,
) -> bytes:
    """Call docker and return its output. Raises SandboxError with the end of its standard error."""
    ended = await call(program, words, dict(os.environ), stdin, timeout_s, 1 << 28, None)
    if (ended.status != 0 or ended.timed_out) and not may_fail:
        reason = (
            f"no answer within {timeout_s:g} s"
            if ended.timed_out
            else ended.stderr.output().text().strip()[-500:]
        )
        raise SandboxError(f"docker {words[0]}: {reason}")
    return ended.stdout.output().kept


async def call(
    program: str,
    words: Sequence[str],
    environment: Mapping[str, str],
    stdin: bytes,
    timeout_s: float | None,
    kept_bytes: int,
    log: Log | None,
    streams: tuple[int, int] | None = None,
) -> Ended:
    """Run docker as a process group of its own, which is killed at the time limit or if this is cancelled.

    `streams` are its standard input and output, if they are given, and nothing of its output is kept then.
    """
    inputs, outputs, errors = os.pipe(), os.pipe(), os.pipe()
    theirs = (inputs[0], outputs[1], errors[1])
    async with contextlib.AsyncExitStack() as stack:
        try:
            writing = await write_all(inputs[1], stdin)
            stack.callback(writing.abort)
            reading = [await read_tail(pipe[0], kept_bytes, log) for pipe in (outputs, errors)]
            for transport, _ in reading:
                stack.callback(transport.close)
            stdin_fd, stdout_fd = streams or theirs[:2]
            process = await asyncio.create_subprocess_exec(
                program, *words, env=environment, stdin=stdin_fd, stdout=stdout_fd, stderr=theirs[2],
                start_new_session=True,
            )  # fmt: skip
        finally:
            for fd in theirs:
                os.close(fd)
        timed_out = False
        try:
            async with asyncio.timeout(timeout_s):
                await process.wait()
        except TimeoutError:
            timed_out = True
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        for _, tail in reading:
            await asyncio.wait({tail.closed}, timeout=_PIPE_S)
        assert process.returncode is not None
        return Ended(process.returncode, reading[0][1], reading[1][1], timed_out)


class AttachedContainer:
    """A container whose first process runs `WAIT` until this process ends it, or ends itself."""

    def __init__(self, program: str, process: asyncio.subprocess.Process, errors: BinaryIO) -> None:
        self._program = program
        self._process = process
        self._errors = errors

    @classmethod
    async def start(cls, program: str, words: Sequence[str]) -> AttachedContainer:
        """Start a container by the arguments of `docker run --interactive`, and wait until it runs.

        Raises:
            SandboxError: it does not start within the time limit of a call of docker.
        """
        # A file, because an engine that pulls an image says a lot; `end` closes it.
        errors = tempfile.TemporaryFile()  # noqa: SIM115
        process = await asyncio.create_subprocess_exec(
            program,
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # an interrupt of the terminal is not meant for it
        )
        container = cls(program, process, errors)
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_CLI_S):
                line = await process.stdout.readline()
        except TimeoutError:
            await container.end()
            raise SandboxError(f"docker {words[0]}: no answer within {_CLI_S:g} s") from None
        except BaseException:
            await container.end()
            raise
        if line.strip() != b"started":
            await process.wait()
            errors.seek(0)
            reason = errors.read().decode(errors="replace").strip()[-_SHOWN:]
            await container.end()
            raise SandboxError(f"docker {words[0]}: {reason or 'the container has ended'}")
        return container

    async def end(self) -> None:
        """End the client; the container ends with its standard input."""
        if self._process.returncode is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                async with asyncio.timeout(_PIPE_S):
                    await self._process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                await self._process.wait()
        self._errors.close()
