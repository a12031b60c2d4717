"""The configuration of a run: one frozen tree, composed of the configs that the rooms define."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.config.between_parts import LOOP_STALENESS, faults_between_parts
from areal_agents.inference.config import EngineConfig
from areal_agents.proxy.config import ProxyConfig
from areal_agents.rollout.config import DataConfig, EvalConfig, RolloutConfig
from areal_agents.store.config import StoreConfig
from areal_agents.training.config import TrainerConfig


class Config(BaseModel):
    """Everything that one run needs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(default="", description="Name of the run; empty: the config file's folder.")
    seed: int = Field(default=0, ge=0, description="Seed of data order, sampling and training.")
    run_dir: str = Field(default="", description="Folder of the run; empty: runs/<name>-seed<seed>.")
    model: str = Field(description="Hugging Face folder of the initial weights.")
    agent: str | dict[str, str] = Field(
        default="",
        description="module:function, file.py:function, or {command: ...}; not needed with data.episodes.",
    )
    ablation: str | None = Field(
        default=None, description="The same agent with its tools switched off; run by --ablate-tool."
    )
    loop: Literal["sync", "one_step_off", "async"] = Field(
        default="async",
        description="sync: a batch is generated, then trained (max_staleness 0). one_step_off: the next one "
        "is generated meanwhile, weights swap in between (1). async: neither waits (rollout.max_staleness).",
    )
    data: DataConfig = Field(description="Training tasks.")
    eval: EvalConfig | None = Field(default=None, description="Held-out evaluation; absent: none.")
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    proxy: ProxyConfig = Field(default_factory=ProxyConfig)
    store: StoreConfig = Field(default_factory=StoreConfig)

    @model_validator(mode="before")
    @classmethod
    def _fill_staleness(cls, given: Any) -> Any:
        """The loop's bound, where `rollout` has none."""
        if not isinstance(given, Mapping) or given.get("loop") not in tuple(LOOP_STALENESS):
            return given
        rollout = given.get("rollout", {})
        if not isinstance(rollout, Mapping) or "max_staleness" in rollout:
            return given
        return {**given, "rollout": {**rollout, "max_staleness": LOOP_STALENESS[given["loop"]]}}

    @model_validator(mode="after")
    def _check(self) -> Config:
        if not (Path(self.model) / "config.json").is_file():
            raise ValueError(
                f"model: {self.model} is not a Hugging Face model folder (no config.json in it); "
                "give the path of a downloaded model"
            )
        if faults := [*faults_between_parts(self)]:
            raise ValueError("\n  ".join(faults))
        return self
