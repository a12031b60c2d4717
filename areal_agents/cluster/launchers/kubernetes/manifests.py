"""Makes the manifests of a run on Kubernetes: lists its objects, and makes those that start its pods.

The supervisor, the trainer and the rollout processes end with the run, so they are Jobs; engines, proxies and
sandbox hosts do not, so they are StatefulSets. The index of a pod is that of its process in the run, so a pod
that replaces another takes its place. Pods find each other in the store, by their addresses, or with TLS by
the names that the headless services give them. A manifest has no secret, and a configuration that has keys or
passwords is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from areal_agents.cluster.launchers.base import RoleProcess
from areal_agents.cluster.launchers.config_secrets import refuse_secrets
from areal_agents.cluster.launchers.kubernetes.certificates import scheme_of
from areal_agents.cluster.launchers.kubernetes.config import KubernetesConfig
from areal_agents.cluster.launchers.kubernetes.network import network_policies, policy_of_jobs
from areal_agents.cluster.launchers.kubernetes.objects import PORT, Run, RunObjects
from areal_agents.cluster.launchers.kubernetes.pods import CONFIG, Pods
from areal_agents.errors import ConfigError
from areal_agents.store.roles import SERVERS, Role

_START_S = 3600  # longest start of an engine or a proxy: a download and the loading of a large model
_RESTARTS = 20  # the failures of one pod of a Job until the Job fails


def manifests(run: Run, settings: KubernetesConfig) -> list[dict[str, Any]]:
    """Return the objects of a run in the order in which they are created.

    Raises:
        ConfigError: the configuration has a secret, or there is no image.
    """
    if not settings.image:
        raise ConfigError(
            "cluster.kubernetes.image: name an image that has this package with the extras train and "
            "postgres, and the project"
        )
    if run.creates_jobs and not settings.service_account:
        raise ConfigError(
            "cluster.kubernetes.service_account: the rollout pods create Jobs for the agent (agent.job); "
            "name a service account that may do so (docs/clusters.md)"
        )
    refuse_secrets(run.config, run.overrides)
    made = RunObjects(run.name, settings.namespace)
    workloads = _Workloads(made, run, settings)
    by_role: dict[Role, list[RoleProcess]] = {}
    for process in run.processes:
        by_role.setdefault(process.role, []).append(process)
    objects = [
        made.make("v1", "ConfigMap", "-config", data={CONFIG: run.config}),
        *([] if settings.claim else [_claim(made, settings)]),
        *network_policies(made, store_url=run.store_url, has_sandboxes="sandbox" in by_role),
        *([policy_of_jobs(made, run.jobs_namespace)] if run.creates_jobs else []),
        workloads.supervisor(),
    ]
    for role, processes in by_role.items():
        objects.append(workloads.headless_service(role))
        if role in SERVERS:
            objects.append(workloads.stateful_set(role, processes))
            if len(processes) > 1:
                objects.append(workloads.disruption_budget(role))
        else:
            objects.append(workloads.job(role, processes))
    return objects


def _claim(run: RunObjects, settings: KubernetesConfig) -> dict[str, Any]:
    """Return the claim of the volume with the folders of runs."""
    spec: dict[str, Any] = {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": settings.storage}},
    }
    if settings.storage_class:
        spec["storageClassName"] = settings.storage_class
    return run.make("v1", "PersistentVolumeClaim", "-runs", spec=spec)


class _Workloads:
    """Makes what starts and replaces the pods of one run, and the services that name them."""

    def __init__(self, objects: RunObjects, run: Run, settings: KubernetesConfig) -> None:
        self._objects = objects
        self._settings = settings
        self._pods = Pods(objects, run, settings)

    def supervisor(self) -> dict[str, Any]:
        return self._objects.make(
            "batch/v1",
            "Job",
            "-supervisor",
            role="supervisor",
            spec={
                "backoffLimit": _RESTARTS,
                "template": self._template("supervisor", self._pods.supervisor()),
            },
        )

    def stateful_set(self, role: Role, processes: Sequence[RoleProcess]) -> dict[str, Any]:
        labels = self._objects.labels_of(role)
        index = "metadata.labels['apps.kubernetes.io/pod-index']"
        pod = self._pods.of_role(role, processes[0], index)
        get: dict[str, Any] = {"path": "/health", "port": PORT}
        probe = {"httpGet": {**get, "scheme": "HTTPS"} if self._settings.tls_secret else get}
        pod["containers"][0].update(
            startupProbe={**probe, "periodSeconds": 10, "failureThreshold": _START_S // 10},
            readinessProbe={**probe, "periodSeconds": 5, "timeoutSeconds": 5},
            livenessProbe={**probe, "periodSeconds": 20, "timeoutSeconds": 20, "failureThreshold": 6},
        )
        spec = {
            "serviceName": f"{self._objects.name}-{role}",
            "replicas": len(processes),
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels},
            "template": self._template(role, pod),
        }
        return self._objects.make("apps/v1", "StatefulSet", f"-{role}", role=role, spec=spec)

    def job(self, role: Role, processes: Sequence[RoleProcess]) -> dict[str, Any]:
        index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        pod = {**self._pods.of_role(role, processes[0], index), "subdomain": f"{self._objects.name}-{role}"}
        spec = {
            "completionMode": "Indexed",
            "completions": len(processes),
            "parallelism": len(processes),
            "backoffLimit": _RESTARTS * len(processes),
            "template": self._template(role, pod),
        }
        return self._objects.make("batch/v1", "Job", f"-{role}", role=role, spec=spec)

    def headless_service(self, role: Role) -> dict[str, Any]:
        spec = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": self._objects.labels_of(role),
            "ports": [{"name": scheme_of(role, self._settings), "port": PORT}],
        }
        return self._objects.make("v1", "Service", f"-{role}", role=role, spec=spec)

    def disruption_budget(self, role: Role) -> dict[str, Any]:
        spec = {"maxUnavailable": 1, "selector": {"matchLabels": self._objects.labels_of(role)}}
        return self._objects.make("policy/v1", "PodDisruptionBudget", f"-{role}", role=role, spec=spec)

    def _template(self, role: str, pod: Mapping[str, Any]) -> dict[str, Any]:
        return {"metadata": {"labels": self._objects.labels_of(role)}, "spec": dict(pod)}
