"""The setting `agent.job`: the agent of each episode is a job of a cluster."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from areal_agents.core.settings import Settings


class JobConfig(Settings):
    """The job as which the command of each episode runs; docs/clusters.md."""

    kind: Literal["slurm", "kubernetes"] = Field(
        description="slurm: a batch job, through sbatch. kubernetes: a Job, through kubectl."
    )
    template: str = Field(
        min_length=1,
        description="The user's batch script or Job manifest, with places such as {{command}} for what "
        "differs between episodes.",
    )
    wait_s: float = Field(
        default=1800.0,
        gt=0,
        description="Longest time in seconds that a job waits for its start; then it is cancelled, its "
        "episode is aborted, and a new job plays it. The time limit of the episode begins with the start.",
    )
    poll_s: float = Field(
        default=5.0,
        gt=0,
        description="Seconds between two queries for the states of all jobs of a rollout process.",
    )

    @model_validator(mode="after")
    def _sees_starts(self) -> Self:
        if self.poll_s >= self.wait_s:
            raise ValueError(
                f"poll_s ({self.poll_s:g}) must be less than wait_s ({self.wait_s:g}): the start of a job is "
                "seen by a query only"
            )
        return self
