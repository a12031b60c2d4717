"""Advantages of single tokens: with a critic (GAE), or with penalties in the rewards of tokens.

Here an episode is one sequence of states: its trained tokens, turn by turn in recording order. The reward of
a turn is received at its last token, the episode's reward once, at the end. Tokens between two trained tokens
are part of the step from the first to the second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.credit.advantages import whitened
from areal_agents.algorithms.credit.estimators import GaeEstimator, GaeLevel, GroupEstimator
from areal_agents.algorithms.credit.returns import EpisodeCredit, RewardToGo
from areal_agents.algorithms.credit.rewards import EpisodeRewards, Floats
from areal_agents.algorithms.losses.kl import KlInReward
from areal_agents.algorithms.samples import TrainingData
from areal_agents.core.sample import TrainingSample
from areal_agents.errors import TrainingError

Array = npt.NDArray[np.floating]
_ByTurn = Mapping[int, Floats]  # turn index → one number per trained token of the turn


@dataclass(frozen=True, slots=True, eq=False)
class TokenCredit:
    """Per sample, over its N_s scored tokens in order; 0 where a scored token is not trained.

    Attributes:
        advantages: [N_s] each.
        value_targets: [N_s] each, the targets of the critic; None without a critic.
    """

    advantages: list[npt.NDArray[np.float32]]
    value_targets: list[npt.NDArray[np.float32]] | None


def token_advantages(
    data: TrainingData,
    *,
    values: Sequence[Array] | None,
    penalties: Sequence[Array] | None,
    config: AlgorithmConfig,
) -> TokenCredit:
    """Compute the advantage of every trained token of a batch.

    With a critic the advantages are computed by `gae` and whitened over tokens. Without a critic the return
    of a token is the return of its turn less the penalties of this token and of later ones
    (`penalties_to_go`). The baseline is the mean over episodes, each counted once, of the return less the
    mean penalty to go of the episode's tokens; with `advantage_statistics: token` it is the mean over tokens.

    Args:
        data: the result of `build_training_data`; tokens that were masked afterwards are not states.
        values: per sample the critic's V(state before each scored token), [N_s]; None without a critic.
        penalties: per sample an estimate of KL(proximal, reference) at each scored token, [N_s]; multiplied
            by the KL's coefficient, it is subtracted from the token's reward. None if kl_in is not "reward".

    Raises:
        ValueError: values or penalties that the algorithm needs are missing, or ones that it does not use are
            given.
        TrainingError: values or penalties are not one finite number per scored token; the message names the
            group and the episode.

    Source: GAE, arXiv 1506.02438; REINFORCE++, arXiv 2501.03262, eq. 8-10.
    """
    samples = data.samples
    for name, given, needed in (
        ("values", values, config.needs_critic),
        ("penalties", penalties, isinstance(config.kl_in, KlInReward)),
    ):
        if (given is not None) != needed:
            expected = "are required, got None" if needed else "must be None, because they are not used"
            raise ValueError(f"{name} {expected} (preset {config.preset})")
    if not config.needs_token_credit:
        return TokenCredit([sample.advantages[sample.scored_mask] for sample in samples], None)
    sizes = [int(sample.loss_mask.sum()) for sample in samples]
    costs = np.zeros(sum(sizes))
    if penalties is not None:
        assert isinstance(config.kl_in, KlInReward)
        costs = config.kl_in.kl_coefficient * _joined("penalties", penalties, samples)
    group_ids = [sample.group_id for sample in samples]
    estimator = config.estimator
    if isinstance(estimator, GaeEstimator):
        assert values is not None
        made, targets = _with_critic(data, _joined("values", values, samples), costs, estimator)
        white = whitened(
            _split(made, sizes),
            group_ids,
            mean=estimator.advantage_mean,
            std=estimator.advantage_std,
            std_estimator=estimator.std_estimator,
        )
        return TokenCredit(_scored(white, samples), _scored(_split(targets, sizes), samples))
    assert isinstance(estimator, GroupEstimator)
    if estimator.advantage_statistics == "token":
        white = whitened(
            _split(_token_returns(data, costs, estimator), sizes),
            group_ids,
            mean=estimator.advantage_mean,
            std=estimator.advantage_std,
            std_estimator=estimator.std_estimator,
        )
        return TokenCredit(_scored(white, samples), None)
    return TokenCredit(_scored(_split(_without_critic(data, costs, estimator), sizes), samples), None)


def gae(
    rewards: EpisodeRewards,
    *,
    values: _ByTurn,
    costs: _ByTurn,
    discount: float,
    decay: float,
    level: GaeLevel,
) -> tuple[dict[int, Floats], dict[int, Floats]]:
    """Generalised advantage estimation over the turns of an episode in recording order.

        δ_i = r_i + γ V_{i+1} − V_i        A_i = δ_i + γλ A_{i+1}        target_i = A_i + V_i

    With level "token" a state is a trained token, and the first of the next turn follows the last of a turn.
    With level "turn" a state is a turn: its value is V before its first token, its reward is reduced by all
    its penalties, and every token has the turn's advantage and target. The turn's own reward is received at
    its last token, the episode's reward at the last token of the last turn, and the value after that is 0. A
    turn without a trained token has no value of its own; its reward belongs to the step that spans it. At
    level "turn" such a turn still counts as a step.

    With γ = λ = 1, no costs and values 0, an advantage is the sum of the rewards from its turn on.

    Args:
        values, costs: per turn with trained tokens, one number per token.
        discount: γ, in [0, 1].
        decay: λ, in [0, 1].

    Returns:
        Advantages and value targets, in the form of `values`.

    Source: arXiv 1506.02438, eq. 16.
    """
    advantages: dict[int, Floats] = {}
    targets: dict[int, Floats] = {}
    next_value = next_advantage = 0.0
    reward = rewards.episode
    for turn in reversed(range(len(rewards.turns))):
        reward += float(rewards.turns[turn])
        if turn not in values:
            # For earlier turns, the value of what follows grows by `reward`.
            passed = 1.0 if level == "token" else discount
            next_value = reward + passed * next_value
            next_advantage *= 1.0 if level == "token" else discount * decay
            reward = 0.0
            continue
        known = values[turn]
        if level == "turn":
            delta = reward - costs[turn].sum() + discount * next_value - known[0]
            advantages[turn] = np.full(len(known), delta + discount * decay * next_advantage)
        else:
            deltas = discount * np.append(known[1:], next_value) - known - costs[turn]
            deltas[-1] += reward
            advantages[turn] = _discounted_sums(deltas, discount * decay, next_advantage)
        targets[turn] = advantages[turn] + (known[0] if level == "turn" else known)
        next_value, next_advantage = float(known[0]), float(advantages[turn][0])
        reward = 0.0
    return advantages, targets


def penalties_to_go(rewards: EpisodeRewards, costs: _ByTurn, *, turn_discount: float) -> dict[int, Floats]:
    """The sum of the penalties of each trained token and of later tokens, in the form of `costs`.

    The sum covers the rest of the token's turn, the token itself included, and the turns that were recorded
    after it, which are discounted by turn_discount^max(0, difference in depth), as rewards to go are.
    """
    depths = rewards.depths
    out: dict[int, Floats] = {}
    later = np.zeros(len(rewards.turns))  # the total penalty of each turn already visited
    for turn in reversed(range(len(rewards.turns))):
        if turn not in costs:
            continue
        exponents = np.maximum(depths[turn + 1 :] - depths[turn], 0)
        after = float((turn_discount**exponents * later[turn + 1 :]).sum())
        out[turn] = costs[turn][::-1].cumsum()[::-1] + after
        later[turn] = costs[turn].sum()
    return out


def _with_critic(
    data: TrainingData, values: Floats, costs: Floats, estimator: GaeEstimator
) -> tuple[Floats, Floats]:
    advantages, targets = np.empty_like(values), np.empty_like(values)
    for episode_id, spans in _spans(data.samples).items():
        made, wanted = gae(
            data.rewards[episode_id],
            values={turn: values[span] for turn, span in spans.items()},
            costs={turn: costs[span] for turn, span in spans.items()},
            discount=estimator.gae_discount,
            decay=estimator.gae_lambda,
            level=estimator.gae_level,
        )
        for turn, span in spans.items():
            advantages[span], targets[span] = made[turn], wanted[turn]
    return advantages, targets


def _paid(data: TrainingData, costs: Floats, estimator: GroupEstimator) -> Floats:
    """Return [N], the sum of the penalties of each trained token and of later tokens."""
    credit = estimator.credit
    discount = credit.turn_discount if isinstance(credit, RewardToGo) else 1.0
    paid = np.empty_like(costs)
    for episode_id, spans in _spans(data.samples).items():
        of_turns = penalties_to_go(
            data.rewards[episode_id],
            {turn: costs[span] for turn, span in spans.items()},
            turn_discount=discount,
        )
        for turn, span in spans.items():
            paid[span] = of_turns[turn]
    return paid


def _token_returns(data: TrainingData, costs: Floats, estimator: GroupEstimator) -> Floats:
    """Return [N], the return of each trained token minus the penalties of this token and of later ones."""
    credit = estimator.credit
    assert isinstance(credit, EpisodeCredit | RewardToGo)
    returns = -_paid(data, costs, estimator)
    for episode_id, spans in _spans(data.samples).items():
        rewards = data.rewards[episode_id]
        of_turns = credit.after(rewards, rewards.recorded_before)
        for turn, span in spans.items():
            returns[span] += of_turns[turn]
    return returns


def _without_critic(data: TrainingData, costs: Floats, estimator: GroupEstimator) -> Floats:
    """Return [N], the advantages relative to baselines over episodes, each episode counted once."""
    members: dict[str, list[str]] = {}
    for episode_id, rewards in data.rewards.items():
        members.setdefault(rewards.group_id, []).append(episode_id)
    paid, spans = _paid(data, costs, estimator), _spans(data.samples)

    def mean_paid(episode_id: str) -> float:
        of_turns = [paid[span] for span in spans.get(episode_id, {}).values()]
        return float(np.concatenate(of_turns).mean()) if of_turns else 0.0

    comparisons = estimator.compare(
        [[data.rewards[i] for i in ids] for ids in members.values()],
        reductions=[[mean_paid(i) for i in ids] for ids in members.values()],
    )
    advantages = np.empty_like(costs)
    for ids, comparison in zip(members.values(), comparisons, strict=True):
        for place, episode_id in enumerate(ids):
            over = comparison.returns[place] - comparison.baselines[place]
            for turn, span in spans.get(episode_id, {}).items():
                advantages[span] = (over[turn] - paid[span]) * comparison.scale
    return advantages


def _discounted_sums(deltas: Floats, factor: float, after: float) -> Floats:
    """Σ_{j ≥ i} factor^(j − i) δ_j, where `after` is the sum that follows the last δ."""
    if factor == 1:
        return np.asarray(deltas[::-1].cumsum()[::-1] + after)
    sums = deltas.tolist()
    for place in reversed(range(len(sums))):
        sums[place] += factor * after
        after = sums[place]
    return np.array(sums)


def _spans(samples: Sequence[TrainingSample]) -> dict[str, dict[int, slice]]:
    """By episode and turn, the slice of the turn's trained tokens among those of all samples."""
    spans: dict[str, dict[int, slice]] = {}
    offset = 0
    for sample in samples:
        turns = sample.turn_index[sample.loss_mask]
        edges = [0, *(np.flatnonzero(np.diff(turns)) + 1).tolist(), len(turns)]
        of_episode = spans.setdefault(sample.episode_id, {})
        for start, stop in zip(edges[:-1], edges[1:], strict=True):
            if int(turns[start]) in of_episode:
                raise ValueError(
                    f"episode {sample.episode_id}: turn {turns[start]} must be trained in one place"
                )
            of_episode[int(turns[start])] = slice(offset + start, offset + stop)
        offset += len(turns)
    return spans


