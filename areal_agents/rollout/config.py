"""What a user may say about tasks, episodes and evaluations."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class LimitsConfig(BaseModel):
    """Limits that the policy may run into; an episode that does is truncated, not failed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_turns: int | None = Field(default=None, ge=1, description="Model calls per episode.")
    max_tokens: int | None = Field(
        default=None, ge=1, description="Sampled tokens per episode, over all its calls."
    )
    max_completion_tokens: int | None = Field(default=None, ge=1, description="Sampled tokens of one call.")
    time_s: float = Field(default=600.0, gt=0, description="Wall-clock time of an episode, in seconds.")


class RolloutConfig(BaseModel):
    """How training episodes are collected."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    groups: int = Field(default=8, ge=1, description="Groups in a training batch.")
    group_size: int = Field(default=8, ge=1, description="Episodes of one task in a group.")
    max_staleness: int = Field(
        default=1, ge=0, description="η: how many versions behind the trainer a token may be; 0 is on-policy."
    )
    concurrency: int = Field(default=64, ge=1, description="Training episodes that run at the same time.")
    workers: int = Field(
        default=8, ge=1, description="Processes for a synchronous agent; each runs one episode at a time."
    )
    retries: int = Field(
        default=2, ge=0, description="New attempts after a failed one, before its group is dropped."
    )
    give_up_after: int = Field(
        default=128, ge=1, description="Failed attempts in a row, over all tasks, that end the run."
    )
    limits: LimitsConfig = Field(default_factory=LimitsConfig)


class DataConfig(BaseModel):
    """Where tasks come from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str = Field(
        description="A .jsonl, .json, .parquet or .csv file, a data set of the hub, or a function: "
        "module:function or file.py:function."
    )
    subset: str | None = Field(default=None, description="Configuration of a data set of the hub.")
    split: str | None = Field(default=None, description="Split; default: train of a data set of the hub.")
    id: str = Field(default="id", description="Column with a unique id; rows are numbered without it.")
    seed: int | None = Field(
        default=None, description="Seed of the order; default: the seed of the run. Evaluation: 0."
    )
    epochs: int | None = Field(
        default=None, ge=1, description="Passes over the tasks; default: as many as the run needs."
    )


class EvalConfig(BaseModel):
    """Evaluation on held-out tasks: before, during and after training."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data: DataConfig
    episodes: int = Field(default=128, ge=1, description="Tasks, one episode each; fewer if the data ends.")
    every: int | None = Field(
        default=None, ge=1, description="Also evaluate every so many steps, beside training."
    )
    concurrency: int = Field(default=16, ge=1, description="Episodes at the same time, beside training.")
    temperature: float = Field(default=0.0, ge=0, description="Sampling temperature; 0 is greedy.")
