"""Runs a command as `CommandAgent` does, but in a sandbox of its own for each episode.

The program gets the same task and variables, with the address of the model as its sandbox has it. It has
nothing else of the environment of the run but what `pass_environment` names.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_agents.episode import Episode
from areal_agents.errors import AgentError, SandboxError
from areal_agents.rollout.agents.command import command_variables
from areal_agents.rollout.agents.episode_logs import EpisodeLogs
from areal_agents.rollout.agents.prepared_sandboxes import PreparedSandboxes
from areal_agents.sandbox.config import SandboxConfig
from areal_agents.sandbox.isolations import IsolationOnFirstUse
from areal_agents.sandbox.pool import SandboxPool
from areal_agents.sandbox.remote.client import RemoteIsolation
from areal_agents.sandbox.remote.hosts import SandboxHosts
from areal_agents.sandbox.sandbox import Isolation

_TAIL = 4096  # bytes of standard error in a message


class SandboxedCommandAgent:
    """Runs a command for each episode in a new sandbox."""

    capacity: int | None = None
    must_reward = False

    def __init__(
        self,
        command: Sequence[str],
        sandbox: SandboxConfig,
        *,
        logs: Path | None = None,
        hosts: SandboxHosts | None = None,
    ) -> None:
        """Args:
        command: the program and its arguments.
        sandbox: its isolation is not "none".
        logs: see `CommandAgent`.
        hosts: where the sandboxes are; None: on this machine.

        Raises:
            AgentError: the folder in which it works does not exist.
        """
        self._command = tuple(command)
        self._config = sandbox
        try:
            self._spec = sandbox.spec()
        except ValueError as error:
            raise AgentError(f"the agent's sandbox: {error}") from None
        self._logs = EpisodeLogs(logs)
        self._isolation: Isolation
        if hosts is None:
            self._isolation = IsolationOnFirstUse(sandbox.isolation)
        else:
            self._isolation = RemoteIsolation(sandbox.isolation, hosts, warm=sandbox.warm)
        # Those on hosts are kept warm there.
        self._pool = SandboxPool(self._isolation, self._spec, warm=0 if hosts else sandbox.warm)
        self._prepared = PreparedSandboxes()

    async def prepare(self, task: Mapping[str, Any], ep: Episode, time_s: float) -> None:
        """Take the sandbox of an episode, or wait for one. Raises AgentError if it cannot be started."""
        await self._prepared.prepare(ep.id, self._pool.take())

    async def release(self, episode: str) -> None:
        """End the sandbox of an episode, if its run has not taken it."""
        await self._prepared.release(episode)

    async def run(self, task: Mapping[str, Any], ep: Episode) -> None:
        """Run one episode. Raises AgentError, with the end of standard error, if the exit status is not 0."""
        text = json.dumps(dict(task))
        passed = {name: os.environ[name] for name in self._config.pass_environment if name in os.environ}
        try:
            sandbox = self._prepared.take(ep.id) or await self._pool.take()
            try:
                with self._logs.opened(ep.id) as log:
                    inner = dataclasses.replace(ep, base_url=sandbox.inner_url(ep.base_url))
                    finished = await sandbox.run(
                        self._command,
                        timeout_s=None,  # the time limit of the episode cancels it
                        environment={**passed, **command_variables(text, inner)},
                        stdin=text.encode(),
                        kept_bytes=_TAIL,
                        model_url=ep.base_url,
                        log=log,
                    )
            finally:
                await sandbox.end()
        except SandboxError as error:
            raise AgentError(f"the agent's sandbox: {error}") from error
        if finished.status != 0:
            memory = f" (a process exceeded memory_mb: {self._spec.limits.memory_mb})"
            raise AgentError(
                f"{self._command[0]} exited with status {finished.status}"
                f"{memory if finished.out_of_memory else ''}: {finished.stderr.text().strip()}"
            )

    async def close(self) -> None:
        """End the sandboxes that wait, and those of episodes that were cancelled."""
        await self._pool.close()
        await self._isolation.close()
