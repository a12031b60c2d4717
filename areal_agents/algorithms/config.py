"""The algorithm's settings. Each is one part of the method; none implies another."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

NormLevel = Literal["group", "batch", "none"]
StdEstimator = Literal["sample", "population"]


class AlgorithmConfig(BaseModel):
    """Decoupled PPO with group-relative advantages; the defaults are GRPO's normalisation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    clip_low: float = Field(default=0.2, gt=0, lt=1, description="The ratio is clipped at 1 - clip_low.")
    clip_high: float = Field(default=0.2, gt=0, description="The ratio is clipped at 1 + clip_high.")
    weight_cap: float = Field(default=5.0, gt=0, description="Upper bound of the weight proximal/behavior.")
    minibatches: int = Field(default=1, ge=1, description="Optimizer steps per batch.")
    advantage_mean: NormLevel = Field(default="group", description="Where the subtracted mean is taken.")
    advantage_std: NormLevel = Field(default="group", description="Where the dividing deviation is taken.")
    std_estimator: StdEstimator = Field(
        default="sample", description="sample divides by n - 1 (as torch.std does), population by n."
    )
    drop_equal_groups: bool = Field(
        default=True, description="Leave out groups whose episodes all have one score."
    )
    turn_discount: float = Field(
        default=1.0, ge=0, le=1, description="Discount of rewards of later turns along a branch."
    )
    train_constrained: bool = Field(
        default=False, description="Train turns drawn under a grammar or with a sampling pin lifted."
    )
    exclude_labels: tuple[str, ...] = Field(
        default=(),
        description="Turns with these labels are credited, not trained; sub-agent/* means every sub-agent.",
    )
