"""Loads the user's agent and runs it: as a coroutine in this process, in a worker process, or as a command.

In every case, cancelling `run` ends the agent: a coroutine is cancelled, a process is killed, and a job of a
cluster is cancelled; the job ends when its node has carried that out.
"""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from pydantic import ValidationError

from areal_agents.environments.config import EnvironmentConfig
from areal_agents.episode import Episode, check_signature
from areal_agents.errors import AgentError
from areal_agents.rollout.agents.cli.agent import CliAgent
from areal_agents.rollout.agents.cli.config import CliAgentConfig
from areal_agents.rollout.agents.command import CommandAgent
from areal_agents.rollout.agents.coroutine import CoroutineAgent
from areal_agents.rollout.agents.environment_agent import MixedEnvironmentAgent, environment_agent
from areal_agents.rollout.agents.jobs.agent import JobAgent
from areal_agents.rollout.agents.sandboxed_command import SandboxedCommandAgent
from areal_agents.rollout.agents.worker_pool import WorkerAgent
from areal_agents.rollout.config import AgentSpec, CommandAgentConfig
from areal_agents.sandbox.remote.hosts import SandboxHosts
from areal_agents.user_functions import load_function


class Agent(Protocol):
    """Something that attempts tasks.

    Attributes:
        capacity: the most episodes that it can run at the same time; None: no limit.
        must_reward: whether it gives its rewards before an episode ends, so that one without has failed. A
            command's reward may also be posted later.
    """

    capacity: int | None
    must_reward: bool

    async def run(self, task: Mapping[str, Any], ep: Episode) -> Any:
        """Run one episode and return what the agent returned. Raises what the agent raises, or AgentError."""
        ...

    async def close(self) -> None:
        """End every remaining process."""
        ...


@runtime_checkable
class LeavesFiles(Protocol):
    """An agent that leaves a folder for the reward function."""

    def workdir_of(self, episode: str) -> Path | None:
        """Return the folder in which an episode's agent worked; None before it ran and after `release`."""
        ...

    async def release(self, episode: str) -> None:
        """Remove the folder of an episode, if there is one."""
        ...


@runtime_checkable
class WaitsForPlace(Protocol):
    """An agent whose episode may have to wait until a machine has room for it, before its time begins."""

    async def prepare(self, task: Mapping[str, Any], ep: Episode, time_s: float) -> None:
        """Get what the episode needs to begin.

        Args:
            time_s: the time limit of the episode in seconds, which begins when this has returned.

        Raises:
            AgentNotStarted: the agent has not begun, for a reason that is not its own.
            AgentError: something else prevents it.
        """
        ...

    async def release(self, episode: str) -> None:
        """Give back what `prepare` got, if `run` has not used it."""
        ...


def load_agent(
    spec: AgentSpec,
    *,
    workers: int = 8,
    logs: Path | None = None,
    hosts: SandboxHosts | None = None,
    job_owner: str = "",
) -> Agent:
    """Load the agent that a configuration names.

    Args:
        spec: "module:function", "path/to/file.py:function", {"command": "python my_agent.py"} with further
            settings of CommandAgentConfig, {"cli": "codex"} with further settings of CliAgentConfig,
            {"environment": "scheme:name", "python": "an interpreter, or empty"}, or {"environments": […]} of
            such mappings with a name each. The function need not be decorated; it must take (task, ep).
        workers: the most processes for a synchronous function.
        logs: a folder for the output of commands; None: the output is discarded.
        hosts: where the sandboxes of a program are; None: on this machine.
        job_owner: see `JobAgent`; for a command that runs as jobs.

    Raises:
        AgentError: the agent cannot be imported, is not a function of (task, ep), the command is empty, the
            program of a command-line agent is missing, or its command cannot run as jobs from here.
        TaskEnvironmentError: the environment cannot be opened.
    """
    if isinstance(spec, Mapping) and "environment" in spec:
        return environment_agent(EnvironmentConfig(use=spec["environment"], python=spec.get("python", "")))
    if isinstance(spec, Mapping) and "environments" in spec:
        return MixedEnvironmentAgent(
            {
                one["name"]: environment_agent(
                    EnvironmentConfig(use=one["use"], python=one.get("python", ""))
                )
                for one in spec["environments"]
            }
        )
    if isinstance(spec, Mapping) and "cli" in spec:
        return CliAgent(CliAgentConfig.read(spec), logs=logs, hosts=hosts)
    if isinstance(spec, Mapping):
        try:
            spec = CommandAgentConfig.model_validate(spec)
        except ValidationError as error:
            raise AgentError(
                "an agent must be module:function, file.py:function, {command: …} or {cli: …}, got "
                f"{dict(spec)}: {error}"
            ) from None
    if isinstance(spec, CommandAgentConfig):
        command = shlex.split(spec.command)
        if spec.job is not None:
            return JobAgent(command, spec.job, owner=job_owner, logs=logs, passed=spec.pass_environment)
        if spec.isolation == "none":
            return CommandAgent(command, logs=logs, passed=spec.pass_environment)
        return SandboxedCommandAgent(command, spec, logs=logs, hosts=hosts)
    function = load_function(spec, AgentError)
    check_signature(function)
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return CoroutineAgent(function)
    return WorkerAgent(spec, size=workers)
