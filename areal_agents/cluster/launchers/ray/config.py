"""Settings of the launcher for Ray."""

from __future__ import annotations

from pydantic import Field

from areal_agents.core.settings import Settings


class RayConfig(Settings):
    """The Ray cluster that the processes of a run are placed on."""

    address: str = Field(
        default="",
        pattern=r"^([^:/\s]+:\d+)?$",
        description="HOST:PORT of the head node. Empty: RAY_ADDRESS, or the cluster of this machine. "
        "areal-agents train runs on a node of the cluster.",
    )
    wait_s: float = Field(
        default=600.0,
        gt=0,
        description="Longest wait in seconds for a node with the GPUs and cores that a process needs.",
    )
