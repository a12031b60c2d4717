"""The return of each turn of an episode, and the settings of the kinds of credit.

The return of a turn contains every reward that the turn can have caused, and the baseline must be the mean of
the same quantity over the group. Otherwise the expected gradient shrinks or changes its sign; see
docs/credit.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal, Protocol

import numpy as np
from pydantic import Field

from areal_agents.algorithms.credit.anchors import TurnAnchor
from areal_agents.algorithms.credit.rewards import EpisodeRewards, Floats
from areal_agents.algorithms.parts import Part

_DISCOUNT = "Discount γ of rewards of later turns, per level of depth."


class Returns(Protocol):
    """A return that is a function of an episode and of k, the turns recorded when a turn's call began."""

    def after(self, rewards: EpisodeRewards, before: Sequence[int]) -> Floats:
        """Return [n], the return of an episode after its first k turns, for each k in `before` [n]."""
        ...


class EpisodeCredit(Part):
    """The return of every turn is the score of its episode: the sum of all its rewards, each once.

    Source: the outcome reward of GRPO, arXiv 2402.03300, section 4.1.2.
    """

    kind: Literal["episode"] = "episode"

    def after(self, rewards: EpisodeRewards, before: Sequence[int]) -> Floats:
        return np.full(len(before), rewards.score)


class RewardToGo(Part):
    """The return of a turn is the sum of its rewards and of those of turns recorded after its call began."""

    kind: Literal["reward_to_go"] = "reward_to_go"
    turn_discount: float = Field(default=1.0, ge=0, le=1, description=_DISCOUNT)

    def after(self, rewards: EpisodeRewards, before: Sequence[int]) -> Floats:
        return rewards_to_go(rewards, before, turn_discount=self.turn_discount)


def rewards_to_go(rewards: EpisodeRewards, before: Sequence[int], *, turn_discount: float) -> Floats:
    """Return D(k) [n] for each k in `before` [n]: the return of an episode after its first k turns.

        D(k) = R + Σ_{u ≥ k} γ^max(0, depth(u) − depth(k)) · r_u

    over the turns in recording order without the first k, where depth(k) is 1 + the greatest depth among the
    first k turns, a turn's own depth is depth at its own k, R is the episode's reward and γ the discount. For
    an episode with at most k turns, D(k) is R.

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
    """The return of a turn is the sum of the normalised rewards of the steps that end at this turn or later.

    See `advantages.step_advantages`.
    """

    kind: Literal["step_normalized"] = "step_normalized"


class OwnReturn(Part):
    """Turns are compared by their own rewards: R_t = r_t."""

    kind: Literal["own"] = "own"

    def of_turns(self, rewards: EpisodeRewards) -> Floats:
        """[T] the return of each turn of an episode."""
        return rewards.turns


class ReturnToGo(Part):
    """Turns are compared by their own and later rewards; the episode reward belongs to the last turn."""

    kind: Literal["reward_to_go"] = "reward_to_go"
    turn_discount: float = Field(default=1.0, ge=0, le=1, description=_DISCOUNT)

    def of_turns(self, rewards: EpisodeRewards) -> Floats:
        """[T] the return of each turn of an episode."""
        if not len(rewards.turns):
            return rewards.turns
        with_last = rewards.turns.copy()
        with_last[-1] += rewards.episode
        return rewards_to_go(
            replace(rewards, turns=with_last, episode=0.0),
            rewards.recorded_before,
            turn_discount=self.turn_discount,
        )


TurnReturn = Annotated[ReturnToGo | OwnReturn, Field(discriminator="kind")]


class TurnGroups(Part):
    """The advantage of a turn is the advantage of its episode plus its own advantage among turns sampled in
    the same situation.

    See `turn_groups.turn_group_advantages`.
    """

    kind: Literal["turn_groups"] = "turn_groups"
    turn_group_by: TurnAnchor = Field(
        default="observation",
        description="Turns of a group are compared that have the same observation (messages after the last "
        "reply), prompt (token ids), label, or position (in recording order).",
    )
    turn_return: TurnReturn = Field(
        default_factory=ReturnToGo,
        description="The rewards by which turns are compared: their own and later ones, or only their own.",
    )
    turn_weight: float = Field(
        default=1.0, gt=0, description="Weight ω of a turn's advantage in its step group."
    )
    episode_return: Literal["score", "outcome"] = Field(
        default="score",
        description="The rewards by which episodes are compared: the sum of all rewards, or only the "
        "episode reward.",
    )

    @property
    def keeps_bias(self) -> bool:
        """Whether a constant added to every episode reward changes advantages.

        It changes them if the episode reward is discounted by a distance that differs within a step group.
        """
        return isinstance(self.turn_return, ReturnToGo) and self.turn_return.turn_discount < 1


Credit = Annotated[EpisodeCredit | RewardToGo | StepNormalized | TurnGroups, Field(discriminator="kind")]
