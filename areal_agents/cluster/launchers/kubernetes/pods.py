"""The pods of a run: what runs in them, and what they have of the run and of the machine.

A pod has no secret in its manifest: it gets those of the run as variables from the Secret that the
configuration names. Sandbox pods run the programs of agents: they have no folder of the run, and of its
Secret what a process needs to take part in it.
"""

from __future__ import annotations

from typing import Any

from areal_agents.cluster.launchers.base import RoleProcess
from areal_agents.cluster.launchers.kubernetes.certificates import (
    MOUNTED_TLS,
    TLS_FOLDER,
    domain,
    projected_certificate,
    scheme_of,
)
from areal_agents.cluster.launchers.kubernetes.config import KubernetesConfig
from areal_agents.cluster.launchers.kubernetes.objects import PORT, Run, RunObjects
from areal_agents.rollout.agent_variables import agent_variables
from areal_agents.secret_variables import RUN_TOKEN, STORE_PASSWORD
from areal_agents.store.roles import DEAD_AFTER_S, SERVERS, Role

RUNS = "/runs"  # where pods see the folders of runs
CONFIG = "cluster-run.yaml"  # the configuration, in the folder of the project
_STOP_S = {"supervisor": 60, "engine": 40, "proxy": 40, "rollout": 60, "sandbox": 60}


class Pods:
    """Makes the pods of one run."""

    def __init__(self, objects: RunObjects, run: Run, settings: KubernetesConfig) -> None:
        self._objects = objects
        self._run = run
        self._settings = settings

    def supervisor(self) -> dict[str, Any]:
        """Return the pod of the supervisor, which has the configuration in the folder of the project."""
        project = self._settings.project.rstrip("/")
        command = [
            *("areal-agents", "train", f"{project}/{CONFIG}", "--launcher", "external"),
            *self._run.overrides,
            *(f"name={self._run.name}", f"run_dir={RUNS}/{self._objects.name}"),
            *(f"cluster.tls.{name}={path}" for name, path in MOUNTED_TLS if self._settings.tls_secret),
        ]
        pod = self._pod("supervisor", [_literal(part) for part in command], cpus=1)
        pod["containers"][0]["volumeMounts"].append(
            {"name": "config", "mountPath": f"{project}/{CONFIG}", "subPath": CONFIG, "readOnly": True}
        )
        pod["volumes"].append({"name": "config", "configMap": {"name": f"{self._objects.name}-config"}})
        return pod

    def of_role(self, role: Role, process: RoleProcess, index: str) -> dict[str, Any]:
        """Return the pod of a process of a role.

        Args:
            process: any process of the role; all of them need the same resources.
            index: the field of the pod with the index of its process.
        """
        fields = {"INDEX": index, "POD_IP": "status.podIP"}
        host = "$(POD_IP)"
        if scheme_of(role, self._settings) == "https":  # the certificate is for names
            fields = {"INDEX": index, "POD_NAME": "metadata.name"}
            host = f"$(POD_NAME).{domain(self._objects.name, role, self._settings.namespace)}"
        command = [
            *("areal-agents", "role", role, "--run", _literal(self._run.store_url), "--index", "$(INDEX)"),
            *("--host", host, "--port", str(PORT)),
        ]
        pod = self._pod(role, command, cpus=process.cpus, gpus=process.gpus)
        pod["containers"][0]["env"] += [
            {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()
        ]
        return pod

    def _pod(self, role: str, command: list[str], *, cpus: int, gpus: int = 0) -> dict[str, Any]:
        settings = self._settings
        volumes, mounts = self._volumes(role)
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
            "containers": [self._container(role, command, mounts, cpus=cpus, gpus=gpus)],
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

    def _volumes(self, role: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the volumes of a pod, and where its container sees them."""
        settings = self._settings
        runs = settings.claim or f"{self._objects.name}-runs"
        claims = {} if role == "sandbox" else {RUNS: runs, **settings.volumes}
        volumes: list[dict[str, Any]] = [
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
        if role == "sandbox":
            volumes.append({"name": "files", "emptyDir": {"sizeLimit": settings.sandbox_disk}})
            mounts.append({"name": "files", "mountPath": "/tmp"})
        if settings.tls_secret:
            volumes.append({"name": "tls", "projected": projected_certificate(role, settings)})
            mounts.append({"name": "tls", "mountPath": TLS_FOLDER, "readOnly": True})
        return volumes, mounts

    def _container(
        self, role: str, command: list[str], mounts: list[dict[str, Any]], *, cpus: int, gpus: int
    ) -> dict[str, Any]:
        settings = self._settings
        is_sandbox = role == "sandbox"
        amounts: dict[str, Any] = {"cpu": str(cpus), "memory": getattr(settings.memory, role)}
        if gpus:
            amounts[settings.gpu_resource] = str(gpus)
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
            container["ports"] = [{"name": scheme_of(role, settings), "containerPort": PORT}]
        if settings.secret and is_sandbox:
            for key in (STORE_PASSWORD, RUN_TOKEN):
                entry = {"name": settings.secret, "key": key, "optional": True}
                container["env"].append({"name": key, "valueFrom": {"secretKeyRef": entry}})
        elif settings.secret:
            container["envFrom"] = [{"secretRef": {"name": settings.secret}}]
        return container


def _literal(word: str) -> str:
    """Return a word of a command in which Kubernetes finds no variable."""
    return word.replace("$", "$$")
