"""What `areal-agents doctor --config` examines: the agent of a run, its first task and reward function."""

from __future__ import annotations

import shlex
from typing import Any

from areal_agents.config import Config
from areal_agents.errors import ConfigError
from areal_agents.rollout.agents.cli.config import CliAgentConfig
from areal_agents.rollout.config import CommandAgentConfig
from areal_agents.rollout.data import load_tasks


def agent_of_run(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of `examine` for the agent of a configuration, and its first task.

    Raises:
        ConfigError: it has no agent, or an environment in place of one.
        DataError: its tasks cannot be loaded.
    """
    agent = config.agent
    given: dict[str, Any] = {"reward": config.reward}
    if config.environment is not None or config.environments:
        raise ConfigError("an environment plays its tasks itself; examine it with --rewards")
    if not agent:
        raise ConfigError("the configuration has no agent to examine")
    if isinstance(agent, str):
        given["function"] = agent
    elif isinstance(agent, CommandAgentConfig):
        given |= {"command": shlex.split(agent.command), "sandbox": agent}
    else:
        given["cli"] = CliAgentConfig.read(agent)
    task = load_tasks(config.data, seed=config.seed).epoch(0)[0]
    return given, dict(task.input)
