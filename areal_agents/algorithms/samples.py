"""Builds training data from complete groups: one sample per trajectory, every sampled token owned once.

Each group is prepared separately: it is checked, its rewards are shaped, and its samples are built.
Advantages are computed when a batch is assembled, because they can depend on all of its groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.credit.advantages import all_equal
from areal_agents.algorithms.credit.estimators import GroupEstimator, WithinGroups
from areal_agents.algorithms.credit.rewards import EpisodeRewards, Floats, episode_rewards
from areal_agents.algorithms.credit.selection import best_episodes, preference_pair
from areal_agents.algorithms.credit.trained import Excluded
from areal_agents.algorithms.demonstrations import best_of_each_group
from areal_agents.algorithms.losses.dpo import DpoLoss
from areal_agents.algorithms.losses.likelihood import SftLoss
from areal_agents.algorithms.ordering import trajectories
from areal_agents.algorithms.report import BatchReport, batch_report
from areal_agents.core.completion import TokenIds
from areal_agents.core.rollout import RecordedEpisode, RolloutGroup
from areal_agents.core.sample import TrainingSample
from areal_agents.core.trajectory import Trajectory, Turn
from areal_agents.errors import TrainingError

# the proxy has the same limit: sums, and distances from a batch's mean, stay within float32
_LARGEST_REWARD = 1e12


Untrained = Excluded | Literal["empty", "equal", "not chosen", "stale"]


@dataclass(frozen=True, slots=True)
class BatchTurn:
    """A turn of an episode of the batch.

    Attributes:
        tokens: number of sampled tokens.
        untrained: why none of them carries a gradient, before the staleness bound is applied; None if they
            do. Besides the rules of `TrainedTurns`: "empty": nothing was sampled; "equal": the group is left
            out because its scores or advantages are all the same; "not chosen": the algorithm does not learn
            from this episode (SFT, DPO, self-distillation).
    """

    id: str
    tokens: int
    untrained: Untrained | None


@dataclass(frozen=True, slots=True, eq=False)
class TrainingData:
    """The training data of a batch of groups.

    Attributes:
        samples: the samples of the groups that are trained on; may be empty. Advantages are 0 if they are
            still to be computed from values or penalties (`AlgorithmConfig.needs_token_credit`).
        rewards: the shaped rewards of every episode by its id, including those of groups that were left out.
        group_scores: by group id the shaped scores of its episodes, [G].
        pairs: (chosen, rejected) episode ids (DPO only).
        report: statistics of the batch.
        demonstrations: by episode id, the tokens [D] of a better episode of the group, which the teacher of
            self-distillation reads first. With self-distillation, an episode without a demonstration is not
            trained.
        turns: every turn of each episode, in recording order, by episode id; including those of groups that
            were left out.
        uses: how often earlier batches were trained on a group, by group id; absent: never.
    """

    samples: tuple[TrainingSample, ...]
    rewards: Mapping[str, EpisodeRewards]
    group_scores: Mapping[str, Floats]
    pairs: tuple[tuple[str, str], ...]
    report: BatchReport
    demonstrations: Mapping[str, TokenIds] = field(default_factory=dict)
    turns: Mapping[str, tuple[BatchTurn, ...]] = field(default_factory=dict)
    uses: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class PreparedGroup:
    """A checked group with everything that does not depend on the other groups of its batch.

    Attributes:
        group: the group as it was recorded.
        rewards: the shaped rewards of each episode by its id.
        scores: [G] the shaped scores of the episodes.
    """

    group: RolloutGroup
    rewards: Mapping[str, EpisodeRewards]
    scores: Floats
    _samples: dict[str, list[TrainingSample]] = field(default_factory=dict)

    def samples(self, episode: RecordedEpisode, config: AlgorithmConfig) -> list[TrainingSample]:
        """The samples of an episode with advantages 0. They are built at the first call and kept."""
        if episode.id not in self._samples:
            none = np.zeros(len(episode.turns))
            self._samples[episode.id] = episode_samples(episode, none, group_id=self.group.id, config=config)
        return self._samples[episode.id]


def prepare_group(group: RolloutGroup, config: AlgorithmConfig) -> PreparedGroup:
    """Check a group and shape its rewards.

    Raises:
        TrainingError: an episode that occurs twice, a reward that is not finite or that the estimator cannot
            use (`maxrl`, `gdpo`), a completion whose arrays differ in length; the message names it.
    """
    _refuse_repeats([group])
    for rollout in group.rollouts:
        _check_episode(rollout.episode, group.id, config)
    rewards = {
        rollout.episode.id: episode_rewards(
            rollout.episode, group_id=group.id, shaping=config.rewards, anchor=config.turn_anchor
        )
        for rollout in group.rollouts
    }
    scores = np.array([rewards[rollout.episode.id].score for rollout in group.rollouts])
    if not np.isfinite(scores).all():
        raise TrainingError(f"group {group.id}: the shaped rewards are not finite; check reward_scale")
    if isinstance(config.estimator, WithinGroups):
        config.estimator.check([rewards[rollout.episode.id] for rollout in group.rollouts])
    return PreparedGroup(group, rewards, scores)


def build_training_data(
    groups: Sequence[RolloutGroup], config: AlgorithmConfig, *, replayed: Mapping[str, int] | None = None
) -> TrainingData:
    """The training data of a batch of groups: `assemble_batch` after `prepare_group`, with their errors."""
    return assemble_batch([prepare_group(group, config) for group in groups], config, replayed=replayed)


def assemble_batch(
    prepared: Sequence[PreparedGroup], config: AlgorithmConfig, *, replayed: Mapping[str, int] | None = None
) -> TrainingData:
    """Compute the advantages of a batch of groups and set them in the samples of the groups.

    A trajectory without a trained token yields no sample. Groups with equal scores are left out if
    `config.drop_equal_groups`; the statistics of the batch include them.

    Args:
        replayed: how often earlier batches were trained on a group, by its id. The report leaves these groups
            out, so that every episode is reported once.

    Raises:
        ValueError: there are no groups.
        TrainingError: a group or episode occurs twice; the message names it.
    """
    if not prepared:
        raise ValueError("a batch must have at least one group, got none")
    groups = [known.group for known in prepared]
    _refuse_repeats(groups)
    rewards = {episode_id: shaped for known in prepared for episode_id, shaped in known.rewards.items()}
    group_scores = {known.group.id: known.scores for known in prepared}
    advantages, pairs = _turn_advantages(groups, rewards, group_scores, config)
    equal = frozenset(
        group.id for group in groups if _is_equal(group, group_scores[group.id], advantages, config)
    )
    if config.needs_token_credit:
        advantages = {episode_id: np.zeros_like(values) for episode_id, values in advantages.items()}
    demonstrations: dict[str, TokenIds] = {}
    if config.teacher == "self":
        demonstrations = best_of_each_group(groups, group_scores)
        advantages = {episode_id: advantages[episode_id] for episode_id in demonstrations}
    left_out = equal if config.drop_equal_groups and not config.is_supervised else frozenset()
    samples = [
        _with_advantages(sample, advantages[rollout.episode.id])
        for known in prepared
        if known.group.id not in left_out
        for rollout in known.group.rollouts
        if rollout.episode.id in advantages
        for sample in known.samples(rollout.episode, config)
    ]
    uses = replayed or {}
    report = batch_report([group for group in groups if group.id not in uses], equal, config)
    turns = {
        rollout.episode.id: _batch_turns(
            rollout.episode, config, equal=group.id in left_out, chosen=rollout.episode.id in advantages
        )
        for group in groups
        for rollout in group.rollouts
    }
    return TrainingData(tuple(samples), rewards, group_scores, pairs, report, demonstrations, turns, uses)


def _batch_turns(
    episode: RecordedEpisode, config: AlgorithmConfig, *, equal: bool, chosen: bool
) -> tuple[BatchTurn, ...]:
    def untrained(turn: Turn) -> Untrained | None:
        if not len(turn.completion):
            return "empty"
        excluded = config.trained_turns.excluded(turn, episode)
        if excluded is not None:
            return excluded
        return "equal" if equal else None if chosen else "not chosen"

    return tuple(BatchTurn(turn.id, len(turn.completion), untrained(turn)) for turn in episode.turns)


def _with_advantages(sample: TrainingSample, advantages: Floats) -> TrainingSample:
    """Return the sample with the advantages [T] of its episode's turns at its trained tokens."""
    by_token = np.where(sample.loss_mask, advantages[sample.turn_index], 0.0)
    return replace(sample, advantages=by_token.astype(np.float32))


