"""The estimators of advantages that `algorithm.estimator` chooses among, with their settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from areal_agents.algorithms.credit.advantages import (
    Comparison,
    NormLevel,
    StdEstimator,
    compare,
    step_advantages,
)
from areal_agents.algorithms.credit.returns import Credit, EpisodeCredit, StepNormalized
from areal_agents.algorithms.credit.rewards import EpisodeRewards, Floats
from areal_agents.algorithms.parts import Part

GaeLevel = Literal["token", "turn"]

_MEAN = "Where the subtracted mean is taken."
_STD = "Where the dividing deviation is taken."
_STD_ESTIMATOR = "sample divides by n - 1 (as torch.std does), population by n."


class GroupEstimator(Part):
    """A return less the mean of the returns of the other episodes of the task."""

    kind: Literal["group"] = "group"
    credit: Credit = Field(
        default_factory=EpisodeCredit,
        description="What a turn has earned: episode (the whole score), reward_to_go, or step_normalized.",
    )
    advantage_mean: NormLevel = Field(default="group", description=_MEAN)
    advantage_std: NormLevel = Field(default="group", description=_STD)
    std_estimator: StdEstimator = Field(default="sample", description=_STD_ESTIMATOR)
    leave_one_out: bool = Field(
        default=False, description="The subtracted mean is over the other episodes only (RLOO)."
    )
    advantage_statistics: Literal["episode", "token"] = Field(
        default="episode",
        description="Mean and deviation are over episodes, each once; or over trained tokens (REINFORCE++).",
    )

    @model_validator(mode="after")
    def _check(self) -> GroupEstimator:
        by_steps = isinstance(self.credit, StepNormalized)
        if self.leave_one_out and self.advantage_mean == "none":
            raise ValueError("leave_one_out: True needs an advantage_mean to leave an episode out of")
        if self.leave_one_out and by_steps:
            raise ValueError(
                "leave_one_out: True has no meaning for credit: step_normalized, whose mean is over steps"
            )
        if self.advantage_statistics == "token" and (self.leave_one_out or by_steps):
            raise ValueError(
                "advantage_statistics: token takes mean and deviation over tokens; it goes with neither "
                "leave_one_out nor credit: step_normalized"
            )
        if self.advantage_statistics == "token" and self.advantage_mean == self.advantage_std == "none":
            raise ValueError("advantage_statistics: token needs an advantage_mean or an advantage_std")
        if self.std_estimator != "sample" and self.advantage_std == "none":
            raise ValueError(f"std_estimator: {self.std_estimator} needs an advantage_std")
        return self

    def turn_advantages(self, groups: Sequence[Sequence[EpisodeRewards]]) -> list[list[Floats]]:
        """Per group and episode an array [T] of the advantages of its turns, in recording order."""
        if isinstance(self.credit, StepNormalized):
            return step_advantages(
                groups, mean=self.advantage_mean, std=self.advantage_std, std_estimator=self.std_estimator
            )
        return [comparison.advantages() for comparison in self.compare(groups)]

    def compare(
        self,
        groups: Sequence[Sequence[EpisodeRewards]],
        *,
        reductions: Sequence[Sequence[float]] | None = None,
    ) -> list[Comparison]:
        """See `advantages.compare`; not for credit: step_normalized."""
        assert not isinstance(self.credit, StepNormalized)
        return compare(
            groups,
            self.credit,
            mean=self.advantage_mean,
            std=self.advantage_std,
            std_estimator=self.std_estimator,
            leave_one_out=self.leave_one_out,
            reductions=reductions,
        )


class GaeEstimator(Part):
    """Generalised advantage estimation with a critic of its own."""

    kind: Literal["gae"] = "gae"
    gae_lambda: float = Field(default=1.0, ge=0, le=1, description="λ of GAE.")
    gae_discount: float = Field(default=1.0, ge=0, le=1, description="γ of GAE, per token or per turn.")
    gae_level: GaeLevel = Field(default="token", description="Whether a step of GAE is a token or a turn.")
    advantage_mean: NormLevel = Field(default="batch", description=_MEAN)
    advantage_std: NormLevel = Field(default="batch", description=_STD)
    std_estimator: StdEstimator = Field(default="sample", description=_STD_ESTIMATOR)
    value_clip: float | None = Field(
        default=None, gt=0, description="Values move at most this far from the old ones in the value loss."
    )
    value_coefficient: float = Field(default=1.0, gt=0, description="Weight of the value loss.")

    @model_validator(mode="after")
    def _check(self) -> GaeEstimator:
        if self.std_estimator != "sample" and self.advantage_std == "none":
            raise ValueError(f"std_estimator: {self.std_estimator} needs an advantage_std")
        return self


class NoEstimator(Part):
    """No advantages: the loss has targets of its own."""

    kind: Literal["none"] = "none"


Estimator = Annotated[GroupEstimator | GaeEstimator | NoEstimator, Field(discriminator="kind")]
