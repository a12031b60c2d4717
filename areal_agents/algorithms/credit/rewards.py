"""Assigns the rewards of an episode to its turns, in recording order, and shapes them as the settings say.

Each part of the shaping changes rewards only if it is set, so without shaping the rewards of an episode sum
to its score.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from areal_agents.algorithms.credit.anchors import Anchor, TurnAnchor, turn_anchors
from areal_agents.algorithms.parts import Part
from areal_agents.core.rollout import RecordedEpisode

Floats = npt.NDArray[np.float64]

LENGTH_PENALTY = "length_penalty"  # the name of the length penalty among the rewards of an episode


class NoLengthPenalty(Part):
    """No length penalty."""

    kind: Literal["none"] = "none"


class LinearLengthPenalty(Part):
    """A penalty that grows linearly with the length of a reply (`length_penalty: linear`)."""

    kind: Literal["linear"] = "linear"
    overlong_limit: int = Field(
        ge=1, description="Sampled tokens of an episode at which the penalty is full."
    )
    overlong_buffer: int = Field(
        ge=1, description="The penalty grows linearly over this many tokens before the limit."
    )
    overlong_factor: float = Field(default=1.0, gt=0, description="The full length penalty.")

    @model_validator(mode="after")
    def _check(self) -> LinearLengthPenalty:
        if self.overlong_buffer > self.overlong_limit:
            raise ValueError(
                f"overlong_limit: {self.overlong_limit} needs an overlong_buffer from 1 to the limit, got "
                f"{self.overlong_buffer}"
            )
        return self


class RewardShaping(Part):
    """How recorded rewards are shaped before training."""

    reward_scale: float = Field(default=1.0, gt=0, description="Every reward is multiplied by it.")
    reward_bias: float = Field(default=0.0, description="Added to the episode reward before scaling.")
    reward_clip: float | None = Field(
        default=None, gt=0, description="Scaled rewards are clipped to ± this; absent: not clipped."
    )
    length_penalty: Annotated[NoLengthPenalty | LinearLengthPenalty, Field(discriminator="kind")] = Field(
        default_factory=NoLengthPenalty, description="none, or linear (DAPO's penalty on long episodes)."
    )

    @property
    def rewards_every_episode(self) -> bool:
        """Whether the shaping adds an episode reward to episodes that have none."""
        return self.reward_bias != 0 or not isinstance(self.length_penalty, NoLengthPenalty)


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeRewards:
    """The shaped rewards of an episode of T turns.

    Attributes:
        group_id: the group whose baseline the episode shares.
        turns: [T] each turn's own reward, in recording order; the reward of a branch belongs to its last
            turn.
        episode: the episode's own reward; 0 if there is none.
        recorded_before: per turn, how many turns of the episode were recorded when its call began.
        rewarded: [T] bool, whether a turn has its own reward.
        has_episode_reward: whether the episode has a reward of its own.
        by_name: the sum of the recorded rewards of each name, not shaped; a length penalty is included under
            the name "length_penalty".
        anchors: [T] the anchor of each turn (`anchors.turn_anchors`); empty unless requested.
    """

    group_id: str
    turns: Floats
    episode: float
    recorded_before: tuple[int, ...]
    rewarded: npt.NDArray[np.bool_]
    has_episode_reward: bool
    by_name: Mapping[str, float] = field(default_factory=dict)
    anchors: tuple[Anchor, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.turns) == len(self.recorded_before) == len(self.rewarded):
            raise ValueError(
                "turns, rewarded and recorded_before must have one entry per turn, got "
                f"{len(self.turns)}, {len(self.rewarded)} and {len(self.recorded_before)}"
            )
        if not all(0 <= before <= place for place, before in enumerate(self.recorded_before)):
            raise ValueError(
                "recorded_before must be from 0 to the number of earlier turns for each turn, got "
                f"{self.recorded_before}"
            )

    @property
    def score(self) -> float:
        """The sum of all rewards, each counted once. It is rounded only once, so the order of recording does
        not change it."""
        return math.fsum([*self.turns.tolist(), self.episode])

    @property
    def depths(self) -> npt.NDArray[np.int64]:
        """[T] 1 + the greatest depth among the turns that were recorded when the turn's call began."""
        depths = np.zeros(len(self.turns), np.int64)
        greatest = np.zeros(len(self.turns) + 1, np.int64)  # among the first k turns
        for place, before in enumerate(self.recorded_before):
            depths[place] = 1 + greatest[before]
            greatest[place + 1] = max(greatest[place], depths[place])
        return depths


