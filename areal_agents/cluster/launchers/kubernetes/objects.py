"""What the objects of a run on Kubernetes share: the run, its names and labels, and how they are written."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from areal_agents.cluster.launchers.base import RoleProcess

PORT = 8000  # of each engine, proxy and trainer; every pod has an address of its own
COMPONENT = "app.kubernetes.io/component"  # the label with the role of a pod
_LONGEST_NAME = 40  # leaves room for role, index and Kubernetes' own suffixes in 63 characters
_DIGEST = 8  # characters that tell long names apart


@dataclass(frozen=True, slots=True)
class Run:
    """What the manifests of a run are made from, beside the settings of Kubernetes.

    Attributes:
        name: of the run; the objects are named after it.
        config: the text of the configuration file.
        overrides: `key=value` arguments of the command line.
        store_url: without a password.
        trainer_stop_s: longest time in seconds that the trainer takes to end.
        processes: every process of the run but the supervisor.
        creates_jobs: whether rollout processes create a Job for each episode.
        jobs_namespace: the namespace that the manifest of these Jobs names; "": that of the run.
    """

    name: str
    config: str
    overrides: tuple[str, ...]
    store_url: str
    trainer_stop_s: float
    processes: Sequence[RoleProcess]
    creates_jobs: bool = False
    jobs_namespace: str = ""


class RunObjects:
    """Makes objects with the names, the labels and the namespace of one run.

    Attributes:
        name: how the names of all objects begin.
        labels: those of all objects.
    """

    def __init__(self, run: str, namespace: str) -> None:
        """Args:
        run: the name of the run.
        namespace: "": that of the context of kubectl.
        """
        self.name = object_name(run)
        self.labels = {"app.kubernetes.io/name": "areal-agents", "app.kubernetes.io/instance": self.name}
        self._namespace = namespace

    def make(
        self, api_version: str, kind: str, suffix: str, *, role: str = "", **rest: Any
    ) -> dict[str, Any]:
        """Return an object.

        Args:
            suffix: what its name has after that of the run.
            role: the one that it belongs to; "": none.
            rest: its fields beside its metadata.
        """
        metadata: dict[str, Any] = {"name": f"{self.name}{suffix}", "labels": self.labels_of(role)}
        if self._namespace:
            metadata["namespace"] = self._namespace
        return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **rest}

    def labels_of(self, role: str) -> dict[str, str]:
        """Return the labels of the objects of a role; "": of those that have none."""
        return {**self.labels, **({COMPONENT: role} if role else {})}


def object_name(run: str) -> str:
    """Return the name of a run as names of Kubernetes are formed: lower-case letters, digits and dashes."""
    name = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")
    if len(name) > _LONGEST_NAME:  # names of runs often differ at their ends only
        digest = hashlib.sha256(run.encode()).hexdigest()[:_DIGEST]
        name = f"{name[: _LONGEST_NAME - _DIGEST - 1].strip('-')}-{digest}"
    return name if name[:1].isalpha() else f"run-{name}".strip("-")


def as_yaml(objects: Sequence[Mapping[str, Any]]) -> str:
    """Return objects as the documents of one YAML stream."""
    return yaml.safe_dump_all(objects, sort_keys=False, explicit_start=True, width=100)
