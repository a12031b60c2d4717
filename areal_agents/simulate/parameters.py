"""Parameters of a simulated cluster, and the scenario that follows from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from areal_agents.config import with_overrides
from areal_agents.errors import ConfigError
from areal_agents.simulate.engine import StepTime
from areal_agents.simulate.scenario import Scenario
from areal_agents.simulate.work import LogNormal, LogNormalWork, Work

FILLING = 2  # how many times the gate is filled before steps are counted
COUNTED = 20
UNBOUNDED_FILLING = 12


class Distribution(BaseModel):
    """A log-normal distribution; sigma 0 is a constant."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mean: float = Field(ge=0, description="Mean before the cap.")
    sigma: float = Field(default=0.0, ge=0, description="Standard deviation of the logarithm.")
    cap: float | None = Field(default=None, gt=0, description="Largest value; larger ones are cut to it.")

    def log_normal(self) -> LogNormal:
        """Return the distribution to sample from."""
        return LogNormal(self.mean, self.sigma, math.inf if self.cap is None else self.cap)


class Parameters(BaseModel):
    """A cluster and a run on it; times are in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: Distribution = Field(
        default=Distribution(mean=1024, sigma=1.0, cap=8192), description="Sampled tokens per model call."
    )
    turns: int = Field(default=1, ge=1, description="Model calls per episode.")
    tool_s: Distribution = Field(default=Distribution(mean=0), description="Seconds between two model calls.")
    groups: int = Field(default=64, ge=1, description="Groups in a batch.")
    group_size: int = Field(default=16, ge=1, description="Episodes in a group.")
    max_staleness: int | None = Field(default=4, ge=0, description="η of the gate; null: no bound.")
    concurrency: int | None = Field(
        default=None, ge=1, description="Episodes at the same time; null: engines × slots."
    )
    engines: int = Field(default=1, ge=1, description="Replicas of the engine.")
    gpus_per_engine: int = Field(default=1, ge=1, description="GPUs per replica.")
    slots: int = Field(default=256, ge=1, description="Requests that one replica runs at the same time.")
    base_s: float = Field(default=0.004, ge=0, description="Seconds per decoding step of one replica.")
    per_request_s: float = Field(
        default=5e-5, ge=0, description="Further seconds per decoding step and running request."
    )
    call_s: float = Field(default=0.0, ge=0, description="Seconds per model call besides its tokens.")
    trainers: int = Field(
        default=1, ge=1, description="GPUs that train; trainer_s and trainer_s_per_token are for this number."
    )
    trainer_s: float = Field(default=0.0, ge=0, description="Seconds per step, for any batch size.")
    trainer_s_per_token: float = Field(
        default=3.8e-5, ge=0, description="Further seconds per step and sampled token."
    )
    publish_s: float = Field(
        default=0.0, ge=0, description="Seconds that the trainer takes to publish after each step."
    )
    pause_s: float = Field(default=0.0, ge=0, description="Seconds that the engines pause for a swap.")
    recompute_s_per_token: float = Field(
        default=0.0,
        ge=0,
        description="Seconds per token of its running requests that an engine recomputes after a swap.",
    )
    interruptible: bool = Field(default=True, description="False: a swap waits for the running requests.")
    seed: int = Field(default=0, ge=0, description="Seed of the random lengths and times.")

    @model_validator(mode="after")
    def _check(self) -> Parameters:
        if self.base_s + self.per_request_s <= 0:
            raise ValueError("base_s and per_request_s are both 0; one of them must be above 0")
        return self

    def work(self) -> LogNormalWork:
        """Return the distribution of the episodes."""
        return LogNormalWork(self.tokens.log_normal(), self.turns, self.tool_s.log_normal())

    def scenario(self, work: Work | None = None) -> Scenario:
        """Return a scenario that is long enough for a steady state; `work` replaces the random episodes."""
        bound = self.max_staleness
        warm_up = UNBOUNDED_FILLING if bound is None else FILLING * (bound + 1)
        return Scenario(
            work=work or self.work(),
            groups=self.groups,
            group_size=self.group_size,
            max_staleness=bound,
            concurrency=self.concurrency or self.engines * self.slots,
            step_time=StepTime(self.base_s, self.per_request_s),
            engines=self.engines,
            slots=self.slots,
            call_s=self.call_s,
            trainer_s=self.trainer_s,
            trainer_s_per_token=self.trainer_s_per_token,
            publish_s=self.publish_s,
            pause_s=self.pause_s,
            recompute_s_per_token=self.recompute_s_per_token,
            interruptible=self.interruptible,
            steps=warm_up + COUNTED,
            warm_up=warm_up,
            seed=self.seed,
        )


def read_parameters(overrides: Iterable[str], given: Mapping[str, Any] | None = None) -> Parameters:
    """Return the `given` parameters with `key=value` overrides. Raises ConfigError for an invalid one."""
    overrides = [*overrides]
    for override in overrides:
        if override.startswith("gpus="):
            raise ConfigError(f"unknown key 'gpus'; give the number of GPUs as --gpus {override[5:]}")
    return with_overrides(Parameters, given or {}, overrides)
