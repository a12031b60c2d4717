"""The sandbox of a run's agent: whether it has one, and whether this machine can start it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from areal_agents.config import Config
from areal_agents.errors import ConfigError, SandboxError
from areal_agents.rollout.agents.cli.config import CliAgentConfig
from areal_agents.rollout.config import CommandAgentConfig
from areal_agents.sandbox.isolations import check_isolation


def sandboxed_agent(config: Config) -> CommandAgentConfig | CliAgentConfig | None:
    """Return the settings of the run's agent if it runs in a sandbox, else None."""
    agent = config.agent
    found = CliAgentConfig.read(agent) if isinstance(agent, Mapping) and "cli" in agent else agent
    if isinstance(found, CommandAgentConfig | CliAgentConfig) and found.isolation != "none":
        return found
    return None


def check_sandbox(config: Config) -> None:
    """Start a sandbox as the agent's, and run a command in it.

    Raises:
        ConfigError: this machine does not have what the isolation needs; says what to do.
    """
    agent = sandboxed_agent(config)
    if agent is None:
        return
    try:
        asyncio.run(check_isolation(agent.isolation, agent.spec()))
    except (SandboxError, ValueError) as error:
        raise ConfigError(f"agent: {error}") from error
