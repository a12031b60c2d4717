"""From complete groups to training samples: one per trajectory, every sampled token owned once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from areal_agents.algorithms.advantages import all_equal, group_advantages
from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.credit import is_trained, owners, turn_returns
from areal_agents.core.rollout import Episode, RolloutGroup
from areal_agents.core.sample import TrainingSample
from areal_agents.core.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class BatchReport:
    """What the groups of a batch were like.

    Attributes:
        rewards: the episode scores, group after group.
        solved_all, solved_some, solved_none: groups in which all episodes have one and the same
            positive score; in which scores differ; in which all have one score that is not positive.
        dropped_groups: groups left out because all their scores are equal.
        sampled_tokens: tokens that the policy sampled in the batch.
        untrained_tokens: of these, the ones with mask 0 (constrained, aborted, excluded).
        turns, branches, truncated: totals over the episodes; a branch is a trajectory.
        forks: number of roots by the reason why they were forked.
        versions_per_rollout: mean number of policy versions that an episode's tokens came from.
    """

    rewards: tuple[float, ...]
    solved_all: int
    solved_some: int
    solved_none: int
    dropped_groups: int
    sampled_tokens: int
    untrained_tokens: int
    turns: int
    branches: int
    truncated: int
    forks: dict[str, int]
    versions_per_rollout: float


def build_samples(
    groups: Sequence[RolloutGroup], config: AlgorithmConfig
) -> tuple[list[TrainingSample], BatchReport]:
    """The training samples of a batch of groups, and a report on the batch.

    A trajectory without a trained token yields no sample. Groups with equal scores are left out if
    `config.drop_equal_groups`; the statistics of the batch include them.

    Raises:
        ValueError: a score that is not finite, or no groups.
    """
    returns = [
        [turn_returns(rollout.episode, turn_discount=config.turn_discount) for rollout in group.rollouts]
        for group in groups
    ]
    scores = [[rollout.episode.score for rollout in group.rollouts] for group in groups]
    flat = [[value for by_turn in group for value in by_turn.values()] for group in returns]
    advantages = group_advantages(
        flat, scores, mean=config.advantage_mean, std=config.advantage_std, std_estimator=config.std_estimator
    )
    samples: list[TrainingSample] = []
    dropped = 0
    for group, by_episode, values, group_scores in zip(groups, returns, advantages, scores, strict=True):
        if config.drop_equal_groups and all_equal(group_scores):
            dropped += 1
            continue
        remaining = iter(values)
        for rollout, by_turn in zip(group.rollouts, by_episode, strict=True):
            by_turn = {turn_id: float(next(remaining)) for turn_id in by_turn}
            samples += episode_samples(rollout.episode, by_turn, group_id=group.id, config=config)
    return samples, _report(groups, scores, dropped, config)


def episode_samples(
    episode: Episode, advantages: dict[str, float], *, group_id: str, config: AlgorithmConfig
) -> list[TrainingSample]:
    """One sample per leaf of an episode; a turn's tokens have that turn's advantage in their owner."""
    owner = owners(episode)
    samples = []
    for trajectory in episode.forest.trajectories():
        leaf = trajectory.turns[-1].id
        trained = [
            owner[turn.id] == leaf
            and is_trained(
                turn, train_constrained=config.train_constrained, exclude_labels=config.exclude_labels
            )
            for turn in trajectory.turns
        ]
        mask = trajectory.sampled_mask & np.array(trained)[trajectory.turn_index]
        if mask.any():
            samples.append(_sample(trajectory, mask, advantages, episode.id, group_id))
    return samples


def _sample(
    trajectory: Trajectory, mask: np.ndarray, advantages: dict[str, float], episode_id: str, group_id: str
) -> TrainingSample:
    by_turn = np.array([advantages[turn.id] for turn in trajectory.turns], np.float32)
    end = int(np.flatnonzero(mask)[-1]) + 1  # nothing after the last trained token is needed
    return TrainingSample(
        token_ids=trajectory.token_ids[:end],
        loss_mask=mask[:end],
        behavior_logprobs=trajectory.behavior_logprobs[:end],
        versions=trajectory.versions[:end],
        temperatures=trajectory.temperatures[:end],
        advantages=np.where(mask, by_turn[trajectory.turn_index], np.float32(0))[:end],
        episode_id=episode_id,
        group_id=group_id,
    )


def _report(
    groups: Sequence[RolloutGroup], scores: Sequence[Sequence[float]], dropped: int, config: AlgorithmConfig
) -> BatchReport:
    episodes = [rollout.episode for group in groups for rollout in group.rollouts]
    turns = [turn for episode in episodes for turn in episode.turns]
    forks: dict[str, int] = {}
    for turn in turns:
        if turn.forked_from is not None:
            forks[turn.forked_from.reason] = forks.get(turn.forked_from.reason, 0) + 1
    equal = [all_equal(group) for group in scores]
    positive = [group[0] > 0 for group in scores]
    seen = [len({v for t in episode.turns for v in t.completion.versions.tolist()}) for episode in episodes]
    sampled = sum(len(turn.completion) for turn in turns)
    trained = sum(
        len(turn.completion)
        for turn in turns
        if is_trained(turn, train_constrained=config.train_constrained, exclude_labels=config.exclude_labels)
    )
    return BatchReport(
        rewards=tuple(score for group in scores for score in group),
        solved_all=sum(e and p for e, p in zip(equal, positive, strict=True)),
        solved_some=len(groups) - sum(equal),
        solved_none=sum(e and not p for e, p in zip(equal, positive, strict=True)),
        dropped_groups=dropped,
        sampled_tokens=sampled,
        untrained_tokens=sampled - trained,
        turns=len(turns),
        branches=sum(len(episode.forest.leaves()) for episode in episodes),
        truncated=sum(episode.status == "truncated" for episode in episodes),
        forks=forks,
        versions_per_rollout=float(np.mean(seen)),
    )
