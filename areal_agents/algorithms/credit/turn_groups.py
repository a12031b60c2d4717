"""Advantages of turns that are compared with other turns sampled in the same situation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from areal_agents.algorithms.credit.advantages import (
    NormLevel,
    StdEstimator,
    all_equal,
    compare,
    differences,
    inverse_std,
)
from areal_agents.algorithms.credit.anchors import Anchor
from areal_agents.algorithms.credit.returns import EpisodeCredit, TurnGroups
from areal_agents.algorithms.credit.rewards import EpisodeRewards, Floats


def turn_group_advantages(
    groups: Sequence[Sequence[EpisodeRewards]],
    credit: TurnGroups,
    *,
    mean: NormLevel,
    std: NormLevel,
    std_estimator: StdEstimator,
) -> list[list[Floats]]:
    """The advantage of an episode in its group, plus the advantage of a turn in its step group.

        A_t = A^E + ω · A^S_t        A^S_t = (R_t − mean)/(std + 1e-5)

    A^E is (R − mean)/(std + 1e-5) of the episode, with R its score or (`episode_return: outcome`) its episode
    reward. A step group holds all turns of all episodes of a group whose anchors are equal, turns that are
    not trained included; mean and std of A^S are over its R_t. R_t is the turn's own reward (`own`), or
    (`reward_to_go`)

        R_t = Σ_{u ≥ k} γ^max(0, depth(u) − depth(t)) · r_u  +  γ^max(0, depth(last) − depth(t)) · r_episode

    over the turns u recorded after the call of t began: the episode reward comes with the turn recorded
    last, and is discounted by its distance, unlike in `returns.rewards_to_go`. A^S is 0 in a step group of
    one turn, and in one whose R_t are all equal.

    Args:
        groups: the episodes of each group, with `EpisodeRewards.anchors`.
        mean, std: the statistics of A^E, over the group or the batch; without a std, A^S is not divided
            either.

    Returns:
        Per group and episode an array [T] in recording order; exactly 0 where the two parts cancel.

    Raises:
        ValueError: an episode does not have one anchor per turn, or `advantages.compare` raises.

    Source: GiGPO, arXiv 2505.10978, eq. 3 and 5-8 (observation, reward_to_go, score); MT-GRPO, arXiv
    2505.11821v1 (position, own, outcome), where A = A^O + λ·A^T for the turn with a turn reward,
    and A^O for the last turn, which has none.
    """
    whole = groups
    if credit.episode_return == "outcome":
        whole = [[replace(member, turns=np.zeros_like(member.turns)) for member in group] for group in groups]
    of_episodes = compare(whole, EpisodeCredit(), mean=mean, std=std, std_estimator=std_estimator)
    out = []
    for group, comparison in zip(groups, of_episodes, strict=True):
        of_turns = _step_advantages(group, credit, divided=std != "none", std_estimator=std_estimator)
        out.append(
            [
                differences(of_episode, -credit.turn_weight * of_turn)
                for of_episode, of_turn in zip(comparison.advantages(), of_turns, strict=True)
            ]
        )
    return out


def _step_advantages(
    group: Sequence[EpisodeRewards], credit: TurnGroups, *, divided: bool, std_estimator: StdEstimator
) -> list[Floats]:
    """Return A^S of the turns of each episode, [T] per episode."""
    returns = [credit.turn_return.of_turns(member) for member in group]
    step_groups: dict[Anchor, list[tuple[int, int]]] = {}
    for place, member in enumerate(group):
        if len(member.anchors) != len(member.turns):
            raise ValueError(
                f"group {member.group_id}: an episode of {len(member.turns)} turns must have one anchor per "
                f"turn, got {len(member.anchors)}"
            )
        for turn, anchor in enumerate(member.anchors):
            step_groups.setdefault(anchor, []).append((place, turn))
    advantages = [np.zeros(len(member.turns)) for member in group]
    for members in step_groups.values():
        values = np.array([returns[place][turn] for place, turn in members])
        if all_equal(values):
            continue
        scale = inverse_std(values, std_estimator) if divided else 1.0
        over = differences(values, values.mean()) * scale
        for (place, turn), advantage in zip(members, over, strict=True):
            advantages[place][turn] = advantage
    return advantages
