"""The section `cluster` of a configuration: how many processes of each role run, and where."""

from __future__ import annotations

from pydantic import Field

from areal_agents.cluster.launchers.kubernetes.config import KubernetesConfig
from areal_agents.cluster.launchers.ray.config import RayConfig
from areal_agents.cluster.launchers.skypilot.config import SkyPilotConfig
from areal_agents.cluster.launchers.slurm.config import SlurmConfig
from areal_agents.core.settings import Settings
from areal_agents.tls import TlsConfig


class RoleCpus(Settings):
    """The number of cores of one process of each role, which is also its number of threads."""

    engine: int = Field(default=8, ge=1, description="Cores of an engine.")
    proxy: int = Field(default=2, ge=1, description="Cores of a proxy.")
    trainer: int = Field(default=8, ge=1, description="Cores of the trainer's process on one machine.")
    rollout: int = Field(default=4, ge=1, description="Cores of a rollout process, with its agents.")
    sandbox: int = Field(default=4, ge=1, description="Cores of a sandbox process, with its sandboxes.")


class ClusterConfig(Settings):
    """A run on several machines, as `areal-agents train --launcher` starts it.

    The engines are engine.replicas, and the machines of the trainer trainer.nodes.
    """

    proxies: int = Field(
        default=1, ge=1, le=64, description="Number of proxies, each a process on any machine."
    )
    rollouts: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Number of rollout processes, which share the groups and run the agents.",
    )
    sandboxes: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="Number of sandbox processes, on whose machines the programs of an agent with an "
        "isolation run; 0: they run on those of the rollout processes. docs/sandboxes.md.",
    )
    sandbox_places: int = Field(
        default=16, ge=1, description="The most sandboxes of one sandbox process at the same time."
    )
    gpus_per_node: int = Field(default=8, ge=0, le=16, description="GPUs of each machine; 0: there are none.")
    cpus: RoleCpus = Field(default_factory=RoleCpus)
    tls: TlsConfig | None = Field(
        default=None,
        description="Proxies, engines and sandbox hosts serve HTTPS, and are verified; null: they serve "
        "HTTP.",
    )
    kubernetes: KubernetesConfig = Field(default_factory=KubernetesConfig)
    ray: RayConfig = Field(default_factory=RayConfig)
    skypilot: SkyPilotConfig = Field(default_factory=SkyPilotConfig)
    slurm: SlurmConfig = Field(default_factory=SlurmConfig)
