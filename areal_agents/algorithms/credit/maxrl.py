"""MaxRL: advantages whose gradient is that of the log-likelihood of success, not of the expected reward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal_agents.algorithms.credit.advantages import all_equal
from areal_agents.algorithms.credit.rewards import EpisodeRewards, Floats
from areal_agents.errors import TrainingError

_ROUNDING = 1e-9  # rounding can make a sum of rewards that is 0 negative by this much


def maxrl_advantages(groups: Sequence[Sequence[EpisodeRewards]]) -> list[list[Floats]]:
    """Each turn gets the advantage of its episode: A_i = (s_i − mean)/mean, over the scores s of the group.

    All advantages are 0 where all scores are equal, all of them 0 included. With scores 0 and 1, and p the
    probability of 1, the expectation of Σ_i A_i ∇log π(episode i) over a group of G is therefore G times the
    gradient of

        −Σ_{k=1}^{G−1} (1 − p)^k / k

    which are the first G − 1 terms of the expansion of log p. (The paper's estimator without a baseline has
    one more term; the two differ only for groups without a success.)

    Returns:
        Per group and episode an array [T] in recording order.

    Raises:
        TrainingError: a score is below 0 and therefore not a likelihood; the message names the group.

    Source: MaxRL, arXiv 2602.02710.
    """
    out = []
    for group in groups:
        refuse_negative_scores(group)
        scores = np.array([member.score for member in group])
        mean = scores.mean()
        nothing = all_equal(scores) or mean <= _ROUNDING
        advantages = np.zeros_like(scores) if nothing else (scores - mean) / mean
        out.append(
            [np.full(len(member.turns), a) for member, a in zip(group, advantages.tolist(), strict=True)]
        )
    return out


def refuse_negative_scores(group: Sequence[EpisodeRewards]) -> None:
    """Raise TrainingError if a score is below 0 and therefore not a likelihood."""
    least = min(member.score for member in group)
    if least < -_ROUNDING:
        raise TrainingError(
            f"group {group[0].group_id} has an episode with the score {least:g}, and estimator: maxrl needs "
            "scores of 0 or more, because it divides by their mean; change the reward, set a reward_bias, or "
            "use estimator: group"
        )
