"""`areal_agents.acp_agent`: a command-line agent in an `@episode` function, prompted turn by turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, BinaryIO

from areal_agents.episode import Episode, running_episode
from areal_agents.errors import AgentError
from areal_agents.rollout.agents.cli.acp.reply import Permissions
from areal_agents.rollout.agents.cli.acp.session import AcpAgent
from areal_agents.rollout.agents.cli.agent import CliAgent
from areal_agents.rollout.agents.cli.config import DEFAULT_CONTEXT, CliAgentConfig
from areal_agents.sandbox.config import Isolation


@asynccontextmanager
async def acp_agent(
    cli: str,
    ep: Episode | None = None,
    *,
    workdir: str | Path | None = None,
    executable: str | Path = "",
    model: str = "policy",
    context: int = DEFAULT_CONTEXT,
    permissions: Permissions = "allow",
    turn_timeout_s: float = 600.0,
    isolation: Isolation = "none",
    image: str = "",
    readable: Sequence[str | Path] = (),
    limits: Mapping[str, Any] | None = None,
    log: BinaryIO | None = None,
) -> AsyncIterator[AcpAgent]:
    """Start a command-line agent in the Agent Client Protocol, to be prompted turn by turn in the block.

    The agent gets a fresh home folder and a copy of `workdir`. All its model calls are recorded in the
    episode. After the block its processes are ended and its folders removed.

        async with areal_agents.acp_agent("opencode", workdir=task["folder"]) as agent:
            reply = await agent.prompt(task["instruction"])
            await agent.prompt("Now write a test for it.")
            folder = await agent.end()      # the agent's copy, as it left it

    Args:
        cli: the name of an agent that has a mode for this, or the path of a definition's .toml file
            (docs/agents.md).
        ep: the episode; None: the one that runs in this context.
        workdir: the folder that it gets a copy of; None: an empty one.
        executable: the program; empty: the program that the definition names, where PATH has it.
        model: the name of the model that it asks for.
        context: the context of the model in tokens, as it is told.
        permissions: how its permission requests are answered: "allow", "reject", or a function of the tool
            call that returns whether it is allowed.
        turn_timeout_s: longest wait in seconds for the end of a turn.
        isolation, image, readable, limits: where it runs, as in the configuration of command-line agents.
        log: an open file for what it writes.

    Raises:
        ConfigError: the extra `acp` is not installed.
        AgentError: the agent cannot be started, or begins no session.
    """
    if not isinstance(permissions, str) and not callable(permissions):
        raise AgentError(f'permissions must be "allow", "reject" or a function, got {permissions!r}')
    config = CliAgentConfig.read(
        {
            "cli": cli,
            "prompts": "{task.prompts}",  # of which none is used: the caller prompts it
            "executable": str(executable),
            "model": model,
            "context": context,
            "permissions": permissions if isinstance(permissions, str) else "allow",
            "turn_timeout_s": turn_timeout_s,
            "isolation": isolation,
            "image": image,
            "readable": [str(path) for path in readable],
            "limits": dict(limits or {}),
        }
    )
    episode = ep if ep is not None else running_episode()
    source = Path(workdir).expanduser() if workdir is not None else None
    if source is not None and not source.is_dir():
        raise AgentError(f"workdir: there is no folder {source}")
    starter = await asyncio.to_thread(CliAgent, config)  # it waits for the program to print its version
    try:
        async with starter.open(episode, source, permissions=permissions, log=log) as agent:
            yield agent
    finally:
        await asyncio.shield(starter.close())
