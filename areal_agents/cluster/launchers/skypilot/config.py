"""Settings of a run by SkyPilot."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from areal_agents.core.settings import Settings


class SkyPilotConfig(Settings):
    """The task that `areal-agents train --launcher skypilot` makes."""

    nodes: int | None = Field(
        default=None, ge=1, description="Number of nodes; absent: as many as engines and trainer need GPUs."
    )
    accelerator: str = Field(
        default="", description="GPU of the nodes, such as H100, of which each has cluster.gpus_per_node."
    )
    resources: dict[str, Any] = Field(
        default_factory=dict,
        description="Further resources in the form of SkyPilot, such as {infra: aws, use_spot: true}.",
    )
    runs: str = Field(
        default="/runs",
        pattern=r"^/",
        description="The folder of runs, which all nodes share: a volume, or a mount of file_mounts.",
    )
    volumes: dict[str, str] = Field(
        default_factory=dict, description="Volumes of SkyPilot by the folder at which nodes have them."
    )
    file_mounts: dict[str, Any] = Field(
        default_factory=dict, description="Files and buckets for the nodes, in the form of SkyPilot."
    )
    setup: str = Field(
        default="pip install 'areal-agents[train,postgres]'",
        description="What installs the package on a node. There is no release yet: name a checkout that "
        "workdir or file_mounts bring there.",
    )
    secrets: tuple[str, ...] = Field(
        default=(),
        description="Names of variables such as PGPASSWORD, whose values sky launch --secret NAME gives.",
    )