def _is_equal(
    group: RolloutGroup, shaped: Floats, advantages: Mapping[str, Floats], config: AlgorithmConfig
) -> bool:
    """Whether a group is equal: its episodes' scores are the same, as recorded or as shaped.

    The given scores count too, because solved episodes of different lengths are all solved (DAPO, arXiv
    2503.14476, eq. 11, which asks for correctness, not for the reward). Where turns or named
    rewards are compared separately from the score, episodes with the same score can differ. Such a group is
    equal if all its advantages are 0, which rounding does not change (`advantages.differences`). So is a
    group of one episode, whose baseline is that of the batch; a critic gives it a baseline of its own.
    """
    if len(group.rollouts) == 1 and config.needs_critic:
        return False
    if len(group.rollouts) == 1 and isinstance(config.estimator, GroupEstimator):
        return not advantages[group.rollouts[0].episode.id].any()
    if not config.compares_scores:
        return all(not advantages[rollout.episode.id].any() for rollout in group.rollouts)
    return all_equal([rollout.episode.score for rollout in group.rollouts]) or all_equal(shaped)


def episode_samples(
    episode: RecordedEpisode, advantages: Floats, *, group_id: str, config: AlgorithmConfig
) -> list[TrainingSample]:
    """Build one sample per leaf of an episode; the sample that owns a turn has the turn's advantage at its
    tokens.

    A turn that several leaves share is owned by the first leaf that it leads to, and is thereby trained
    exactly once. Leaves are in the order of `ordered_turns`.

    With `observation_coefficient` the prompt tokens that a turn adds to its parent are observations, in the
    first sample in which they lead to a trained token of its own: tool results and later messages, together
    with the text that the template writes around them, which cannot be separated from them. The first prompt
    of a root is not an observation.

    Args:
        advantages: of the episode's turns, [T] in recording order.
    """
    place = {turn.id: index for index, turn in enumerate(episode.turns)}
    trained = {turn.id for turn in config.trained_turns.of(episode)}
    owned: set[str] = set()
    observed: set[str] = set()
    samples = []
    for trajectory in trajectories(episode):
        ids = [turn.id for turn in trajectory.turns]
        here = np.array([turn_id in trained and turn_id not in owned for turn_id in ids])
        elsewhere = np.array([turn_id in trained and turn_id in owned for turn_id in ids])
        owned.update(ids)
        mask = trajectory.sampled_mask & here[trajectory.turn_index]
        prefix = None
        if config.looks_at_sequences and elsewhere.any():
            prefix = trajectory.sampled_mask & elsewhere[trajectory.turn_index]
        if mask.any():
            places = np.array([place[turn_id] for turn_id in ids], np.int32)
            observations = None
            if config.observation_coefficient:
                observations = _observations(trajectory, mask, observed)
            samples.append(
                _sample(
                    trajectory, mask, prefix, observations, places, advantages, episode.id, group_id, config
                )
            )
    return samples


