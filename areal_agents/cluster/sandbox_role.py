"""The role `sandbox`: serves the sandboxes of its machine to the rollout processes of the run.

It runs other people's programs, so it keeps little that these could want: the configuration and the keys of
the run leave no file behind, and no process of the same user can read its memory and its variables.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import ExitStack
from pathlib import Path

from areal_agents.cluster.place import Place
from areal_agents.cluster.proxy_forwarder import forwarding_to_proxies
from areal_agents.config import Config
from areal_agents.errors import ConfigError, SandboxError
from areal_agents.inference.ports import reserved_ports
from areal_agents.launch.agent_sandbox import sandboxed_agent
from areal_agents.launch.supervision import EXIT_STOPPED
from areal_agents.process_control import forbid_inspection
from areal_agents.rollout.agents.cli.config import CliAgentConfig
from areal_agents.rollout.config import CommandAgentConfig
from areal_agents.sandbox.isolations import check_isolation
from areal_agents.sandbox.remote.host import SandboxHost
from areal_agents.sandbox.remote.messages import token_of
from areal_agents.sockets import address_of, allow_many_connections, listen
from areal_agents.store import Store
from areal_agents.tls import TlsConfig

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_LOOPBACK = "127.0.0.1"


def serve_sandboxes(
    store: Store, config: Config, secret: str, place: Place, told: threading.Event, port: int
) -> int:
    """Serve sandboxes until told to end, or until the place is lost; return the exit code.

    Their commands call the proxies through a port of this machine, unless `proxy.public_url` is set.

    Args:
        store: where the proxies are found.
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
    row, server = place.row, None
    with ExitStack() as held:
        if config.proxy.public_url is None:
            own = held.enter_context(reserved_ports(1, _LOOPBACK))[0]
            count = config.cluster.proxies
            held.enter_context(
                forwarding_to_proxies(store, _LOOPBACK, own, count=count, preferred=row.index % count)
            )
            server = f"http://{_LOOPBACK}:{own}"
        token, places = token_of(secret, row.index, row.epoch), config.cluster.sandbox_places
        host = SandboxHost(token, places=places, model_server=server)
        return asyncio.run(_serve(host, agent, place, told, port, config.cluster.tls))


async def _serve(
    host: SandboxHost,
    agent: CommandAgentConfig | CliAgentConfig,
    place: Place,
    told: threading.Event,
    port: int,
    tls: TlsConfig | None,
) -> int:
    try:
        await _prepare(host, agent)
        listener = listen(place.row.host, port)
        await host.listen(listener, tls)
        scheme = "http" if tls is None else "https"
        # Not the listener's address: the host may be a name, which the certificate is for.
        url = f"{scheme}://{address_of(place.row.host, listener.getsockname()[1])}"
        await asyncio.to_thread(place.announce, url)
        logger.info("sandboxes with isolation %s at %s", agent.isolation, url)
        while not told.is_set():
            if (loss := place.loss) is not None:
                logger.error("%s; this process ends", loss)
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
