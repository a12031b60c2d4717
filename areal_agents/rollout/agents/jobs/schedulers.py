"""The schedulers that `agent.job.kind` names: their queues, and what they get from a template."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import yaml

from areal_agents.errors import AgentError
from areal_agents.rollout.agents.jobs.config import JobConfig
from areal_agents.rollout.agents.jobs.kubernetes import KubernetesJobs, filled_manifest, read_manifest
from areal_agents.rollout.agents.jobs.queue import JobQueue, NewJob
from areal_agents.rollout.agents.jobs.slurm import SlurmJobs, filled_script, read_script


def queue_of(config: JobConfig, *, owner: str, passed: Collection[str] = ()) -> JobQueue:
    """Return the queue in which the jobs of an owner are. Raises AgentError if it cannot be used here."""
    if config.kind == "slurm":
        return SlurmJobs(config.template, owner=owner, passed=passed)
    _checked_manifest(config)
    return KubernetesJobs(config.template, owner=owner)


def filled_template(config: JobConfig, job: NewJob, *, owner: str) -> str:
    """Return what the scheduler gets for a job, without its variables.

    Raises:
        AgentError: the template cannot be used.
    """
    if config.kind == "slurm":
        return filled_script(read_script(config.template), job)
    manifest = filled_manifest(_checked_manifest(config), job, owner)
    return yaml.safe_dump(manifest, sort_keys=False, width=1000)


def namespace_of(config: JobConfig) -> str:
    """Return the namespace that a manifest names, or "". Raises AgentError if it cannot be used."""
    if config.kind == "slurm":
        return ""
    return str(read_manifest(config.template)["metadata"].get("namespace") or "")


def _checked_manifest(config: JobConfig) -> dict[str, Any]:
    """Return the manifest of Jobs that are seen to have ended before they are removed."""
    manifest = read_manifest(config.template)
    kept_s = manifest["spec"]["ttlSecondsAfterFinished"]
    if kept_s < 2 * config.poll_s:
        raise AgentError(
            f"agent.job.template: {config.template}: spec.ttlSecondsAfterFinished is {kept_s}, and must be "
            f"at least twice agent.job.poll_s ({config.poll_s:g} s), else Jobs are removed unseen "
            "(docs/clusters.md)"
        )
    return manifest
