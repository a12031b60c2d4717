"""Statistics of the groups of a batch, for the metrics.

Rewards and scores are those recorded, before any shaping, so that curves stay comparable when the shaping
changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.credit.advantages import all_equal
from areal_agents.algorithms.credit.rewards import LinearLengthPenalty, sampled_tokens
from areal_agents.core.completion import NO_VERSION
from areal_agents.core.rollout import DATA_SOURCE, RecordedEpisode, RolloutGroup
from areal_agents.core.trajectory import ForkReason, Turn

_NEW: ForkReason = "new conversation"
_SHOWN_TOOLS = 20


@dataclass(frozen=True, slots=True)
class BatchReport:
    """Statistics of the groups of a batch.

    Attributes:
        rewards: the episode scores, group after group.
        solved_all, solved_some, solved_none: number of groups in which all episodes have the same positive
            score; in which the scores differ; in which all have the same score and it is not positive.
        dropped_groups: number of equal groups that were left out.
        sampled_tokens: number of tokens that the policy sampled in the batch.
        untrained_tokens: number of these tokens with mask 0 (constrained, aborted, excluded, truncated).
        routed_tokens: number of sampled tokens for which the engine returned the routed experts.
        turns, branches, truncated: totals over the episodes; a branch is a trajectory.
        forks: number of forked roots by the reason for the fork.
        versions_per_rollout: mean number of policy versions that sampled the tokens of an episode.
        rewards_by_name: by reward name, the mean of the episodes' sums over the episodes that have the name.
        rewards_by_source: by the source of the tasks, the mean score; {} if the data has one source.
        episode_tokens: number of tokens that the policy sampled in each episode, in the order of `rewards`.
        overlong: number of episodes with a length penalty.
        equal_groups: the ids of the equal groups, whose scores or advantages are all the same, including
            those that were left out.
        tool_calls: number of tool calls in the episodes whose requests offered tools; None if there are none.
        with_tools: number of these episodes.
        tool_calls_by_name: by the tool's name, the mean number of calls of these episodes; the most frequent
            names, and the calls of all others as "other", because a model may call tools that there are not.
        rewarded_without_tools: of these episodes with a positive score, the share that called no tool; None
            if there are none, or if a supervised loss learns from the episodes.
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
    rewards_by_source: dict[str, float]
    episode_tokens: tuple[int, ...]
    overlong: int
    equal_groups: tuple[str, ...]
    tool_calls: int | None = None
    with_tools: int = 0
    tool_calls_by_name: Mapping[str, float] = field(default_factory=dict)
    rewarded_without_tools: float | None = None


def batch_report(
    groups: Sequence[RolloutGroup], equal_groups: Collection[str], config: AlgorithmConfig
) -> BatchReport:
    """The report on `groups`; `equal_groups` are the ids of the equal groups of their whole batch."""
    equal_here = tuple(group.id for group in groups if group.id in equal_groups)
    episodes = [rollout.episode for group in groups for rollout in group.rollouts]
    turns = [turn for episode in episodes for turn in episode.turns]
    scores = [[rollout.episode.score for rollout in group.rollouts] for group in groups]
    equal = [all_equal(group) for group in scores]
    positive = [group[0] > 0 for group in scores]
    seen = [
        len({v for t in episode.turns for v in t.completion.versions.tolist()} - {NO_VERSION})
        for episode in episodes
    ]
    lengths = tuple(sampled_tokens(episode) for episode in episodes)
    trained = sum(len(turn.completion) for e in episodes for turn in config.trained_turns.of(e))
    left_out = config.drop_equal_groups and not config.is_supervised
    return BatchReport(
        rewards=tuple(score for group in scores for score in group),
        solved_all=sum(e and p for e, p in zip(equal, positive, strict=True)),
        solved_some=len(groups) - sum(equal),
        solved_none=sum(e and not p for e, p in zip(equal, positive, strict=True)),
        dropped_groups=len(equal_here) if left_out else 0,
        sampled_tokens=sum(lengths),
        untrained_tokens=sum(lengths) - trained,
        routed_tokens=sum(_routed(turn) for turn in turns),
        turns=len(turns),
        branches=sum(len(episode.forest.leaves()) for episode in episodes),
        truncated=sum(episode.status == "truncated" for episode in episodes),
        forks=_forks(episodes),
        versions_per_rollout=float(np.mean(seen)),
        rewards_by_name=_by_name(episodes),
        rewards_by_source=_by_source(groups),
        episode_tokens=lengths,
        overlong=sum(_is_overlong(length, config) for length in lengths),
        equal_groups=equal_here,
        **_tool_use(episodes, rewards_are_earned=not config.is_supervised),
    )


def _tool_use(episodes: Sequence[RecordedEpisode], *, rewards_are_earned: bool) -> dict[str, Any]:
    """Return the fields of the report about tools. Tools that are written into a prompt are not known.

    Args:
        rewards_are_earned: whether the policy earns the rewards; demonstrations have theirs from elsewhere.
    """
    offered = [episode for episode in episodes if any(turn.tools_id for turn in episode.turns)]
    calls = [episode.tool_calls for episode in offered]
    rewarded = [of.total() for episode, of in zip(offered, calls, strict=True) if episode.score > 0]
    by_name = sum(calls, Counter[str]())
    frequent = by_name.most_common(_SHOWN_TOOLS)
    if others := by_name.total() - sum(count for _, count in frequent):
        frequent.append(("other", others))
    return {
        "tool_calls": by_name.total() if offered else None,
        "with_tools": len(offered),
        "tool_calls_by_name": {name: count / len(offered) for name, count in sorted(frequent)},
        "rewarded_without_tools": rewarded.count(0) / len(rewarded)
        if rewarded and rewards_are_earned
        else None,
    }


def _routed(turn: Turn) -> int:
    routing, count = turn.completion.routed_experts, len(turn.completion)
    return 0 if routing is None else int((routing[len(routing) - count :, 0, 0] >= 0).sum())


def _forks(episodes: Sequence[RecordedEpisode]) -> dict[str, int]:
    """Roots beyond the first of their episode, by reason.

    If several conversations begin concurrently, any of them may be recorded first, and that one has no fork
    reason. All of them except one are therefore counted as new.
    """
    counts: Counter[str] = Counter()
    for episode in episodes:
        roots = [turn.forked_from for turn in episode.turns if turn.parent is None]
        counts.update(_NEW if fork is None else fork.reason for fork in roots)
        counts[_NEW] -= bool(roots)
    return {reason: count for reason, count in sorted(counts.items()) if count > 0}


def _by_name(episodes: Sequence[RecordedEpisode]) -> dict[str, float]:
    sums: dict[str, list[float]] = {}
    for episode in episodes:
        of_episode: dict[str, float] = {}
        for reward in episode.rewards:
            of_episode[reward.name] = of_episode.get(reward.name, 0.0) + reward.value
        for name, value in of_episode.items():
            sums.setdefault(name, []).append(value)
    return {name: float(np.mean(values)) for name, values in sorted(sums.items())}


def _by_source(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    scores: dict[str, list[float]] = {}
    for group in groups:
        if (source := group.task.input.get(DATA_SOURCE)) is not None:
            scores.setdefault(str(source), []).extend(rollout.episode.score for rollout in group.rollouts)
    return {source: float(np.mean(values)) for source, values in sorted(scores.items())}


def _is_overlong(length: int, config: AlgorithmConfig) -> bool:
    penalty = config.rewards.length_penalty
    if not isinstance(penalty, LinearLengthPenalty):
        return False
    return length > penalty.overlong_limit - penalty.overlong_buffer