def _observations(
    trajectory: Trajectory, mask: npt.NDArray[np.bool_], observed: set[str]
) -> npt.NDArray[np.bool_] | None:
    """Return [L] bool, the observation tokens before the last token of `mask`; None if there are none.

    Observations of turns in `observed` belong to other samples; the turns of this sample are added to
    `observed`.
    """
    last = int(trajectory.turn_index[np.flatnonzero(mask)[-1]])
    new = np.array([0 < i <= last and turn.id not in observed for i, turn in enumerate(trajectory.turns)])
    observed.update(turn.id for turn in trajectory.turns[: last + 1])
    found = ~trajectory.sampled_mask & new[trajectory.turn_index]
    return found if found.any() else None


def _turn_advantages(
    groups: Sequence[RolloutGroup],
    rewards: Mapping[str, EpisodeRewards],
    group_scores: Mapping[str, Floats],
    config: AlgorithmConfig,
) -> tuple[dict[str, Floats], tuple[tuple[str, str], ...]]:
    """The advantages [T] of the turns of each trained episode, by its id, and the pairs of DPO."""
    ids = [[rollout.episode.id for rollout in group.rollouts] for group in groups]
    if isinstance(config.policy_loss, SftLoss):
        chosen = [
            members[place]
            for group, members in zip(groups, ids, strict=True)
            for place in best_episodes(group_scores[group.id], min_score=config.policy_loss.sft_min_score)
        ]
        return {episode_id: np.ones(len(rewards[episode_id].turns)) for episode_id in chosen}, ()
    if isinstance(config.policy_loss, DpoLoss):
        pairs = _pairs(groups, group_scores, config)
        signs = {best: 1.0 for best, _ in pairs} | {worst: -1.0 for _, worst in pairs}
        return {i: np.full(len(rewards[i].turns), sign) for i, sign in signs.items()}, pairs
    if config.teacher is not None:
        return {episode_id: np.ones(len(known.turns)) for episode_id, known in rewards.items()}, ()
    if not isinstance(config.estimator, WithinGroups):
        return {episode_id: np.zeros(len(known.turns)) for episode_id, known in rewards.items()}, ()
    by_group = config.estimator.turn_advantages([[rewards[i] for i in members] for members in ids])
    return {
        episode_id: values
        for members, advantages in zip(ids, by_group, strict=True)
        for episode_id, values in zip(members, advantages, strict=True)
    }, ()


