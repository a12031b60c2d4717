"""Agents whose episodes are jobs of a cluster: checks whether a run can have them, and names their owner."""

from __future__ import annotations

import hashlib
import ipaddress
import shlex
import socket
from pathlib import Path
from urllib.parse import urlsplit

from areal_agents.config import Config
from areal_agents.errors import AgentError, ConfigError
from areal_agents.launch.run_folder import ClusterPlace, RunFolder
from areal_agents.rollout.agents.jobs.agent import command_line
from areal_agents.rollout.agents.jobs.commands import SchedulerError
from areal_agents.rollout.agents.jobs.config import JobConfig
from areal_agents.rollout.agents.jobs.queue import NewJob
from areal_agents.rollout.agents.jobs.schedulers import filled_template, queue_of
from areal_agents.rollout.config import CommandAgentConfig, job_of_agent
from areal_agents.store.postgres import is_postgres

NO_TRIAL = "no trial episode is played: its agent would be a job, which may have to wait"


def check_jobs(config: Config, *, launcher: str = "", dry_run: bool = False) -> None:
    """Check that jobs can be submitted, and can reach the model.

    Args:
        launcher: the name of the launcher; "": there is none. Without one, or with "local", the rollout
            processes run on this machine, where the scheduler must answer. Otherwise each process checks
            that on its own machine.
        dry_run: the scheduler need not answer, because nothing is started.

    Raises:
        ConfigError: they cannot; says what to do.
    """
    job = job_of_agent(config.agent)
    if job is None:
        return
    infra = str(config.cluster.skypilot.resources.get("infra", ""))
    if job.kind == "slurm" and (
        launcher == "kubernetes" or (launcher == "skypilot" and not infra.startswith("slurm"))
    ):
        raise ConfigError(
            f"agent.job.kind: slurm with --launcher {launcher}: the rollout processes do not run on a Slurm "
            "cluster, so they cannot submit jobs to it; use kind: kubernetes with the manifest of a Job, or "
            "--launcher slurm (docs/clusters.md)"
        )
    try:
        example_job(config)
        if launcher in ("", "local") and not dry_run:
            _check_scheduler(job)
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


def example_job(config: Config) -> str:
    """Return what the scheduler gets for an episode, as lines of comments; empty if no job runs the episodes.

    Raises:
        ConfigError: the template cannot be used.
    """
    job = job_of_agent(config.agent)
    if job is None:
        return ""
    assert isinstance(config.agent, CommandAgentConfig)
    owner = "areal-12345678"
    example = NewJob(
        name=f"{owner}-episode-0000",
        episode="EPISODE",
        command=command_line(shlex.split(config.agent.command)),
        variables={},
        time_s=config.rollout.limits.time_s,
        log=RunFolder(Path(config.run_dir).absolute()).episode_logs / "EPISODE.log",
    )
    try:
        filled = filled_template(job, example, owner=owner)
    except AgentError as error:
        raise ConfigError(str(error)) from None
    lines = (f"# {line}".rstrip() for line in filled.splitlines())
    return "\n".join(("# agent.job.template, filled in for an episode:", *lines)) + "\n"


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
        place: the place of the process in a cluster; None: there is no launcher.
    """
    url = config.store.url or ""  # only that of a server says the same on every machine
    run = url if place is not None and is_postgres(url) else f"{socket.gethostname()}:{folder.resolve()}"
    digest = hashlib.sha256(f"{run} {place.index if place is not None else 0}".encode()).hexdigest()
    return f"areal-{digest[:8]}"


def _check_scheduler(job: JobConfig) -> None:
    """Raise AgentError if the scheduler does not answer this machine."""
    queue = queue_of(job, owner="unused")
    try:
        queue.states()
    except SchedulerError as error:
        where = "such as a login node of the cluster" if job.kind == "slurm" else "with a context of kubectl"
        raise AgentError(
            f"agent.job.kind: {job.kind}: {error}; the rollout process runs on this machine, so start the "
            f"run where the scheduler answers, {where} (docs/clusters.md)"
        ) from None
    finally:
        queue.commands.close()


def _is_of_this_machine(host: str) -> bool:
    """Whether other machines cannot use an address: it is loopback, or stands for every address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host in ("localhost", "")
    return address.is_loopback or address.is_unspecified
