"""Advantages of single tokens: a critic's (GAE), and penalties in the token rewards.

Credit flows along the forest of turns as in `credit.turn_returns`: a turn that several turns continue
takes the mean over them, and the episode reward comes at the end of every leaf. Only trained tokens
are states; what stands between two of them is part of the step from one to the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from areal_agents.algorithms.credit.advantages import group_advantages, whitened
from areal_agents.algorithms.config import AlgorithmConfig, GaeLevel
from areal_agents.algorithms.credit.returns import EpisodeCredit, Floats, turn_returns
from areal_agents.algorithms.samples import TrainingData
from areal_agents.core.sample import TrainingSample
from areal_agents.errors import TrainingError

Array = npt.NDArray[np.floating]
_ByTurn = Mapping[int, Floats]  # turn index → one number per trained token of the turn


@dataclass(frozen=True, slots=True, eq=False)
class TokenCredit:
    """Per sample, over its N_s trained tokens in order.

    Attributes:
        advantages: [N_s] each.
        value_targets: [N_s] each, what the critic is fitted to; None without a critic.
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
    """The advantage of every trained token of a batch.

    With a critic the advantages are those of `gae`, whitened over tokens. Without one a token's return is
    its turn's (`credit.turn_returns`) less what it and later tokens pay (`penalties_to_go`), and the
    baseline is over episodes, each once: its score less the mean over its tokens of what they pay.

    Args:
        data: of `build_training_data`; tokens that were masked since are no states.
        values: per sample the critic's V(state before each trained token), [N_s]; None without a critic.
        penalties: per sample an estimate of KL(proximal, reference) at each trained token, [N_s]; times
            `config.kl_coefficient` it is taken off the token's reward. None where kl_in is not "reward".

    Raises:
        ValueError: values or penalties that the algorithm needs are missing, or it has no use for them.
        TrainingError: not one finite number per trained token; the message names group and episode.

    Source: GAE, arXiv 1506.02438; REINFORCE++, arXiv 2501.03262, eq. 8-10.
    """
    samples = data.samples
    for name, given, needed in (
        ("values", values, config.needs_critic),
        ("penalties", penalties, config.kl_in == "reward"),
    ):
        if (given is not None) != needed:
            raise ValueError(f"{name} {'are missing' if needed else 'have no use'}: preset {config.preset}")
    if not config.needs_token_credit:
        return TokenCredit([sample.advantages[sample.loss_mask] for sample in samples], None)
    sizes = [int(sample.loss_mask.sum()) for sample in samples]
    costs = np.zeros(sum(sizes))
    if penalties is not None:
        costs = config.kl_coefficient * _joined("penalties", penalties, samples)
    if values is None:
        return TokenCredit(_float32(_split(_without_critic(data, costs, config), sizes)), None)
    advantages, targets = _with_critic(data, _joined("values", values, samples), costs, config)
    white = whitened(
        _split(advantages, sizes),
        [sample.group_id for sample in samples],
        mean=config.advantage_mean,
        std=config.advantage_std,
        std_estimator=config.std_estimator,
    )
    return TokenCredit(_float32(white), _float32(_split(targets, sizes)))


def gae(
    credit: EpisodeCredit, *, values: _ByTurn, costs: _ByTurn, discount: float, decay: float, level: GaeLevel
) -> tuple[dict[int, Floats], dict[int, Floats]]:
    """Generalised advantage estimation over the forest of an episode: arXiv 1506.02438, eq. 16.

        δ_i = r_i + γ · mean_j V_j − V_i        A_i = δ_i + γλ · mean_j A_j        target_i = A_i + V_i

    where j are the states that follow i. With level "token" a state is a trained token: the next of its
    turn follows it, and the first of every turn that continues its turn follows the last. With level
    "turn" a state is a turn, its value that before its first token, its reward less all it pays; every
    token of it has the turn's advantage and target. The turn's own reward is the last token's, and so is
    the episode reward at a leaf, after which nothing follows. A turn without a trained token has no value
    of its own and takes the one that makes its δ 0; it is a step at level "turn" and none at level "token".

    With γ = λ = 1, no costs and values 0, an advantage is the turn's return of `credit.turn_returns`.

    Args:
        values, costs: per turn with trained tokens, one number per token.
        discount: γ, in [0, 1].
        decay: λ, in [0, 1].

    Returns:
        Advantages and value targets, in the form of `values`.
    """
    following = credit.children()
    enter_value, enter_advantage = np.zeros(len(following)), np.zeros(len(following))  # as a parent sees it
    advantages: dict[int, Floats] = {}
    targets: dict[int, Floats] = {}
    for turn, later in reversed(list(enumerate(following))):
        next_value = float(enter_value[later].mean()) if later else 0.0
        next_advantage = float(enter_advantage[later].mean()) if later else 0.0
        reward = float(credit.rewards[turn]) + (0.0 if later else credit.episode_reward)
        if turn not in values:
            passed = 1.0 if level == "token" else discount
            enter_value[turn] = reward + passed * next_value
            enter_advantage[turn] = (1.0 if level == "token" else discount * decay) * next_advantage
            continue
        known = values[turn]
        if level == "turn":
            delta = reward - costs[turn].sum() + discount * next_value - known[0]
            advantages[turn] = np.full(len(known), delta + discount * decay * next_advantage)
            targets[turn] = advantages[turn] + known[0]
        else:
            deltas = discount * np.append(known[1:], next_value) - known - costs[turn]
            deltas[-1] += reward
            advantages[turn] = _discounted_sums(deltas, discount * decay, next_advantage)
            targets[turn] = advantages[turn] + known
        enter_value[turn], enter_advantage[turn] = known[0], advantages[turn][0]
    return advantages, targets


