"""From the rewards that were given to those that are trained on: scale, bias, clip, length penalty.

Each part leaves the rewards as they are unless it is asked for, so that without shaping an episode's
credit sums to its score.
"""

from __future__ import annotations

import numpy as np

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.credit.returns import EpisodeCredit
from areal_agents.core.rollout import Episode


def episode_credit(episode: Episode, *, group_id: str, config: AlgorithmConfig) -> EpisodeCredit:
    """The shaped rewards of an episode.

    With R the sum of its episode rewards, r_t that of the rewards of turn t, s the scale, b the bias
    and c the clip:

        r_t ← clip(s · r_t, −c, c)        R ← clip(s · (R + b), −c, c) + overlong penalty

    The bias is of the episode, so that an episode does not gain by having many turns.
    """
    index = {turn.id: place for place, turn in enumerate(episode.turns)}
    own, whole = np.zeros(len(index)), 0.0
    for reward in episode.rewards:
        if reward.scope == "episode":
            whole += reward.value
        else:
            own[index[reward.target]] += reward.value
    limit = np.inf if config.reward_clip is None else config.reward_clip
    own = np.clip(config.reward_scale * own, -limit, limit)
    whole = float(np.clip(config.reward_scale * (whole + config.reward_bias), -limit, limit))
    if config.overlong_limit is not None:
        whole += overlong_penalty(
            sampled_tokens(episode),
            limit=config.overlong_limit,
            buffer=config.overlong_buffer,
            factor=config.overlong_factor,
        )
    parents = tuple(-1 if turn.parent is None else index[turn.parent] for turn in episode.turns)
    return EpisodeCredit(parents, own, whole, group_id)


def overlong_penalty(length: int, *, limit: int, buffer: int, factor: float) -> float:
    """The length penalty of an episode of `length` sampled tokens, 0 or negative.

        min(−(length − (limit − buffer)) / buffer · factor, 0)

    0 up to limit − buffer tokens, −factor at the limit, and on in the same line beyond it (where
    several turns together sampled more than one completion could).

    Source: DAPO, arXiv 2503.14476, eq. 13, which has −1 beyond the limit.
    """
    return min(-(length - (limit - buffer)) / buffer * factor, 0.0)


def sampled_tokens(episode: Episode) -> int:
    """The tokens that the policy sampled in an episode, each once."""
    return sum(len(turn.completion) for turn in episode.turns)
