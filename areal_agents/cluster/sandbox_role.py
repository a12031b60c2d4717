"""The role `sandbox`: serves the sandboxes of its machine to the rollout processes of the run.

It runs other people's programs, so it keeps little that these could want: the configuration and the keys of
the run leave no file behind, and no process of the same user can read its memory and its variables.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path

from areal_agents.cluster.place import Place
from areal_agents.config import Config
from areal_agents.errors import ConfigError, SandboxError
from areal_agents.launch.agent_sandbox import sandboxed_agent
from areal_agents.launch.supervision import EXIT_STOPPED
from areal_agents.process_control import forbid_inspection
from areal_agents.rollout.agents.cli.config import CliAgentConfig
from areal_agents.rollout.config import CommandAgentConfig
from areal_agents.sandbox.isolations import check_isolation
from areal_agents.sandbox.remote.host import SandboxHost
from areal_agents.sandbox.remote.messages import token_of
from areal_agents.sockets import allow_many_connections, listen, url_of

logger = logging.getLogger(__name__)

_POLL_S = 0.2


def serve_sandboxes(config: Config, secret: str, place: Place, told: threading.Event, port: int) -> int:
    """Serve sandboxes until told to end, or until the place is lost; return the exit code.

    Args:
        secret: the secret of the run.
        port: 0: one that is free.

    Raises:
        ConfigError: this machine lacks what the isolation of the agent needs.
    """
    forbid_inspection()
    allow_many_connections()
    agent = sandboxed_agent(config)
    if agent is None:
        raise ConfigError("the agent of this run runs in no sandbox, so a sandbox process has nothing to do")
    return asyncio.run(_serve(agent, config.cluster.sandbox_places, secret, place, told, port))


async def _serve(
    agent: CommandAgentConfig | CliAgentConfig,
    places: int,
    secret: str,
    place: Place,
    told: threading.Event,
    port: int,
) -> int:
    row = place.row
    host = SandboxHost(token_of(secret, row.index, row.epoch), places=places)
    try:
        await _prepare(host, agent)
        listener = listen(row.host, port)
        await host.listen(listener)
        url = url_of(listener)
        await asyncio.to_thread(place.announce, url)
        logger.info("%d sandboxes at the same time with isolation %s, at %s", places, agent.isolation, url)
        while not told.is_set():
            if place.is_lost:
                logger.error("another process is sandbox %d of the run now; this one ends", row.index)
                return 1
            await asyncio.sleep(_POLL_S)
        return EXIT_STOPPED
    finally:
        await host.close()


async def _prepare(host: SandboxHost, agent: CommandAgentConfig | CliAgentConfig) -> None:
    """Show that the isolation works here, and start warm sandboxes if their folder is here too."""
    try:
        if isinstance(agent, CommandAgentConfig):
            # A folder that is not here comes with the first sandbox.
            is_here = not agent.workdir or Path(agent.workdir).is_dir()
            here = agent if is_here else agent.model_copy(update={"workdir": ""})
            await check_isolation(agent.isolation, here.spec())
            if agent.warm and is_here:
                await host.warm_up(agent.isolation, agent.spec(), warm=agent.warm)
        else:
            await check_isolation(agent.isolation, agent.spec())
    except (SandboxError, ValueError) as error:
        raise ConfigError(f"agent: {error}") from error
