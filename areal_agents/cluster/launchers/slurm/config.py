"""Settings of the Slurm job of a run."""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field, field_validator

from areal_agents.core.settings import Settings

# Of sbatch: minutes[:seconds], hours:minutes:seconds, days-hours[:minutes[:seconds]]
_TIME_LIMIT = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)


class SlurmConfig(Settings):
    """The batch job that `areal-agents train --launcher slurm` submits. An empty string: Slurm's default."""

    partition: str = Field(default="", description="Partition of the job.")
    account: str = Field(default="", description="Account that the job is charged to.")
    qos: str = Field(default="", description="Quality of service of the job.")
    constraint: str = Field(default="", description="Features that the nodes must have, such as `h100`.")
    time: str = Field(
        default="",
        description='Time limit as sbatch takes it, in quotes: "12:00:00" or "1-12:00:00". A run that is '
        "longer ends with a checkpoint before it, and the job is requeued.",
    )
    nodes: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Number of nodes. Default: as many as the GPUs of engines and trainer need, and 1 "
        "without GPUs. With one more, a run goes on after the loss of a node without waiting in the queue.",
    )
    exclusive: bool = Field(
        default=True,
        description="Whether the job has its nodes alone, with all cores and all memory; otherwise give what "
        "it needs in `extra`, such as `--cpus-per-task=32` and `--mem=200G`, which are per node.",
    )
    requeue: bool = Field(
        default=True,
        description="Whether the job is queued again when its time limit, or the loss of a node, ends it.",
    )
    notice_s: int = Field(
        default=600,
        ge=60,
        le=65_535,
        description="Time in seconds before the time limit at which the run ends with a checkpoint.",
    )
    step_wait_s: int = Field(
        default=60,
        ge=1,
        description="Longest time in seconds that a process waits for free GPUs in the allocation.",
    )
    setup: tuple[str, ...] = Field(
        default=(), description="Lines of bash before the run, such as `module load cuda`."
    )
    extra: tuple[str, ...] = Field(
        default=(), description="Further options of sbatch, such as `--gpus-per-node=h100:8`; they win."
    )

    @field_validator("time", mode="before")
    @classmethod
    def _in_quotes(cls, value: Any) -> Any:
        if isinstance(value, int):
            raise ValueError(
                f'YAML read it as the number {value}; write it in quotes, as "12:00:00" (on the command line '
                "'\"12:00:00\"')"
            )
        return value

    @field_validator("time")
    @classmethod
    def _is_time_limit(cls, value: str) -> str:
        if value and not _TIME_LIMIT.fullmatch(value):
            raise ValueError(
                f'sbatch does not take {value!r}; write minutes, such as "90", hours, such as '
                '"12:00:00", or days, such as "1-12:00:00"'
            )
        return value
