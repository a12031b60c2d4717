"""The advantage estimators that `algorithm.estimator` chooses among, with their settings."""

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
from areal_agents.algorithms.credit.gdpo import gdpo_advantages, refuse_unweighted
from areal_agents.algorithms.credit.maxrl import maxrl_advantages, refuse_negative_scores
from areal_agents.algorithms.credit.returns import (
    Credit,
    EpisodeCredit,
    RewardToGo,
    StepNormalized,
    TurnGroups,
)
from areal_agents.algorithms.credit.rewards import EpisodeRewards, Floats
from areal_agents.algorithms.credit.turn_groups import turn_group_advantages
from areal_agents.algorithms.parts import Part
from areal_agents.errors import TrainingError

GaeLevel = Literal["token", "turn"]

_MEAN = "The episodes over which the subtracted mean is computed: group, batch, or none."
_STD = "The episodes over which the dividing standard deviation is computed: group, batch, or none."
_STD_ESTIMATOR = "sample divides by n - 1 (as torch.std does), population by n."


class GroupEstimator(Part):
    """The return of a turn minus the mean return of the episodes of its group (GRPO, RLOO)."""

    kind: Literal["group"] = "group"
    credit: Credit = Field(
        default_factory=EpisodeCredit,
        description="The return of a turn: episode (the whole score), reward_to_go, step_normalized, or "
        "turn_groups (compared with turns in the same situation).",
    )
    advantage_mean: NormLevel = Field(default="group", description=_MEAN)
    advantage_std: NormLevel = Field(default="group", description=_STD)
    std_estimator: StdEstimator = Field(default="sample", description=_STD_ESTIMATOR)
    leave_one_out: bool = Field(
        default=False, description="The subtracted mean is over the other episodes only (RLOO)."
    )
    advantage_statistics: Literal["episode", "token"] = Field(
        default="episode",
        description="Mean and std are over episodes, each once; or over trained tokens (REINFORCE++).",
    )

    @model_validator(mode="after")
    def _check(self) -> GroupEstimator:
        by_steps = isinstance(self.credit, StepNormalized)
        if isinstance(self.credit, TurnGroups):
            self._check_turn_groups()
        if self.leave_one_out and self.advantage_mean == "none":
            raise ValueError("leave_one_out: true needs an advantage_mean to leave an episode out of")
        if self.leave_one_out and by_steps:
            raise ValueError(
                "leave_one_out: true has no meaning for credit: step_normalized, whose mean is over steps; "
                "set leave_one_out: false where the preset sets it"
            )
        if self.advantage_statistics == "token" and (self.leave_one_out or by_steps):
            raise ValueError(
                "advantage_statistics: token computes mean and std over tokens; it can be combined with "
                "neither "
                "leave_one_out nor credit: step_normalized"
            )
        if self.advantage_statistics == "token" and self.advantage_mean == self.advantage_std == "none":
            raise ValueError("advantage_statistics: token needs an advantage_mean or an advantage_std")
        if self.std_estimator != "sample" and self.advantage_std == "none":
            raise ValueError(f"std_estimator: {self.std_estimator} needs an advantage_std")
        return self

    def _check_turn_groups(self) -> None:
        if self.leave_one_out:
            raise ValueError(
                "leave_one_out: true cannot be combined with credit: turn_groups, where a turn is compared "
                "with a step group that may contain nothing else"
            )
        if self.advantage_statistics == "token":
            raise ValueError(
                "advantage_statistics: token cannot be combined with credit: turn_groups, whose statistics "
                "are over "
                "the episodes of a group and the turns of a step group"
            )
        if self.advantage_mean == "none":
            raise ValueError(
                "advantage_mean: none cannot be combined with credit: turn_groups, which compares turns "
                "with the "
                "mean of their step group; use group or batch"
            )

    def check(self, group: Sequence[EpisodeRewards]) -> None:
        """Raise TrainingError if this estimator cannot use the rewards of a group."""
        if self.leave_one_out and len(group) < 2:
            raise TrainingError(
                f"group {group[0].group_id} has one episode, but leave_one_out needs another to compare it "
                "with; raise rollout.group_size"
            )

    def turn_advantages(self, groups: Sequence[Sequence[EpisodeRewards]]) -> list[list[Floats]]:
        """Per group and episode an array [T] of the advantages of its turns, in recording order."""
        if isinstance(self.credit, TurnGroups):
            return turn_group_advantages(
                groups,
                self.credit,
                mean=self.advantage_mean,
                std=self.advantage_std,
                std_estimator=self.std_estimator,
            )
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
        """See `advantages.compare`; for credit: episode and reward_to_go."""
        assert isinstance(self.credit, EpisodeCredit | RewardToGo)
        return compare(
            groups,
            self.credit,
            mean=self.advantage_mean,
            std=self.advantage_std,
            std_estimator=self.std_estimator,
            leave_one_out=self.leave_one_out,
            reductions=reductions,
        )


