"""Makes the manifests of a run on Kubernetes, as plain objects.

The supervisor, the trainer and the rollout processes end with the run, so they are Jobs; engines, proxies and
sandbox hosts do not, so they are StatefulSets. The index of a pod is that of its process in the run, so a pod
that replaces another takes its place. Pods find each other in the store, by their addresses, or with TLS by
the names that the headless services give them, because a certificate can be made for these before there are
pods. A manifest has no secret: pods get theirs as variables from the Secret that the configuration names, and
a configuration that has keys or passwords is refused. Sandbox pods run the programs of agents: they have no
folder of the run, of its Secret what a process needs to take part in it, and they reach the proxies, the
store and name resolution only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from areal_agents.cluster.launchers.base import RoleProcess
from areal_agents.cluster.launchers.config_secrets import refuse_secrets
from areal_agents.cluster.launchers.kubernetes.config import KubernetesConfig
from areal_agents.errors import ConfigError
from areal_agents.rollout.agent_variables import agent_variables
from areal_agents.rollout.agents.jobs.kubernetes import OWNER as OWNER_OF_JOBS
from areal_agents.secret_variables import RUN_TOKEN, STORE_PASSWORD
from areal_agents.store.postgres import host_of
from areal_agents.store.roles import DEAD_AFTER_S, SERVERS, Role
from areal_agents.tls import TlsConfig

RUNS = "/runs"  # where pods see the folders of runs
PORT = 8000  # of each engine, proxy and trainer; every pod has an address of its own
CONFIG = "cluster-run.yaml"  # the configuration, in the folder of the project
_LONGEST_NAME = 40  # leaves room for role, index and Kubernetes' own suffixes in 63 characters
_START_S = 3600  # longest start of an engine or a proxy: a download and the loading of a large model
_STOP_S = {"supervisor": 60, "engine": 40, "proxy": 40, "rollout": 60, "sandbox": 60}
_RESTARTS = 20  # the failures of one pod of a Job until the Job fails
_COMPONENT = "app.kubernetes.io/component"
_TLS = "/etc/areal-agents/tls"  # where pods see the entries of a Secret with a certificate
MOUNTED_TLS = TlsConfig(certificate=f"{_TLS}/tls.crt", key=f"{_TLS}/tls.key", authority=f"{_TLS}/ca.crt")


@dataclass(frozen=True, slots=True)
class Run:
    """What is rendered.

    Attributes:
        name: of the run; the objects are named after it.
        config: the text of the configuration file.
        overrides: `key=value` arguments of the command line.
        store_url: without a password.
        trainer_stop_s: longest time in seconds that the trainer takes to end.
        processes: every process of the run but the supervisor.
        creates_jobs: whether rollout processes create a Job for each episode.
    """

    name: str
    config: str
    overrides: tuple[str, ...]
    store_url: str
    trainer_stop_s: float
    processes: Sequence[RoleProcess]
    creates_jobs: bool = False


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
    name = object_name(run.name)
    pods = _Pods(name, run, settings)
    by_role: dict[Role, list[RoleProcess]] = {}
    for process in run.processes:
        by_role.setdefault(process.role, []).append(process)
    objects = [
        pods.object("v1", "ConfigMap", f"{name}-config", data={CONFIG: run.config}),
        *([] if settings.claim else [pods.claim()]),
        *(pods.network_policies("sandbox" in by_role)),
        *([pods.policy_of_jobs()] if run.creates_jobs else []),
        pods.supervisor(),
    ]
    for role, processes in by_role.items():
        objects.append(pods.headless_service(role))
        if role in SERVERS:
            objects.append(pods.stateful_set(role, processes))
            if len(processes) > 1:
                objects.append(pods.disruption_budget(role))
        else:
            objects.append(pods.job(role, processes))
    return objects


def certificate_names(run: str, settings: KubernetesConfig, roles: Iterable[Role]) -> dict[str, list[str]]:
    """Return the names for which the certificate of each Secret must be; {} without certificates.

    Args:
        run: the name of the run.
        roles: the roles that the run has.
    """
    if not settings.tls_secret:
        return {}
    secrets: dict[str, list[str]] = {}
    for role in SERVERS:
        if role in roles:
            name = f"*.{_domain(object_name(run), role, settings.namespace)}"
            secrets.setdefault(_tls_secret_of(role, settings), []).append(name)
    return secrets


def as_yaml(objects: Sequence[Mapping[str, Any]]) -> str:
    """Return objects as the documents of one YAML stream."""
    return yaml.safe_dump_all(objects, sort_keys=False, explicit_start=True, width=100)


def object_name(run: str) -> str:
    """Return the name of a run as names of Kubernetes are formed: lower-case letters, digits and dashes."""
    name = re.sub(r"[^a-z0-9]+", "-", run.lower())[:_LONGEST_NAME].strip("-")
    return name if name[:1].isalpha() else f"run-{name}".strip("-")


class _Pods:
    """Makes the objects of one run, which share labels, volumes and variables."""

    def __init__(self, name: str, run: Run, settings: KubernetesConfig) -> None:
        self._name = name
        self._run = run
        self._settings = settings
        self._labels = {
            "app.kubernetes.io/name": "areal-agents",
            "app.kubernetes.io/instance": name,
        }

    def object(self, version: str, kind: str, name: str, *, role: str = "", **rest: Any) -> dict[str, Any]:
        metadata: dict[str, Any] = {"name": name, "labels": self._labels_of(role)}
        if self._settings.namespace:
            metadata["namespace"] = self._settings.namespace
        return {"apiVersion": version, "kind": kind, "metadata": metadata, **rest}

    def claim(self) -> dict[str, Any]:
        settings = self._settings
        spec: dict[str, Any] = {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": settings.storage}},
        }
        if settings.storage_class:
            spec["storageClassName"] = settings.storage_class
        return self.object("v1", "PersistentVolumeClaim", f"{self._name}-runs", spec=spec)

    def network_policies(self, has_sandboxes: bool) -> list[dict[str, Any]]:
        """Only pods of the run reach pods of the run; what these reach is not limited.

        Sandbox pods are an exception: only rollout pods reach them, and they reach the proxies, the store and
        name resolution only.
        """
        if not has_sandboxes:
            run = {"matchLabels": self._labels}
            return [self._policy("", run, [{"from": [_pods(run)]}])]
        others = {
            "matchLabels": self._labels,
            "matchExpressions": [{"key": _COMPONENT, "operator": "NotIn", "values": ["sandbox"]}],
        }
        http = [{"protocol": "TCP", "port": PORT}]
        proxy, rollout, sandbox = (
            {"matchLabels": self._labels_of(role)} for role in ("proxy", "rollout", "sandbox")
        )
        store = [{"protocol": "TCP", "port": host_of(self._run.store_url)[1]}]
        names = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
        return [
            self._policy("", others, [{"from": [_pods(others)]}]),
            self._policy("-proxy", proxy, [{"from": [_pods(sandbox)], "ports": http}]),
            self._policy(
                "-sandbox",
                sandbox,
                [{"from": [_pods(rollout)], "ports": http}],
                egress=[{"to": [_pods(proxy)], "ports": http}, {"ports": store}, {"ports": names}],
            ),
        ]

    def policy_of_jobs(self) -> dict[str, Any]:
        """Return the policy that lets the pods of the agent's Jobs reach the proxies.

        It restricts nothing else about these pods, whose manifest is the user's.
        """
        jobs = {"matchExpressions": [{"key": OWNER_OF_JOBS, "operator": "Exists"}]}
        http = [{"protocol": "TCP", "port": PORT}]
        proxy = {"matchLabels": self._labels_of("proxy")}
        return self._policy("-jobs", proxy, [{"from": [_pods(jobs)], "ports": http}])

    def _policy(
        self,
        suffix: str,
        selector: Mapping[str, Any],
        ingress: list[dict[str, Any]],
        *,
        egress: list[dict[str, Any]] | None = None,
    ) -> dict[str, Any]:
        spec: dict[str, Any] = {
            "podSelector": dict(selector),
            "policyTypes": ["Ingress", *(["Egress"] if egress is not None else [])],
            "ingress": ingress,
        }
        if egress is not None:
            spec["egress"] = egress
        return self.object("networking.k8s.io/v1", "NetworkPolicy", f"{self._name}{suffix}", spec=spec)

    def headless_service(self, role: Role) -> dict[str, Any]:
        spec = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": self._labels_of(role),
            "ports": [{"name": self._scheme_of(role), "port": PORT}],
        }
        return self.object("v1", "Service", f"{self._name}-{role}", role=role, spec=spec)

    def disruption_budget(self, role: Role) -> dict[str, Any]:
        spec = {"maxUnavailable": 1, "selector": {"matchLabels": self._labels_of(role)}}
        return self.object("policy/v1", "PodDisruptionBudget", f"{self._name}-{role}", role=role, spec=spec)

    def supervisor(self) -> dict[str, Any]:
        project = self._settings.project.rstrip("/")
        command = [
            *("areal-agents", "train", f"{project}/{CONFIG}", "--launcher", "external"),
            *self._run.overrides,
            *(f"name={self._run.name}", f"run_dir={RUNS}/{self._name}"),
            *(f"cluster.tls.{name}={path}" for name, path in MOUNTED_TLS if self._settings.tls_secret),
        ]
        pod = self._pod("supervisor", command, cpus=1)
        pod["containers"][0]["volumeMounts"].append(
            {"name": "config", "mountPath": f"{project}/{CONFIG}", "subPath": CONFIG, "readOnly": True}
        )
        pod["volumes"].append({"name": "config", "configMap": {"name": f"{self._name}-config"}})
        return self.object(
            "batch/v1",
            "Job",
            f"{self._name}-supervisor",
            role="supervisor",
            spec={"backoffLimit": _RESTARTS, "template": self._template("supervisor", pod)},
        )

    def stateful_set(self, role: Role, processes: Sequence[RoleProcess]) -> dict[str, Any]:
        labels = self._labels_of(role)
        index = "metadata.labels['apps.kubernetes.io/pod-index']"
        pod = self._role_pod(role, processes[0], index)
        get: dict[str, Any] = {"path": "/health", "port": PORT}
        probe = {"httpGet": {**get, "scheme": "HTTPS"} if self._settings.tls_secret else get}
        pod["containers"][0].update(
            startupProbe={**probe, "periodSeconds": 10, "failureThreshold": _START_S // 10},
            readinessProbe={**probe, "periodSeconds": 5, "timeoutSeconds": 5},
            livenessProbe={**probe, "periodSeconds": 20, "timeoutSeconds": 20, "failureThreshold": 6},
        )
        spec = {
            "serviceName": f"{self._name}-{role}",
            "replicas": len(processes),
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels},
            "template": self._template(role, pod),
        }
        return self.object("apps/v1", "StatefulSet", f"{self._name}-{role}", role=role, spec=spec)

    def job(self, role: Role, processes: Sequence[RoleProcess]) -> dict[str, Any]:
        index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        pod = {**self._role_pod(role, processes[0], index), "subdomain": f"{self._name}-{role}"}
        spec = {
            "completionMode": "Indexed",
            "completions": len(processes),
            "parallelism": len(processes),
            "backoffLimit": _RESTARTS * len(processes),
            "template": self._template(role, pod),
        }
        return self.object("batch/v1", "Job", f"{self._name}-{role}", role=role, spec=spec)

    def _role_pod(self, role: Role, process: RoleProcess, index: str) -> dict[str, Any]:
        fields = {"INDEX": index, "POD_IP": "status.podIP"}
        host = "$(POD_IP)"
        if self._scheme_of(role) == "https":  # names are known before there are pods, addresses are not
            fields = {"INDEX": index, "POD_NAME": "metadata.name"}
            host = f"$(POD_NAME).{_domain(self._name, role, self._settings.namespace)}"
        command = [
            *("areal-agents", "role", role, "--run", self._run.store_url, "--index", "$(INDEX)"),
            *("--host", host, "--port", str(PORT)),
        ]
        pod = self._pod(role, command, cpus=process.cpus, gpus=process.gpus)
        pod["containers"][0]["env"] += [
            {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()
        ]
        return pod

    def _pod(self, role: str, command: list[str], *, cpus: int, gpus: int = 0) -> dict[str, Any]:
        settings = self._settings
        amounts: dict[str, Any] = {"cpu": str(cpus), "memory": getattr(settings.memory, role)}
        if gpus:
            amounts[settings.gpu_resource] = str(gpus)
        is_sandbox = role == "sandbox"
        claims = {} if is_sandbox else {RUNS: settings.claim or f"{self._name}-runs", **settings.volumes}
        volumes = [
            {"name": f"claim-{i}", "persistentVolumeClaim": {"claimName": claim}}
            for i, claim in enumerate(claims.values())
        ]
        mounts: list[dict[str, Any]] = [
            {"name": f"claim-{i}", "mountPath": path, **({"readOnly": True} if i else {})}
            for i, path in enumerate(claims)
        ]
        if role in ("engine", "trainer"):  # NCCL and data loaders share memory; a container has 64 MB
            volumes.append(
                {"name": "shared", "emptyDir": {"medium": "Memory", "sizeLimit": settings.memory.shared}}
            )
            mounts.append({"name": "shared", "mountPath": "/dev/shm"})
        if is_sandbox:
            volumes.append({"name": "files", "emptyDir": {"sizeLimit": settings.sandbox_disk}})
            mounts.append({"name": "files", "mountPath": "/tmp"})
        if settings.tls_secret:
            volumes.append({"name": "tls", "projected": self._certificate(role)})
            mounts.append({"name": "tls", "mountPath": _TLS, "readOnly": True})
        threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
        variables = {
            **{name: str(cpus) for name in threads},
            **({} if is_sandbox else {"HF_HOME": f"{RUNS}/huggingface"}),
            "HOME": "/tmp",
            "TOKENIZERS_PARALLELISM": "false",
            **(agent_variables() if role == "rollout" else {}),
        }
        container: dict[str, Any] = {
            "name": role,
            "image": (settings.sandbox_image if is_sandbox else "") or settings.image,
            "command": command,
            "workingDir": "/tmp" if is_sandbox else settings.project,
            "env": [{"name": name, "value": value} for name, value in variables.items()],
            "resources": {"requests": amounts, "limits": amounts},
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                **({"readOnlyRootFilesystem": True} if is_sandbox else {}),
            },
            "volumeMounts": mounts,
        }
        if role in SERVERS or role == "trainer":
            container["ports"] = [{"name": self._scheme_of(role), "containerPort": PORT}]
        if settings.secret and is_sandbox:
            for key in (STORE_PASSWORD, RUN_TOKEN):
                entry = {"name": settings.secret, "key": key, "optional": True}
                container["env"].append({"name": key, "valueFrom": {"secretKeyRef": entry}})
        elif settings.secret:
            container["envFrom"] = [{"secretRef": {"name": settings.secret}}]
        stop_s = self._run.trainer_stop_s if role == "trainer" else _STOP_S[role]
        pod: dict[str, Any] = {
            "restartPolicy": "Always" if role in SERVERS else "OnFailure",
            "terminationGracePeriodSeconds": round(stop_s + DEAD_AFTER_S),
            "automountServiceAccountToken": role == "rollout" and self._run.creates_jobs,
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": settings.user,
                "runAsGroup": settings.user,
                "fsGroup": settings.user,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": volumes,
        }
        if settings.service_account:
            pod["serviceAccountName"] = settings.service_account
        if settings.pull_secret:
            pod["imagePullSecrets"] = [{"name": settings.pull_secret}]
        if gpus and settings.node_selector:
            pod["nodeSelector"] = dict(settings.node_selector)
        if gpus and settings.tolerations:
            pod["tolerations"] = [dict(toleration) for toleration in settings.tolerations]
        return pod

    def _certificate(self, role: str) -> dict[str, Any]:
        """Return a projected volume with the authority and, for a server, its own certificate."""
        entries = [(self._settings.tls_secret, ["ca.crt"])]
        if role in SERVERS:
            entries.append((_tls_secret_of(role, self._settings), ["tls.crt", "tls.key"]))
        sources = [
            {"secret": {"name": name, "items": [{"key": file, "path": file} for file in files]}}
            for name, files in entries
        ]
        return {"defaultMode": 0o440, "sources": sources}

    def _scheme_of(self, role: str) -> str:
        return "https" if self._settings.tls_secret and role in SERVERS else "http"

    def _template(self, role: str, pod: Mapping[str, Any]) -> dict[str, Any]:
        return {"metadata": {"labels": self._labels_of(role)}, "spec": dict(pod)}

    def _labels_of(self, role: str) -> dict[str, str]:
        return {**self._labels, **({_COMPONENT: role} if role else {})}


def _tls_secret_of(role: str, settings: KubernetesConfig) -> str:
    """Return the Secret with the certificate of the pods of a role that serves."""
    return settings.sandbox_tls_secret if role == "sandbox" else settings.tls_secret


def _domain(name: str, role: str, namespace: str) -> str:
    """Return what follows the name of a pod of a role in its DNS name.

    The domain of the cluster is left out: the resolver of every pod appends it.
    """
    return f"{name}-{role}.{namespace}.svc"


def _pods(selector: Mapping[str, Any]) -> dict[str, Any]:
    return {"podSelector": dict(selector)}
