"""Settings of a run on Kubernetes."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from areal_agents.core.settings import Settings

_QUANTITY = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$"


class RoleMemory(Settings):
    """The memory of one pod of each role, which is both its request and its limit."""

    supervisor: str = Field(default="4Gi", pattern=_QUANTITY, description="Memory of the supervisor.")
    engine: str = Field(default="64Gi", pattern=_QUANTITY, description="Memory of an engine.")
    proxy: str = Field(default="8Gi", pattern=_QUANTITY, description="Memory of a proxy.")
    trainer: str = Field(
        default="128Gi", pattern=_QUANTITY, description="Memory of the trainer on one machine."
    )
    rollout: str = Field(
        default="16Gi", pattern=_QUANTITY, description="Memory of a rollout process, with its agents."
    )
    sandbox: str = Field(
        default="16Gi", pattern=_QUANTITY, description="Memory of a sandbox process, with its sandboxes."
    )
    shared: str = Field(
        default="16Gi", pattern=_QUANTITY, description="/dev/shm of an engine or trainer, part of its memory."
    )


class KubernetesConfig(Settings):
    """The manifests that `areal-agents train --launcher kubernetes` makes."""

    image: str = Field(
        default="",
        description="The image of all pods, with this package (extras train and postgres) and the project.",
    )
    sandbox_image: str = Field(
        default="",
        description="The image of sandbox pods, with this package (extras proxy and postgres) and the "
        "programs of the agent; empty: that of all pods.",
    )
    sandbox_disk: str = Field(
        default="20Gi", pattern=_QUANTITY, description="What the sandboxes of a pod may write together."
    )
    project: str = Field(
        default="/workspace",
        pattern=r"^/",
        description="The folder of the image with what the folder of the configuration has: agents, data.",
    )
    namespace: str = Field(default="", description="The namespace; empty: that of the context of kubectl.")
    secret: str = Field(
        default="",
        description="A Secret of the namespace whose entries become variables of all pods, such as "
        "PGPASSWORD and HF_TOKEN. Manifests contain no secrets.",
    )
    tls_secret: str = Field(
        default="",
        description="A Secret (tls.crt, tls.key and ca.crt, as cert-manager makes them) with the certificate "
        "of engine and proxy pods; they serve HTTPS. --dry-run says for which names; empty: HTTP.",
    )
    sandbox_tls_secret: str = Field(
        default="",
        description="The same for sandbox pods, whose programs can read it: another Secret, from the same "
        "authority. Its ca.crt is not used.",
    )
    claim: str = Field(
        default="",
        description="A PersistentVolumeClaim (ReadWriteMany) for the folders of runs; empty: one is made.",
    )
    storage: str = Field(default="500Gi", pattern=_QUANTITY, description="Size of the claim that is made.")
    storage_class: str = Field(
        default="", description="Its storage class, which must be ReadWriteMany; empty: that of the cluster."
    )
    volumes: dict[str, str] = Field(
        default_factory=dict,
        description="Further claims, by the folder at which pods see them read-only: {/models: models}.",
    )
    gpu_resource: str = Field(default="nvidia.com/gpu", description="The name of the GPUs as a resource.")
    node_selector: dict[str, str] = Field(
        default_factory=dict, description="Labels of the nodes on which pods with GPUs run."
    )
    tolerations: tuple[dict[str, str], ...] = Field(
        default=(), description="Taints that pods with GPUs tolerate, in the form of Kubernetes."
    )
    pull_secret: str = Field(
        default="", description="The Secret with which the image is pulled; empty: none."
    )
    service_account: str = Field(
        default="",
        description="Service account of the pods; empty: the default. Only rollout pods that create Jobs for "
        "the agent (agent.job) have its token.",
    )
    user: int = Field(default=1000, ge=1, description="User and group of all processes, and of the volumes.")
    memory: RoleMemory = Field(default_factory=RoleMemory)

    @model_validator(mode="after")
    def _check_certificates(self) -> Self:
        if self.tls_secret and not self.namespace:
            raise ValueError(
                "tls_secret needs namespace, which is part of the names that the certificate must have"
            )
        if self.sandbox_tls_secret and not self.tls_secret:
            raise ValueError(
                "sandbox_tls_secret needs tls_secret, with the certificate of engines and proxies"
            )
        if self.sandbox_tls_secret and self.sandbox_tls_secret == self.tls_secret:
            raise ValueError(
                f"tls_secret and sandbox_tls_secret are both {self.tls_secret}: the programs in sandboxes "
                "can read the second one, and must not have the key of engines and proxies; use two Secrets"
            )
        return self
