"""What the groups of a batch were like, for the metrics.

Rewards and scores are as they were given, before any shaping, so that a curve keeps its meaning when
the shaping changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.credit.advantages import all_equal
from areal_agents.algorithms.credit.rewards import LinearLengthPenalty, sampled_tokens
from areal_agents.core.rollout import Episode, RolloutGroup
from areal_agents.core.trajectory import ForkReason, Turn

_NEW: ForkReason = "new conversation"


@dataclass(frozen=True, slots=True)
class BatchReport:
    """What the groups of a batch were like.

    Attributes:
        rewards: the episode scores, group after group.
        solved_all, solved_some, solved_none: groups in which all episodes have one and the same
            positive score; in which scores differ; in which all have one score that is not positive.
        dropped_groups: groups left out because their episodes have nothing to tell apart.
        sampled_tokens: tokens that the policy sampled in the batch.
        untrained_tokens: of these, the ones with mask 0 (constrained, aborted, excluded, truncated).
        routed_tokens: of all, those that the engine said by which experts they were predicted.
        turns, branches, truncated: totals over the episodes; a branch is a trajectory.
        forks: number of roots by the reason why they were forked.
        versions_per_rollout: mean number of policy versions that an episode's tokens came from.
        rewards_by_name: per reward name the mean, over the episodes that have it, of the episode's sum.
        episode_tokens: the tokens that the policy sampled in each episode, in the order of `rewards`.
        overlong: episodes with a length penalty.
        equal_groups: the ids of the groups with nothing to tell apart, left out or not.
    """

    rewards: tuple[float, ...]
    solved_all: int
    solved_some: int
    solved_none: int
    dropped_groups: int
    sampled_tokens: int
    untrained_tokens: int
    routed_tokens: int
    turns: int
    branches: int
    truncated: int
    forks: dict[str, int]
    versions_per_rollout: float
    rewards_by_name: dict[str, float]
    episode_tokens: tuple[int, ...]
    overlong: int
    equal_groups: tuple[str, ...]


def batch_report(
    groups: Sequence[RolloutGroup], equal_groups: Collection[str], config: AlgorithmConfig
) -> BatchReport:
    """The report on a batch, of which the groups `equal_groups` have nothing to tell apart."""
    episodes = [rollout.episode for group in groups for rollout in group.rollouts]
    turns = [turn for episode in episodes for turn in episode.turns]
    scores = [[rollout.episode.score for rollout in group.rollouts] for group in groups]
    equal = [all_equal(group) for group in scores]
    positive = [group[0] > 0 for group in scores]
    seen = [len({v for t in episode.turns for v in t.completion.versions.tolist()}) for episode in episodes]
    lengths = tuple(sampled_tokens(episode) for episode in episodes)
    trained = sum(len(turn.completion) for e in episodes for turn in config.trained_turns.of(e))
    left_out = config.drop_equal_groups and not config.is_supervised
    return BatchReport(
        rewards=tuple(score for group in scores for score in group),
        solved_all=sum(e and p for e, p in zip(equal, positive, strict=True)),
        solved_some=len(groups) - sum(equal),
        solved_none=sum(e and not p for e, p in zip(equal, positive, strict=True)),
        dropped_groups=len(equal_groups) if left_out else 0,
        sampled_tokens=sum(lengths),
        untrained_tokens=sum(lengths) - trained,
        routed_tokens=sum(_routed(turn) for turn in turns),
        turns=len(turns),
        branches=sum(len(episode.forest.leaves()) for episode in episodes),
        truncated=sum(episode.status == "truncated" for episode in episodes),
        forks=_forks(episodes),
        versions_per_rollout=float(np.mean(seen)),
        rewards_by_name=_by_name(episodes),
        episode_tokens=lengths,
        overlong=sum(_is_overlong(length, config) for length in lengths),
        equal_groups=tuple(group.id for group in groups if group.id in equal_groups),
    )


def _routed(turn: Turn) -> int:
    routing, count = turn.completion.routed_experts, len(turn.completion)
    return 0 if routing is None else int((routing[len(routing) - count :, 0, 0] >= 0).sum())


def _forks(episodes: Sequence[Episode]) -> dict[str, int]:
    """Roots beyond the first of their episode, by reason.

    Of conversations that begin side by side any may be recorded first, and then knows of no other: all are
    new but one.
    """
    counts: Counter[str] = Counter()
    for episode in episodes:
        roots = [turn.forked_from for turn in episode.turns if turn.parent is None]
        counts.update(_NEW if fork is None else fork.reason for fork in roots)
        counts[_NEW] -= bool(roots)
    return {reason: count for reason, count in sorted(counts.items()) if count > 0}


def _by_name(episodes: Sequence[Episode]) -> dict[str, float]:
    sums: dict[str, list[float]] = {}
    for episode in episodes:
        of_episode: dict[str, float] = {}
        for reward in episode.rewards:
            of_episode[reward.name] = of_episode.get(reward.name, 0.0) + reward.value
        for name, value in of_episode.items():
            sums.setdefault(name, []).append(value)
    return {name: float(np.mean(values)) for name, values in sorted(sums.items())}


def _is_overlong(length: int, config: AlgorithmConfig) -> bool:
    penalty = config.rewards.length_penalty
    if not isinstance(penalty, LinearLengthPenalty):
        return False
    return length > penalty.overlong_limit - penalty.overlong_buffer
