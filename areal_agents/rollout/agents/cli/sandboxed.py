"""Runs the program of a command-line agent in a sandbox of its own, and copies out what it left.

`run` gives it one input, and returns when it has ended; `converse` leaves its standard streams to the caller.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import logging
import os
import tarfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO

from areal_agents.episode import Episode
from areal_agents.errors import AgentError, SandboxError
from areal_agents.rollout.agents.agent_process import LONGEST_LINE
from areal_agents.rollout.agents.cli.prepare import Launch
from areal_agents.rollout.agents.prepared_sandboxes import PreparedSandboxes
from areal_agents.sandbox.isolations import IsolationOnFirstUse
from areal_agents.sandbox.remote.client import RemoteIsolation
from areal_agents.sandbox.remote.hosts import SandboxHosts
from areal_agents.sandbox.sandbox import Finished, Isolation, Sandbox, SandboxSpec

logger = logging.getLogger(__name__)

MOST_LEFT = 1 << 26  # bytes that are copied out
_COPY_S = 60.0  # time limit in seconds of each command besides the program
_TAIL = 4096  # bytes of each output stream that are kept


class SandboxedPrograms:
    """Runs programs in sandboxes of one isolation, which is opened at the first of them."""

    def __init__(self, isolation: str, hosts: SandboxHosts | None = None) -> None:
        """Args:
        hosts: where the sandboxes are; None: on this machine.
        """
        self._isolation: Isolation
        if hosts is None:
            self._isolation = IsolationOnFirstUse(isolation)
        else:
            self._isolation = RemoteIsolation(isolation, hosts)
        self._prepared = PreparedSandboxes()

    async def prepare(self, episode: str, spec: SandboxSpec) -> None:
        """Start the sandbox of an episode before its program. Raises AgentError if it cannot be started."""
        await self._prepared.prepare(episode, self._isolation.start(spec))

    async def release(self, episode: str) -> None:
        """End the sandbox of an episode, if no program has taken it."""
        await self._prepared.release(episode)

    async def run(
        self,
        program: Path,
        launch: Callable[[Episode, Path, Path], Launch],
        ep: Episode,
        spec: SandboxSpec,
        *,
        left: Path,
        log: BinaryIO | None,
    ) -> Finished:
        """Run a program to its end, and copy what is then in its working folder.

        Args:
            launch: says how it is started, from the episode as the sandbox reaches it, the home folder and
                the working folder.
            left: the folder to which the working folder is copied, also if the program is cancelled.

        Raises:
            AgentError: the sandbox cannot be started or has ended, or the folder is too large.
        """
        try:
            async with self._launched(launch, ep, spec) as (sandbox, how):
                try:
                    finished = await sandbox.run(
                        [str(program), *how.arguments],
                        timeout_s=None,  # the time limit of the episode cancels it
                        environment=how.environment,
                        stdin=how.stdin.encode(),
                        kept_bytes=_TAIL,
                        model_url=ep.base_url,
                        log=log,
                    )
                except asyncio.CancelledError:
                    try:
                        await _copy_out(sandbox, left)
                    except SandboxError as error:  # must not take the place of the cancellation
                        logger.warning("episode %s: %s", ep.id, error)
                    raise
                await _copy_out(sandbox, left)
                return finished
        except SandboxError as error:
            raise AgentError(f"the agent's sandbox: {error}") from error

    @asynccontextmanager
    async def converse(
        self,
        program: Path,
        launch: Callable[[Episode, Path, Path], Launch],
        ep: Episode,
        spec: SandboxSpec,
        *,
        log: BinaryIO | None,
    ) -> AsyncIterator[SandboxedConversation]:
        """Start a program to talk with it, and end it with its sandbox.

        Args:
            program, launch, ep, spec: as of `run`.
            log: an open file for the first MiB of its standard error.

        Raises:
            AgentError: the sandbox cannot be started or ended.
        """
        try:
            async with self._launched(launch, ep, spec) as (sandbox, how):
                conversation = await SandboxedConversation.start(
                    sandbox, [str(program), *how.arguments], how, ep, log
                )
                try:
                    yield conversation
                finally:
                    await conversation.end()
        except SandboxError as error:
            raise AgentError(f"the agent's sandbox: {error}") from error

    @asynccontextmanager
    async def _launched(
        self, launch: Callable[[Episode, Path, Path], Launch], ep: Episode, spec: SandboxSpec
    ) -> AsyncIterator[tuple[Sandbox, Launch]]:
        """Give a sandbox the files of a launch, and end it after the block."""
        sandbox = self._prepared.take(ep.id) or await self._isolation.start(spec)
        try:
            inner = dataclasses.replace(ep, base_url=sandbox.inner_url(ep.base_url))
            home = await _home_of(sandbox)
            how = launch(inner, home, Path(sandbox.workdir))
            for name, text in how.files.items():
                await sandbox.write(str(home / name), text.encode())
            yield sandbox, how
        finally:
            await sandbox.end()

    async def close(self) -> None:
        """End the isolation with all its sandboxes."""
        await self._isolation.close()


class SandboxedConversation:
    """A running program in a sandbox, and the pipes to it; see `Conversation`."""

    def __init__(
        self,
        sandbox: Sandbox,
        running: asyncio.Task[Finished],
        output: asyncio.StreamReader,
        pipes: tuple[asyncio.WriteTransport, asyncio.ReadTransport],
    ) -> None:
        self._sandbox = sandbox
        self._running = running
        self._output = output
        self._pipes = pipes
        self._tail = ""

    @classmethod
    async def start(
        cls, sandbox: Sandbox, argv: list[str], how: Launch, ep: Episode, log: BinaryIO | None
    ) -> SandboxedConversation:
        """Start a program; it runs until it ends, or until `end`."""
        loop = asyncio.get_running_loop()
        inputs, outputs = os.pipe(), os.pipe()
        output = asyncio.StreamReader(limit=LONGEST_LINE)
        sending, _ = await loop.connect_write_pipe(asyncio.Protocol, os.fdopen(inputs[1], "wb", 0))
        receiving, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), os.fdopen(outputs[0], "rb", 0)
        )
        theirs = (inputs[0], outputs[1])

        async def run() -> Finished:
            try:
                return await sandbox.run(
                    argv,
                    timeout_s=None,  # the caller ends it
                    environment=how.environment,
                    streams=theirs,
                    kept_bytes=_TAIL,
                    model_url=ep.base_url,
                    log=log,
                )
            finally:
                for fd in theirs:
                    os.close(fd)

        running = asyncio.create_task(run(), name=f"agent of {ep.id}")
        return cls(sandbox, running, output, (sending, receiving))

    @property
    def workdir(self) -> Path:
        """Its working folder, as it sees it."""
        return Path(self._sandbox.workdir)

    def send(self, data: bytes) -> None:
        """Write to its standard input, without waiting until it reads."""
        self._pipes[0].write(data)

    async def line(self) -> bytes:
        """Return the next line of its output; b"" at its end. Raises ValueError if it is too long."""
        return await self._output.readline()

    async def wait(self) -> int:
        """Wait until it exits; return its exit status. Raises AgentError if it could not be executed."""
        try:
            return (await asyncio.shield(self._running)).status
        except SandboxError as error:
            raise AgentError(f"the agent's sandbox: {error}") from error

    def tail(self) -> str:
        """Return the end of its standard error, after `end`."""
        return self._tail

    async def end(self) -> None:
        """Kill it with everything that it started."""
        self._running.cancel()
        await asyncio.wait({self._running})
        sending, receiving = self._pipes
        if not sending.is_closing():
            sending.abort()
        if not receiving.is_closing():
            receiving.close()
        if not self._running.cancelled() and self._running.exception() is None:
            self._tail = self._running.result().stderr.text().strip()

    async def copy_out(self, left: Path) -> None:
        """Copy its working folder, after `end`. Raises AgentError if it is too large."""
        try:
            await _copy_out(self._sandbox, left)
        except SandboxError as error:
            raise AgentError(f"the agent's sandbox: {error}") from error


async def _home_of(sandbox: Sandbox) -> Path:
    """Return the home folder, with the folders that `clean_environment` names."""
    command = 'mkdir -p "$HOME/tmp" "$HOME/.cache" "$HOME/.config" "$HOME/.local/share" "$HOME/.local/state"'
    done = await sandbox.run(["/bin/sh", "-c", f'{command} && printf %s "$HOME"'], timeout_s=_COPY_S)
    if done.status != 0:
        raise SandboxError(f"there is no home folder: {done.stderr.text().strip()}")
    return Path(done.stdout.text())


async def _copy_out(sandbox: Sandbox, left: Path) -> None:
    """Copy the working folder; links that lead out of it are refused, as tarfile's filter "data" does."""
    done = await sandbox.run(["/bin/sh", "-c", "tar -c -f - ."], timeout_s=_COPY_S, kept_bytes=MOST_LEFT)
    if done.status != 0 or done.stdout.is_cut:
        why = f"it has more than {MOST_LEFT >> 20} MiB" if done.stdout.is_cut else done.stderr.text().strip()
        raise SandboxError(f"what the agent left cannot be copied: {why}")
    await asyncio.to_thread(_extract, done.stdout.kept, left)


def _extract(archive: bytes, left: Path) -> None:
    left.mkdir(exist_ok=True)
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(left, filter="data")
    except tarfile.TarError as error:
        raise SandboxError(f"what the agent left cannot be copied: {error}") from error