def episode_rewards(
    episode: RecordedEpisode, *, group_id: str, shaping: RewardShaping, anchor: TurnAnchor | None = None
) -> EpisodeRewards:
    """The shaped rewards of an episode.

    Let R be the sum of the episode rewards, r_t the sum of the rewards of turn t, s the scale, b the bias and
    c the clip:

        r_t ← clip(s · r_t, −c, c)        R ← clip(s · (R + b), −c, c) + length penalty

    The bias is added once per episode, so that an episode does not gain by having many turns. A turn that was
    recorded by an earlier release, without the time when its call began, counts as begun when its parent was
    recorded.

    Args:
        anchor: the kind of anchor by which turns are compared; None leaves the anchors empty.
    """
    index = {turn.id: place for place, turn in enumerate(episode.turns)}
    turns, whole = np.zeros(len(index)), 0.0
    rewarded = np.zeros(len(index), bool)
    by_name: dict[str, float] = {}
    for reward in episode.rewards:
        by_name[reward.name] = by_name.get(reward.name, 0.0) + reward.value
        if reward.scope == "episode":
            whole += reward.value
        else:
            turns[index[reward.target]] += reward.value
            rewarded[index[reward.target]] = True
    limit = np.inf if shaping.reward_clip is None else shaping.reward_clip
    turns = np.clip(shaping.reward_scale * turns, -limit, limit)
    whole = float(np.clip(shaping.reward_scale * (whole + shaping.reward_bias), -limit, limit))
    if not isinstance(shaping.length_penalty, NoLengthPenalty):
        penalty = length_penalty(episode, shaping)
        whole += penalty
        by_name[LENGTH_PENALTY] = by_name.get(LENGTH_PENALTY, 0.0) + penalty
    before = tuple(
        turn.recorded_before
        if turn.recorded_before is not None
        else 0 if turn.parent is None else index[turn.parent] + 1
        for turn in episode.turns
    )  # fmt: skip
    return EpisodeRewards(
        group_id,
        turns,
        whole,
        before,
        rewarded=rewarded,
        has_episode_reward=shaping.rewards_every_episode
        or any(reward.scope == "episode" for reward in episode.rewards),
        by_name=by_name,
        anchors=() if anchor is None else turn_anchors(episode, anchor),
    )


def length_penalty(episode: RecordedEpisode, shaping: RewardShaping) -> float:
    """The length penalty of an episode, 0 or negative."""
    penalty = shaping.length_penalty
    if isinstance(penalty, NoLengthPenalty):
        return 0.0
    return overlong_penalty(
        sampled_tokens(episode),
        limit=penalty.overlong_limit,
        buffer=penalty.overlong_buffer,
        factor=penalty.overlong_factor,
    )


def overlong_penalty(length: int, *, limit: int, buffer: int, factor: float) -> float:
    """The length penalty of an episode of `length` sampled tokens, 0 or negative.

        min(−(length − (limit − buffer)) / buffer · factor, 0)

    The penalty is 0 up to limit − buffer tokens, −factor at the limit, and keeps growing at the same rate
    beyond it, because several turns together can sample more than one completion could.

    Source: DAPO, arXiv 2503.14476, eq. 13, where the penalty is −1 beyond the limit.
    """
    return min(-(length - (limit - buffer)) / buffer * factor, 0.0)


def sampled_tokens(episode: RecordedEpisode) -> int:
    """The tokens that the policy sampled in an episode, each once."""
    return sum(len(turn.completion) for turn in episode.turns)
