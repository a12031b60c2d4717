"""Starts a command-line agent in the Agent Client Protocol, prompts it turn by turn, and ends it.

It runs as an agent with a single prompt does: in a fresh home folder and a copy of a folder, by itself or in
a sandbox. Every wait for it has a time limit, and nothing of it runs after the block.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from areal_agents.episode import Episode
from areal_agents.errors import AgentError
from areal_agents.rollout.agents.agent_process import ChildProcess
from areal_agents.rollout.agents.cli.acp.reply import AcpReply, Permissions
from areal_agents.rollout.agents.cli.folders import HOME, WORK, copy_folder
from areal_agents.rollout.agents.cli.prepare import Launch, make_home
from areal_agents.rollout.agents.cli.sandboxed import SandboxedConversation, SandboxedPrograms
from areal_agents.sandbox.sandbox import SandboxSpec

if TYPE_CHECKING:
    from areal_agents.rollout.agents.cli.acp.connection import AcpConnection

START_S = 120.0  # longest wait for an agent to begin its session
_ENDED = "it has been ended"


@dataclass(frozen=True, slots=True)
class Start:
    """How the agent of one episode is started.

    Attributes:
        program: what is executed.
        launch: says how, from the episode as the agent reaches it, its home folder and its working folder.
        ep: the episode.
        folder: in which its home folder and its copy are made, and in which the copy is left.
        spec: what its sandbox is started from; without a sandbox only the folder to copy is used.
        sandboxes: where it runs; None: as a plain process.
        log: an open file for what it writes; None: it is discarded.
    """

    program: Path
    launch: Callable[[Episode, Path, Path], Launch]
    ep: Episode
    folder: Path
    spec: SandboxSpec
    sandboxes: SandboxedPrograms | None
    log: BinaryIO | None


class AcpAgent:
    """A running agent, which is prompted turn by turn in one session."""

    def __init__(
        self,
        connection: AcpConnection,
        start: Start,
        end: Callable[[], Awaitable[None]],
        *,
        turn_timeout_s: float,
    ) -> None:
        self._connection = connection
        self._start = start
        self._end = end
        self._turn_timeout_s = turn_timeout_s
        self._over = ""  # why it takes no further prompt

    async def prompt(self, text: str, *, timeout_s: float | None = None) -> AcpReply:
        """Send a prompt, and return what the agent did until it ended its turn.

        Args:
            timeout_s: longest wait in seconds; None: that of the agent.

        Raises:
            AgentError: it did not end its turn in time, answered with an error, broke the protocol, or has
                ended; after this, and after a cancellation, it takes no further prompt.
        """
        if self._over:
            raise AgentError(f"{self._name} takes no further prompt: {self._over}")
        limit_s = self._turn_timeout_s if timeout_s is None else timeout_s
        self._over = "its last turn was interrupted, or failed"
        try:
            async with asyncio.timeout(limit_s):
                reply = await self._connection.prompt(text)
        except TimeoutError as error:
            raise AgentError(f"{self._name} did not end its turn within {limit_s:g} s") from error
        except AgentError as error:
            raise AgentError(str(error).replace(self._start.ep.api_key, "***")) from error
        self._over = ""
        return reply

    async def end(self) -> Path:
        """End the agent with everything that it started; return its working folder as it left it.

        The folder is there until the block ends. A second call returns it again.

        Raises:
            AgentError: the folder cannot be copied from its sandbox.
        """
        if self._over != _ENDED:
            self._over = _ENDED
            await self._end()
        return self._start.folder / WORK

    @property
    def _name(self) -> str:
        return self._start.program.name


@asynccontextmanager
async def opened_agent(
    start: Start, *, permissions: Permissions, turn_timeout_s: float
) -> AsyncIterator[AcpAgent]:
    """Start an agent and begin its session; end it with everything that it started.

    Raises:
        AgentError: it cannot be started, or does not begin a session within START_S.
    """
    # Late, because the package of the protocol is an extra, which every other agent does without.
    from areal_agents.rollout.agents.cli.acp.connection import AcpConnection

    async with _started(start) as (program, workdir):
        connection = AcpConnection(program, start.program.name, permissions)

        async def end() -> None:
            await connection.close()
            await program.end()
            if isinstance(program, SandboxedConversation):
                await program.copy_out(start.folder / WORK)

        try:
            try:
                async with asyncio.timeout(START_S):
                    await connection.open(workdir)
            except TimeoutError as error:
                raise AgentError(f"{start.program.name} began no session within {START_S:g} s") from error
            yield AcpAgent(connection, start, end, turn_timeout_s=turn_timeout_s)
        finally:
            await connection.close()


@asynccontextmanager
async def _started(start: Start) -> AsyncIterator[tuple[ChildProcess | SandboxedConversation, Path]]:
    """Start the program of an agent, and yield it with its working folder as it sees it."""
    if start.sandboxes is not None:
        async with start.sandboxes.converse(
            start.program, start.launch, start.ep, start.spec, log=start.log
        ) as program:
            yield program, program.workdir
        return
    home, work = start.folder / HOME, start.folder / WORK
    await asyncio.to_thread(copy_folder, start.spec.folder, work)
    launch = start.launch(start.ep, home, work)
    make_home(home, launch.files)
    try:
        process = await ChildProcess.start(
            [str(start.program), *launch.arguments],
            environment=launch.environment,
            cwd=work,
            lines=True,
            tail=True,
            log=start.log,
        )
    except OSError as error:
        raise AgentError(f"cannot start {start.program}: {error.strerror}") from error
    try:
        yield process, work
    finally:
        # Shielded: a second cancellation must not leave what the agent started.
        await asyncio.shield(process.end())
