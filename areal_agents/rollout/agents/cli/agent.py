"""Runs a command-line agent: one program per episode, in a home folder and a working folder of its own.

Both folders are in a temporary one. When the program has ended, the processes that it left running are killed
and its home folder is removed; the working folder stays until `release`, for the reward function. What it
prints is in the log of its episode.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_agents.episode import Episode
from areal_agents.errors import AgentError
from areal_agents.folders import remove_folder
from areal_agents.rollout.agents.agent_process import ChildProcess
from areal_agents.rollout.agents.cli.config import DEFAULT_CONTEXT, CliAgentConfig
from areal_agents.rollout.agents.cli.prepare import Launch, folder_of_task, make_home, of_task, prepare
from areal_agents.rollout.agents.cli.program import find_program
from areal_agents.rollout.agents.cli.sandboxed import SandboxedPrograms
from areal_agents.rollout.agents.cli.seam import load_seam
from areal_agents.rollout.agents.episode_logs import EpisodeLogs

logger = logging.getLogger(__name__)

HOME, WORK = "home", "work"
_TAIL = 2000  # characters of the output in an error


class CliAgent:
    """Runs a program that a seam describes, once for each episode."""

    capacity: int | None = None
    must_reward = False

    def __init__(
        self, config: CliAgentConfig, *, logs: Path | None = None, inherited: Mapping[str, str] = os.environ
    ) -> None:
        """Args:
        config: the setting `agent`.
        logs: a folder for the output of the newest episodes; None: it is discarded.
        inherited: the variables from which the agent gets what concerns the machine.

        Raises:
            AgentError: the seam is not valid, its program is missing or too old, or a path of `readable`
                does not exist.
        """
        self._config = config
        self._seam = load_seam(config.cli)
        if config.max_turns is not None and self._seam.turn_limit is None:
            raise AgentError(
                f"agent.max_turns: {config.cli} has no option for it; set rollout.limits.max_turns instead"
            )
        try:
            config.spec()
        except ValueError as error:
            raise AgentError(f"agent: {error}") from None
        self._inherited = inherited
        self._program = find_program(self._seam, config.executable, inherited)
        self._logs = EpisodeLogs(logs)
        self._sandboxes = SandboxedPrograms(config.isolation) if config.isolation != "none" else None
        self._folders: dict[str, Path] = {}  # of the episodes that were not released

    async def run(self, task: Mapping[str, Any], ep: Episode) -> None:
        """Run one episode. Raises AgentError, with the end of the output, if the program fails."""
        prompt = of_task(self._config.prompt, task, "prompt")
        source = folder_of_task(self._config.workdir, task) if self._config.workdir else None
        folder = self._folders[ep.id] = Path(tempfile.mkdtemp(prefix="areal-agents-cli-"))
        try:
            if self._sandboxes is None:
                await asyncio.to_thread(_copy, source, folder / WORK)
                await self._run(prompt, ep, folder / HOME, folder / WORK)
            else:
                await self._run_in_sandbox(self._sandboxes, prompt, ep, source, folder / WORK)
        finally:
            # Also after a cancellation: what a killed process wrote must not remain.
            await asyncio.shield(asyncio.to_thread(_remove, folder / HOME))

    def workdir_of(self, episode: str) -> Path | None:
        """Return the folder in which an episode's agent worked; None before it ran and after `release`."""
        folder = self._folders.get(episode)
        return folder / WORK if folder is not None else None

    async def release(self, episode: str) -> None:
        """Remove the folder of an episode, if there is one."""
        folder = self._folders.pop(episode, None)
        if folder is not None:
            await asyncio.to_thread(_remove, folder)

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

    def _launch(self, prompt: str, ep: Episode, home: Path, work: Path) -> Launch:
        return prepare(
            self._seam,
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
        limit = self._seam.turn_limit if self._config.max_turns is not None else None
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


def _copy(source: Path | None, target: Path) -> None:
    """Copy a folder with its symbolic links, or create an empty one."""
    if source is None:
        target.mkdir()
    else:
        shutil.copytree(source, target, symlinks=True)


def _remove(folder: Path) -> None:
    """Remove a folder. A failure is logged: the episode has its result, and the run continues."""
    try:
        remove_folder(folder)
    except OSError as error:
        logger.error("the folder %s of an episode cannot be removed: %s", folder, error)
