"""The manifests of a sandbox as a Kubernetes Job, for a cluster that something else talks to.

A Job runs one command in one pod that is never restarted. Its network policy permits connections to the pods
of the proxy and nothing else, not even name resolution, so that the base URL must have the address of the
proxy's service. Keys come from a Secret, which only the agent's Job names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal_agents.errors import SandboxError
from areal_agents.sandbox.sandbox import SandboxSpec

WORKDIR, HOME = "/workspace", "/home/agent"


@dataclass(frozen=True, slots=True)
class ProxyPods:
    """The pods of the proxy: their labels, and the port on which they listen."""

    labels: Mapping[str, str]
    port: int


def job_manifests(
    spec: SandboxSpec,
    argv: Sequence[str],
    *,
    name: str,
    timeout_s: float,
    proxy: ProxyPods | None,
    secret: str = "",
) -> list[dict[str, Any]]:
    """Return the network policy and the Job of one command, in the order in which they are created.

    Args:
        spec: its image has the working folder, because a cluster cannot copy a folder of this machine.
        argv: the command.
        name: of the Job and the policy; unique in its namespace.
        timeout_s: time in seconds after which the pod is killed.
        proxy: the pods that the command may call; None, for graders: none.
        secret: the name of a Secret whose entries become variables, for agents only.

    Raises:
        SandboxError: a Job cannot do what `spec` asks for.
    """
    if not spec.image:
        raise SandboxError("a Kubernetes Job needs image, the name of an image")
    if spec.folder is not None or spec.readable:
        raise SandboxError(
            "a Kubernetes Job sees no folder of this machine; put workdir and readable into the image"
        )
    if secret and proxy is None:
        raise SandboxError("a grader, which has no proxy, gets no secret")
    labels = {"app.kubernetes.io/managed-by": "areal-agents", "areal-agents/sandbox": name}
    return [_policy(name, labels, proxy), _job(spec, argv, name, labels, timeout_s, secret)]


def _policy(name: str, labels: Mapping[str, str], proxy: ProxyPods | None) -> dict[str, Any]:
    to_proxy = [] if proxy is None else [
        {
            "to": [{"podSelector": {"matchLabels": dict(proxy.labels)}}],
            "ports": [{"protocol": "TCP", "port": proxy.port}],
        }
    ]  # fmt: skip
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name, "labels": dict(labels)},
        "spec": {
            "podSelector": {"matchLabels": {"areal-agents/sandbox": name}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [],
            "egress": to_proxy,
        },
    }


def _job(
    spec: SandboxSpec,
    argv: Sequence[str],
    name: str,
    labels: Mapping[str, str],
    timeout_s: float,
    secret: str,
) -> dict[str, Any]:
    limits = spec.limits
    amounts: dict[str, str] = {}
    if limits.memory_mb is not None:
        amounts["memory"] = f"{limits.memory_mb}Mi"
    if limits.cpus is not None:
        amounts["cpu"] = f"{round(limits.cpus * 1000)}m"
    if limits.disk_mb is not None:
        amounts["ephemeral-storage"] = f"{limits.disk_mb}Mi"
    size = {} if limits.disk_mb is None else {"sizeLimit": f"{limits.disk_mb}Mi"}
    workdir = spec.workdir or WORKDIR
    # An empty volume over a folder of the image would hide what the image has there.
    folders = dict.fromkeys((*(() if spec.workdir else (workdir,)), "/tmp", HOME, *spec.writable))
    volumes = [(f"folder-{number}", path) for number, path in enumerate(folders)]
    variables = {"HOME": HOME, "LANG": "C.UTF-8", **spec.environment}
    container: dict[str, Any] = {
        "name": "sandbox",
        "image": spec.image,
        "command": list(argv),
        "workingDir": workdir,
        "env": [{"name": key, "value": value} for key, value in variables.items()],
        "resources": {"limits": amounts, "requests": amounts},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": volume, "mountPath": path} for volume, path in volumes],
    }
    if secret:
        container["envFrom"] = [{"secretRef": {"name": secret}}]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": dict(labels)},
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": max(1, round(timeout_s)),
            "ttlSecondsAfterFinished": 600,
            "template": {
                "metadata": {"labels": dict(labels)},
                "spec": {
                    "restartPolicy": "Never",
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "securityContext": {
                        "runAsNonRoot": spec.user != 0,
                        "runAsUser": spec.user,
                        "runAsGroup": spec.user,
                        "fsGroup": spec.user,
                        "seccompProfile": {"type": "RuntimeDefault"},
                    },
                    "containers": [container],
                    "volumes": [{"name": volume, "emptyDir": dict(size)} for volume, _ in volumes],
                },
            },
        },
    }