class MaxRlEstimator(Part):
    """The score minus the group's mean, divided by the mean: maximum likelihood of success (MaxRL)."""

    kind: Literal["maxrl"] = "maxrl"

    def check(self, group: Sequence[EpisodeRewards]) -> None:
        """See `GroupEstimator.check`."""
        refuse_negative_scores(group)

    def turn_advantages(self, groups: Sequence[Sequence[EpisodeRewards]]) -> list[list[Floats]]:
        """See `maxrl.maxrl_advantages`."""
        return maxrl_advantages(groups)


class GdpoEstimator(Part):
    """Rewards of several names, each normalised separately within the group, then summed (GDPO)."""

    kind: Literal["gdpo"] = "gdpo"
    reward_weights: dict[str, float] = Field(
        default_factory=dict,
        description="Weight of each reward name; absent: 1 each. If given, every name needs one.",
    )
    normalize_batch: bool = Field(
        default=True, description="The weighted sums are normalised over the episodes of the batch."
    )
    std_estimator: StdEstimator = Field(default="sample", description=_STD_ESTIMATOR)

    @model_validator(mode="after")
    def _check(self) -> GdpoEstimator:
        if self.reward_weights and not any(self.reward_weights.values()):
            raise ValueError(
                "reward_weights must contain a weight other than 0, because otherwise nothing "
                "would be trained"
            )
        return self

    def check(self, group: Sequence[EpisodeRewards]) -> None:
        """See `GroupEstimator.check`."""
        refuse_unweighted([group], self.reward_weights)

    def turn_advantages(self, groups: Sequence[Sequence[EpisodeRewards]]) -> list[list[Floats]]:
        """See `gdpo.gdpo_advantages`."""
        return gdpo_advantages(
            groups,
            weights=self.reward_weights,
            normalize_batch=self.normalize_batch,
            std_estimator=self.std_estimator,
        )


class GaeEstimator(Part):
    """Generalised advantage estimation with a learned critic."""

    kind: Literal["gae"] = "gae"
    gae_lambda: float = Field(default=1.0, ge=0, le=1, description="λ of GAE.")
    gae_discount: float = Field(default=1.0, ge=0, le=1, description="γ of GAE, per token or per turn.")
    gae_level: GaeLevel = Field(default="token", description="Whether a step of GAE is a token or a turn.")
    advantage_mean: NormLevel = Field(default="batch", description=_MEAN)
    advantage_std: NormLevel = Field(default="batch", description=_STD)
    std_estimator: StdEstimator = Field(default="sample", description=_STD_ESTIMATOR)
    value_clip: float | None = Field(
        default=None,
        gt=0,
        description="In the value loss, values are clipped to within this distance of the old ones.",
    )
    value_coefficient: float = Field(default=1.0, gt=0, description="Weight of the value loss.")

    @model_validator(mode="after")
    def _check(self) -> GaeEstimator:
        if self.std_estimator != "sample" and self.advantage_std == "none":
            raise ValueError(f"std_estimator: {self.std_estimator} needs an advantage_std")
        return self


class NoEstimator(Part):
    """No advantages are computed: the loss has its own targets."""

    kind: Literal["none"] = "none"


# the estimators that compare episodes of a group
WithinGroups = GroupEstimator | MaxRlEstimator | GdpoEstimator
Estimator = Annotated[
    GroupEstimator | MaxRlEstimator | GdpoEstimator | GaeEstimator | NoEstimator, Field(discriminator="kind")
]