def _joined(name: str, arrays: Sequence[Array], samples: Sequence[TrainingSample]) -> Floats:
    """Check the arrays and return one array [N] of the numbers at the trained tokens of all samples."""
    if len(arrays) != len(samples):
        raise ValueError(f"{name} must have one array per sample, {len(samples)}, got {len(arrays)}")
    for array, sample in zip(arrays, samples, strict=True):
        tokens = int(sample.scored_mask.sum())
        if array.shape != (tokens,) or not np.isfinite(array).all():
            raise TrainingError(
                f"group {sample.group_id}, episode {sample.episode_id}: {name} must be one finite number for "
                f"each of {tokens} scored tokens, got shape {array.shape} with "
                f"{int(np.isfinite(array).sum())} finite"
            )
    trained = [a[s.loss_mask[s.scored_mask]] for a, s in zip(arrays, samples, strict=True)]
    return np.concatenate([*trained, np.empty(0)]).astype(np.float64)


def _split(flat: Floats, sizes: Sequence[int]) -> list[Floats]:
    ends = np.cumsum(sizes, dtype=np.int64)
    return [flat[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _scored(arrays: Sequence[Floats], samples: Sequence[TrainingSample]) -> list[npt.NDArray[np.float32]]:
    """Spread the numbers of trained tokens over the scored tokens, with 0 at tokens that are not trained."""
    out = []
    for array, sample in zip(arrays, samples, strict=True):
        spread = np.zeros(int(sample.scored_mask.sum()), np.float32)
        spread[sample.loss_mask[sample.scored_mask]] = array
        out.append(spread)
    return out