def _pairs(
    groups: Sequence[RolloutGroup], group_scores: Mapping[str, Floats], config: AlgorithmConfig
) -> tuple[tuple[str, str], ...]:
    pairs = []
    for group in groups:
        episodes = [rollout.episode for rollout in group.rollouts]
        usable = [any(len(turn.completion) for turn in config.trained_turns.of(e)) for e in episodes]
        pair = preference_pair(group_scores[group.id], usable=usable)
        if pair is not None:
            pairs.append((episodes[pair[0]].id, episodes[pair[1]].id))
    return tuple(pairs)


def _sample(
    trajectory: Trajectory,
    mask: npt.NDArray[np.bool_],
    prefix: npt.NDArray[np.bool_] | None,
    observations: npt.NDArray[np.bool_] | None,
    places: npt.NDArray[np.int32],
    advantages: Floats,
    episode_id: str,
    group_id: str,
    config: AlgorithmConfig,
) -> TrainingSample:
    end = int(np.flatnonzero(mask)[-1]) + 1  # nothing after the last trained token is needed
    turn_index = places[trajectory.turn_index]
    temperatures = trajectory.temperatures
    routing = trajectory.routed_experts
    if config.is_supervised:  # the loss uses temperature 1, whatever the temperature of the sampling
        temperatures = np.ones_like(temperatures)
        routing = None
    return TrainingSample(
        token_ids=trajectory.token_ids[:end],
        loss_mask=mask[:end],
        behavior_logprobs=trajectory.behavior_logprobs[:end],
        versions=trajectory.versions[:end],
        temperatures=temperatures[:end],
        advantages=np.where(mask, advantages[turn_index], 0.0).astype(np.float32)[:end],
        turn_index=np.where(trajectory.sampled_mask, turn_index, -1).astype(np.int32)[:end],
        episode_id=episode_id,
        group_id=group_id,
        prefix_mask=None if prefix is None else prefix[:end],
        observation_mask=None if observations is None else observations[:end],
        routed_experts=None if routing is None else routing[:end],
    )


def _refuse_repeats(groups: Sequence[RolloutGroup]) -> None:
    """Raise TrainingError if a group or an episode occurs twice."""
    seen: set[tuple[str, str]] = set()
    for group in groups:
        ids = [("group", group.id), *(("episode", rollout.episode.id) for rollout in group.rollouts)]
        for kind, known in ids:
            if (kind, known) in seen:
                raise TrainingError(f"group {group.id}: {kind} {known} is in the batch twice")
            seen.add((kind, known))


def _check_episode(episode: RecordedEpisode, group_id: str, config: AlgorithmConfig) -> None:
    where = f"group {group_id}, episode {episode.id}"
    for reward in episode.rewards:
        if not abs(reward.value) <= _LARGEST_REWARD:  # comparisons with NaN are false
            raise TrainingError(
                f"{where}: the reward {reward.name!r} is {reward.value}, expected a number of at most "
                f"{_LARGEST_REWARD:g}"
            )
    for turn in episode.turns:
        sampled, logprobs = turn.completion, turn.completion.logprobs
        if logprobs is None:
            if not config.is_supervised:
                raise TrainingError(f"{where}, turn {turn.id}: {needs_behavior(config)}")
            continue
        if not len(sampled.token_ids) == len(logprobs) == len(sampled.versions):
            raise TrainingError(
                f"{where}, turn {turn.id}: {len(sampled.token_ids)} token ids, {len(logprobs)} "
                f"logprobs and {len(sampled.versions)} versions; a completion has one of each per token"
            )


def needs_behavior(config: AlgorithmConfig) -> str:
    """Say why an algorithm cannot train on imported turns."""
    return (
        f"imported turns have no behavior logprobs, because no policy sampled them, and algorithm "
        f"{config.preset} (policy_loss: {config.policy_loss.kind}) learns from what the policy sampled; "
        "choose algorithm: sft, or dpo"
    )
