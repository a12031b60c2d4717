"""What each turn of an episode has earned, and what it is compared with.

Return and baseline must be functions of the same quantity: the return of a turn holds everything that the
turn can have caused, and the baseline is the mean of the very same quantity over the group. Otherwise the
expected gradient shrinks or changes its sign (docs/credit.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Protocol

import numpy as np
from pydantic import Field, model_validator

from areal_agents.algorithms.credit.anchors import TurnAnchor
from areal_agents.algorithms.credit.rewards import EpisodeRewards, Floats
from areal_agents.algorithms.parts import Part

_DISCOUNT = "Discount γ of rewards of later turns, per level of depth."


class Returns(Protocol):
    """A return that is a function of an episode and of k, the turns recorded when a turn's call began."""

    def after(self, rewards: EpisodeRewards, before: Sequence[int]) -> Floats:
        """[n] the return of an episode from its first k turns on, for each k in `before`, [n]."""
        ...


class EpisodeCredit(Part):
    """Every turn has earned the score of its episode: the sum of all its rewards, each once.

    Source: the outcome reward of GRPO, arXiv 2402.03300, section 4.1.2.
    """

    kind: Literal["episode"] = "episode"

    def after(self, rewards: EpisodeRewards, before: Sequence[int]) -> Floats:
        return np.full(len(before), rewards.score)


class RewardToGo(Part):
    """A turn has earned the rewards that were given for it and for what was recorded after its call began."""

    kind: Literal["reward_to_go"] = "reward_to_go"
    turn_discount: float = Field(default=1.0, ge=0, le=1, description=_DISCOUNT)

    def after(self, rewards: EpisodeRewards, before: Sequence[int]) -> Floats:
        return rewards_to_go(rewards, before, turn_discount=self.turn_discount)


def rewards_to_go(rewards: EpisodeRewards, before: Sequence[int], *, turn_discount: float) -> Floats:
    """D(k) for each k in `before` [n]: what an episode still earned after its first k turns, [n].

        D(k) = R + Σ_{u ≥ k} γ^max(0, depth(u) − depth(k)) · r_u

    over the turns in recording order without the first k, where depth(k) is 1 + the greatest depth among the
    first k turns, a turn's own depth is depth at its own k, R is the episode's reward and γ the discount. An
    episode with no more than k turns has earned R.

    Source: the policy gradient theorem with reward to go (Sutton et al. 2000), on a
    forest of turns, where "later" means "recorded after the call began".
    """
    depths = rewards.depths
    greatest = np.concatenate([[0], np.maximum.accumulate(depths)]) if len(depths) else np.zeros(1, np.int64)
    out = np.empty(len(before))
    for place, k in enumerate(before):
        k = min(k, len(depths))
        exponents = np.maximum(depths[k:] - (1 + greatest[k]), 0)
        out[place] = rewards.episode + float((turn_discount**exponents * rewards.turns[k:]).sum())
    return out


class StepNormalized(Part):
    """A turn has earned the normalised rewards of the steps that end at it or later: `step_advantages`."""

    kind: Literal["step_normalized"] = "step_normalized"


class TurnGroups(Part):
    """A turn has the advantage of its episode plus its own among the turns sampled in the same situation.

    See `turn_groups.turn_group_advantages`.
    """

    kind: Literal["turn_groups"] = "turn_groups"
    turn_group_by: TurnAnchor = Field(
        default="observation",
        description="Turns of a group are compared that have the same observation (messages after the last "
        "reply), prompt (token ids), label, or position (in recording order).",
    )
    turn_return: Literal["reward_to_go", "own"] = Field(
        default="reward_to_go",
        description="What turns are compared by: their own reward and what came after, or their own only.",
    )
    turn_discount: float = Field(default=1.0, ge=0, le=1, description=_DISCOUNT)
    turn_weight: float = Field(
        default=1.0, gt=0, description="Weight ω of a turn's advantage in its step group."
    )
    episode_return: Literal["score", "outcome"] = Field(
        default="score",
        description="What episodes are compared by: the sum of all rewards, or the episode reward only.",
    )

    @model_validator(mode="after")
    def _check(self) -> TurnGroups:
        if self.turn_return == "own" and self.turn_discount != 1:
            raise ValueError(
                f"turn_discount: {self.turn_discount} has no meaning for turn_return: own, which counts no "
                "later reward; it needs turn_return: reward_to_go"
            )
        return self

    @property
    def keeps_bias(self) -> bool:
        """Whether a constant added to every episode reward changes advantages: it does where the episode
        reward is discounted by a distance that differs within a step group."""
        return self.turn_return == "reward_to_go" and self.turn_discount < 1


Credit = Annotated[EpisodeCredit | RewardToGo | StepNormalized | TurnGroups, Field(discriminator="kind")]
