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
# By the names of the launcher and of the kind of job: why the rollout processes cannot submit such jobs.
_IMPOSSIBLE = {
    (
        "kubernetes",
        "slurm",
    ): "the rollout pods are not machines of a Slurm cluster, so they submit nothing to it; "
    "use kind: kubernetes with the manifest of a Job, or --launcher slurm",
}


def check_jobs(config: Config, *, launcher: str = "") -> None:
    """Check that jobs can be submitted, and can reach the model.

    Args:
        launcher: the name of the launcher; "": there is none. Without one, or with "local", the rollout
            processes run on this machine, which must have the commands of the scheduler. Otherwise each
            process checks that on its own machine.

    Raises:
        ConfigError: they cannot; says what to do.
    """
    job = job_of_agent(config.agent)
    if job is None:
        return
    if (why := _IMPOSSIBLE.get((launcher, job.kind))) is not None:
        raise ConfigError(f"agent.job.kind: {job.kind} with --launcher {launcher}: {why} (docs/clusters.md)")
    try:
        if launcher not in ("", "local"):
            check_template(job)
        else:
            queue_of(job, owner="unused")
    except AgentError as error:
        raise ConfigError(str(error)) from None
    url = config.proxy.public_url
    host = urlsplit(url).hostname or "" if url else config.proxy.host
    if url is None and launcher:
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
