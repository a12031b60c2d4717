"""Runs a command-line agent: one program per episode, in a home folder and a working folder of its own.

It gets one prompt, and ends by itself; or several, one after the other, in the Agent Client Protocol. Both
folders are in a temporary one. When the program has ended, the processes that it left running are killed and
its home folder is removed; the working folder stays until `release`, for the reward function. What it prints
is in the log of its episode.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, BinaryIO

from areal_agents.episode import Episode
from areal_agents.errors import AgentError
from areal_agents.extras import require
from areal_agents.rollout.agents.agent_process import ChildProcess
from areal_agents.rollout.agents.cli.acp.reply import Permissions
from areal_agents.rollout.agents.cli.acp.session import AcpAgent, Start, opened_agent
from areal_agents.rollout.agents.cli.config import DEFAULT_CONTEXT, CliAgentConfig
from areal_agents.rollout.agents.cli.definition import CliDefinition, load_definition
from areal_agents.rollout.agents.cli.folders import HOME, WORK, copy_folder, remove_logged
from areal_agents.rollout.agents.cli.prepare import (
    Launch,
    folder_of_task,
    make_home,
    of_task,
    prepare,
    prompts_of_task,
)
from areal_agents.rollout.agents.cli.program import find_program, find_program_in_image
from areal_agents.rollout.agents.cli.sandboxed import SandboxedPrograms
from areal_agents.rollout.agents.episode_logs import EpisodeLogs
from areal_agents.sandbox.remote.hosts import SandboxHosts

logger = logging.getLogger(__name__)

_TAIL = 2000  # characters of the output in an error


class CliAgent:
    """Runs the program of a command-line agent once for each episode."""

    capacity: int | None = None
    must_reward = False

    def __init__(
        self,
        config: CliAgentConfig,
        *,
        logs: Path | None = None,
        inherited: Mapping[str, str] = os.environ,
        hosts: SandboxHosts | None = None,
    ) -> None:
        """Args:
        config: the setting `agent`.
        logs: a folder for the output of the newest episodes; None: it is discarded.
        inherited: the variables from which the agent gets what concerns the machine.
        hosts: where its sandboxes are; None: on this machine.

        Raises:
            ConfigError: it has several prompts, and the package of the protocol is not installed.
            AgentError: its definition is not valid or has no such mode, its program is missing or too old, or
                a path of `readable` does not exist.
        """
        self._config = config
        self._definition = load_definition(config.cli)
        if config.max_turns is not None and self._definition.turn_limit is None:
            raise AgentError(
                f"agent.max_turns: {config.cli} has no option for it; set rollout.limits.max_turns instead"
            )
        if not self._definition.takes_one_prompt and not config.prompts:
            raise AgentError(f"{config.cli} speaks only the Agent Client Protocol; give it prompts: [...]")
        if config.prompts:
            check_acp(self._definition, config)
        try:
            config.spec()
        except ValueError as error:
            raise AgentError(f"agent: {error}") from None
        if config.isolation == "docker":
            # The image has its own machine: neither PATH nor the locale of this one holds there.
            self._inherited: Mapping[str, str] = {}
            self._program = find_program_in_image(self._definition, config.executable, config.image)
        else:
            self._inherited = inherited
            self._program = find_program(self._definition, config.executable, inherited)
        self._logs = EpisodeLogs(logs)
        self._sandboxes = SandboxedPrograms(config.isolation, hosts) if config.isolation != "none" else None
        self._folders: dict[str, Path] = {}  # of the episodes that were not released

    async def prepare(self, task: Mapping[str, Any], ep: Episode, time_s: float) -> None:
        """Start the sandbox of an episode, if it has one. Raises AgentError if it cannot be started."""
        if self._sandboxes is not None:
            await self._sandboxes.prepare(ep.id, self._config.spec(self._source(task)))

    async def run(self, task: Mapping[str, Any], ep: Episode) -> None:
        """Run one episode. Raises AgentError, with the end of the output, if the program fails."""
        if self._config.prompts:
            await self._converse(prompts_of_task(self._config.prompts, task), task, ep)
            return
        prompt = of_task(self._config.prompt, task, "prompt")
        source = self._source(task)
        async with self._folder_of(ep) as folder:
            if self._sandboxes is None:
                await asyncio.to_thread(copy_folder, source, folder / WORK)
                await self._run(prompt, ep, folder / HOME, folder / WORK)
            else:
                await self._run_in_sandbox(self._sandboxes, prompt, ep, source, folder / WORK)

    @asynccontextmanager
    async def open(
        self, ep: Episode, source: Path | None, *, permissions: Permissions, log: BinaryIO | None
    ) -> AsyncIterator[AcpAgent]:
        """Start the agent of an episode in the Agent Client Protocol, and end it after the block.

        Args:
            source: the folder that it gets a copy of; None: an empty one.
            permissions: how its permission requests are answered.
            log: an open file for what it writes.

        Raises:
            AgentError: it cannot be started, or begins no session.
        """
        async with self._folder_of(ep) as folder:
            start = Start(
                self._program,
                lambda inner, home, work: self._launch(None, inner, home, work),
                ep,
                folder,
                self._config.spec(source),
                self._sandboxes,
                log,
            )
            limit_s = self._config.turn_timeout_s
            async with opened_agent(start, permissions=permissions, turn_timeout_s=limit_s) as agent:
                yield agent

    def workdir_of(self, episode: str) -> Path | None:
        """Return the folder in which an episode's agent worked; None before it ran and after `release`."""
        folder = self._folders.get(episode)
        return folder / WORK if folder is not None else None

    async def release(self, episode: str) -> None:
        """Remove the folder of an episode, and end its sandbox if its run has not taken it."""
        if self._sandboxes is not None:
            await self._sandboxes.release(episode)
        folder = self._folders.pop(episode, None)
        if folder is not None:
            await asyncio.to_thread(remove_logged, folder)

    async def _converse(self, prompts: Sequence[str], task: Mapping[str, Any], ep: Episode) -> None:
        """Send the prompts one after the other; what the agent left is there after a cancellation too."""
        source = self._source(task)
        with self._logs.opened(ep.id) as log:
            async with self.open(ep, source, permissions=self._config.permissions, log=log) as agent:
                try:
                    for prompt in prompts:
                        await agent.prompt(prompt)
                except asyncio.CancelledError:
                    try:
                        await agent.end()
                    except AgentError as error:  # must not take the place of the cancellation
                        logger.warning("episode %s: %s", ep.id, error)
                    raise
                await agent.end()

    def _source(self, task: Mapping[str, Any]) -> Path | None:
        return folder_of_task(self._config.workdir, task) if self._config.workdir else None

    @asynccontextmanager
    async def _folder_of(self, ep: Episode) -> AsyncIterator[Path]:
        """Create the folder of an episode. Its home is removed after the block, the rest by `release`."""
        folder = self._folders[ep.id] = Path(tempfile.mkdtemp(prefix="areal-agents-cli-"))
        try:
            yield folder
        finally:
            # Also after a cancellation: what a killed process wrote must not remain.
            await asyncio.shield(asyncio.to_thread(remove_logged, folder / HOME))

    async def _run(self, prompt: str, ep: Episode, home: Path, work: Path) -> None:
        launch = self._launch(prompt, ep, home, work)
        make_home(home, launch.files)
        with self._logs.opened(ep.id) as log:
            try:
                process = await ChildProcess.start(
                    [str(self._program), *launch.arguments],
                    environment=launch.environment,
                    cwd=work,
                    tail=True,
                    log=log,
                )
            except OSError as error:
                raise AgentError(f"cannot start {self._program}: {error.strerror}") from error
            try:
                process.send(launch.stdin.encode())
                process.close_input()
                status = await process.wait()
            finally:
                await process.end()  # also ends the processes that it left running
        self._check(status, process.tail(), process.printed(), ep)

    async def _run_in_sandbox(
        self, sandboxes: SandboxedPrograms, prompt: str, ep: Episode, source: Path | None, left: Path
    ) -> None:
        with self._logs.opened(ep.id) as log:
            done = await sandboxes.run(
                self._program,
                lambda inner, home, work: self._launch(prompt, inner, home, work),
                ep,
                self._config.spec(source),
                left=left,
                log=log,
            )
        printed = done.stdout.text().strip()
        self._check(done.status, done.stderr.text().strip() or printed, printed, ep)

    def _launch(self, prompt: str | None, ep: Episode, home: Path, work: Path) -> Launch:
        return prepare(
            self._definition,
            ep,
            prompt=prompt,
            model=self._config.model,
            context=self._config.context or DEFAULT_CONTEXT,
            max_turns=self._config.max_turns,
            home=home,
            workdir=work,
            inherited=self._inherited,
        )

    def _check(self, status: int, tail: str, printed: str, ep: Episode) -> None:
        """Raise AgentError unless the program succeeded, or ended because of its own limit of turns."""
        limit = self._definition.turn_limit if self._config.max_turns is not None else None
        at_limit = limit is not None and status in limit.statuses
        if status == 0 or (limit and at_limit and (limit.says in tail or limit.says in printed)):
            return
        end = tail[-_TAIL:].replace(ep.api_key, "***")
        raise AgentError(f"{self._program.name} exited with status {status}: {end or 'it printed nothing'}")

    async def close(self) -> None:
        """Remove the folders that were not released, and end the sandboxes of cancelled episodes."""
        for episode in list(self._folders):
            await self.release(episode)
        if self._sandboxes is not None:
            await self._sandboxes.close()


def check_acp(definition: CliDefinition, config: CliAgentConfig) -> None:
    """Raise ConfigError or AgentError if an agent cannot be driven in the Agent Client Protocol."""
    require("acp", "an agent that is prompted turn by turn")
    if definition.acp is None:
        raise AgentError(
            f"the definition of {config.cli} has no [acp]: it takes one prompt, not several (docs/agents.md)"
        )
    if config.max_turns is not None:
        raise AgentError("agent.max_turns is for one prompt; set rollout.limits.max_turns instead")
