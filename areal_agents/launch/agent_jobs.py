"""Agents whose episodes are jobs of a cluster: checks whether a run can have them, and names their owner."""

from __future__ import annotations

import hashlib
import ipaddress
import socket
from pathlib import Path
from urllib.parse import urlsplit

from areal_agents.config import Config
from areal_agents.errors import AgentError, ConfigError
from areal_agents.launch.run_folder import ClusterPlace
from areal_agents.rollout.agents.jobs.agent import check_template, queue_of
from areal_agents.rollout.config import job_of_agent

NO_TRIAL = "no trial episode is played: its agent would be a job, which may have to wait"


def check_jobs(config: Config, *, is_cluster: bool = False) -> None:
    """Check that jobs can be submitted, and can reach the model.

    Args:
        is_cluster: whether a launcher places the rollout processes. They then check themselves whether their
            machine has the commands of the scheduler.

    Raises:
        ConfigError: they cannot; says what to do.
    """
    job = job_of_agent(config.agent)
    if job is None:
        return
    try:
        if is_cluster:
            check_template(job)
        else:
            queue_of(job, owner="unused")
    except AgentError as error:
        raise ConfigError(str(error)) from None
    url = config.proxy.public_url
    host = urlsplit(url).hostname or "" if url else config.proxy.host
    if url is None and is_cluster:
        raise ConfigError(
            "proxy.public_url: the agent's jobs do not reach the address at which a rollout process serves "
            "the agents of its machine; set it to a URL of the proxies that the machines of the jobs reach"
        )
    if _is_of_this_machine(host):
        raise ConfigError(
            f"{'proxy.public_url' if url else 'proxy.host'}: the agent's jobs run on other machines, which "
            f"do not reach {url or host}; set proxy.public_url to the URL under which they reach the proxy, "
            "or proxy.host to an address of this machine in their network"
        )


def refuse_jobs(config: Config, command: str) -> None:
    """Raise ConfigError for a command that serves its agents on this machine alone."""
    if job_of_agent(config.agent) is not None:
        raise ConfigError(
            f"agent.job: {command} plays episodes on this machine, which jobs do not reach; leave the job "
            "out (agent.job=null) to run the command here"
        )


def owner_of_jobs(config: Config, folder: Path, place: ClusterPlace | None) -> str:
    """Return the prefix of the names of a rollout process's jobs, which is the same when it is started again.

    Args:
        folder: the folder of the run.
    """
    run = str(config.store.url) if place is not None else f"{socket.gethostname()}:{folder.resolve()}"
    digest = hashlib.sha256(f"{run} {place.index if place is not None else 0}".encode()).hexdigest()
    return f"areal-{digest[:8]}"


def _is_of_this_machine(host: str) -> bool:
    """Whether other machines cannot use an address: it is loopback, or stands for every address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host in ("localhost", "")
    return address.is_loopback or address.is_unspecified