def penalties_to_go(credit: EpisodeCredit, costs: _ByTurn, *, turn_discount: float) -> dict[int, Floats]:
    """What each trained token and those after it pay, in the form of `costs`.

    The sum over the rest of the token's turn, itself included, plus turn_discount · the mean over the
    turns that continue it: as the rewards of turns are summed.
    """
    following = credit.children()
    whole = np.zeros(len(following))
    out: dict[int, Floats] = {}
    for turn, later in reversed(list(enumerate(following))):
        whole[turn] = turn_discount * whole[later].mean() if later else 0.0
        if turn in costs:
            out[turn] = costs[turn][::-1].cumsum()[::-1] + whole[turn]
            whole[turn] = out[turn][0]
    return out


def _with_critic(
    data: TrainingData, values: Floats, costs: Floats, config: AlgorithmConfig
) -> tuple[Floats, Floats]:
    advantages, targets = np.empty_like(values), np.empty_like(values)
    for episode_id, spans in _spans(data.samples).items():
        made, wanted = gae(
            data.credit[episode_id],
            values={turn: values[span] for turn, span in spans.items()},
            costs={turn: costs[span] for turn, span in spans.items()},
            discount=config.gae_discount,
            decay=config.gae_lambda,
            level=config.gae_level,
        )
        for turn, span in spans.items():
            advantages[span], targets[span] = made[turn], wanted[turn]
    return advantages, targets


def _without_critic(data: TrainingData, costs: Floats, config: AlgorithmConfig) -> Floats:
    tokens = {episode_id: np.empty(0, np.int64) for episode_id in data.credit}  # of an episode, among all
    returns = np.empty_like(costs)
    scores = {episode_id: credit.score for episode_id, credit in data.credit.items()}
    for episode_id, spans in _spans(data.samples).items():
        credit = data.credit[episode_id]
        paid = penalties_to_go(
            credit, {turn: costs[span] for turn, span in spans.items()}, turn_discount=config.turn_discount
        )
        of_turns = turn_returns(credit, turn_discount=config.turn_discount)
        for turn, span in spans.items():
            returns[span] = of_turns[turn] - paid[turn]
        tokens[episode_id] = np.concatenate([np.arange(span.start, span.stop) for span in spans.values()])
        scores[episode_id] -= float(np.concatenate(list(paid.values())).mean())
    members: dict[str, list[str]] = {}
    for episode_id, credit in data.credit.items():
        members.setdefault(credit.group_id, []).append(episode_id)
    by_group = group_advantages(
        [[returns[tokens[episode_id]] for episode_id in ids] for ids in members.values()],
        [[scores[episode_id] for episode_id in ids] for ids in members.values()],
        mean=config.advantage_mean,
        std=config.advantage_std,
        std_estimator=config.std_estimator,
        leave_one_out=config.leave_one_out,
    )
    advantages = np.empty_like(costs)
    for ids, of_group in zip(members.values(), by_group, strict=True):
        for episode_id, of_episode in zip(ids, of_group, strict=True):
            advantages[tokens[episode_id]] = of_episode
    return advantages


def _discounted_sums(deltas: Floats, factor: float, after: float) -> Floats:
    """Σ_{j ≥ i} factor^(j − i) δ_j, and `after` one step behind the last."""
    if factor == 1:
        return np.asarray(deltas[::-1].cumsum()[::-1] + after)
    sums = deltas.tolist()
    for place in reversed(range(len(sums))):
        sums[place] += factor * after
        after = sums[place]
    return np.array(sums)


def _spans(samples: Sequence[TrainingSample]) -> dict[str, dict[int, slice]]:
    """By episode and turn, where the turn's trained tokens are among those of all samples."""
    spans: dict[str, dict[int, slice]] = {}
    offset = 0
    for sample in samples:
        turns = sample.turn_index[sample.loss_mask]
        edges = [0, *(np.flatnonzero(np.diff(turns)) + 1).tolist(), len(turns)]
        of_episode = spans.setdefault(sample.episode_id, {})
        for start, stop in zip(edges[:-1], edges[1:], strict=True):
            if int(turns[start]) in of_episode:
                raise ValueError(f"episode {sample.episode_id}: turn {turns[start]} is trained in two places")
            of_episode[int(turns[start])] = slice(offset + start, offset + stop)
        offset += len(turns)
    return spans


def _joined(name: str, arrays: Sequence[Array], samples: Sequence[TrainingSample]) -> Floats:
    """One array [N] of all samples' numbers, checked."""
    if len(arrays) != len(samples):
        raise ValueError(f"{name} of {len(arrays)} samples, expected those of {len(samples)}")
    for array, sample in zip(arrays, samples, strict=True):
        tokens = int(sample.loss_mask.sum())
        if array.shape != (tokens,) or not np.isfinite(array).all():
            raise TrainingError(
                f"group {sample.group_id}, episode {sample.episode_id}: {name} of shape {array.shape}, "
                f"{int(np.isfinite(array).sum())} of them finite, for {tokens} trained tokens"
            )
    return np.concatenate([*arrays, np.empty(0)]).astype(np.float64)


def _split(flat: Floats, sizes: Sequence[int]) -> list[Floats]:
    ends = np.cumsum(sizes, dtype=np.int64)
    return [flat[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _float32(arrays: Sequence[Floats]) -> list[npt.NDArray[np.float32]]:
    return [array.astype(np.float32) for array in arrays]
