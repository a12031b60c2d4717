"""Computes the advantages of a step again, from the store and the step's records.

The functions are those that the trainer used. Rewards, scores, returns and baselines come from the store;
values of the critic and logprobs, which no store has, come from the records. So every advantage that a record
has can be compared with one that was derived independently of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.credit.advantages import Comparison
from areal_agents.algorithms.credit.estimators import GroupEstimator
from areal_agents.algorithms.credit.returns import EpisodeCredit, RewardToGo
from areal_agents.algorithms.credit.tokens import token_advantages
from areal_agents.algorithms.losses.dpo import DpoLoss, dpo_coefficients
from areal_agents.algorithms.losses.kl import KlInReward, kl_estimate
from areal_agents.algorithms.ordering import ordered_groups
from areal_agents.algorithms.samples import TrainingData, assemble_batch, prepare_group
from areal_agents.algorithms.staleness import mask_stale
from areal_agents.core.rollout import RolloutGroup
from areal_agents.core.sample import TrainingSample
from areal_agents.errors import TrainingError
from areal_agents.training.batches.leasing import keep_samples
from areal_agents.training.records.files import TurnRecord

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class StepCredit:
    """The credit of a step.

    Attributes:
        data: the batch: shaped rewards, scores, and the samples that are within the staleness bound.
        groups: the groups by id.
        comparisons: by group id the returns and baselines of its turns, for `estimator: group` with `credit:
            episode` or `reward_to_go` and without penalties in the reward; empty otherwise.
        advantages: by turn id an array [C], nan where the token is not trained. A turn that is missing has
            no trained token.
    """

    data: TrainingData
    groups: Mapping[str, RolloutGroup]
    comparisons: Mapping[str, Comparison]
    advantages: Mapping[str, Floats]


def recompute(
    groups: Sequence[RolloutGroup],
    records: Sequence[TurnRecord],
    algorithm: AlgorithmConfig,
    *,
    uses: Mapping[str, int],
    version: int | None,
    max_staleness: int | None,
) -> StepCredit:
    """Compute the credit of a step.

    Args:
        groups: every group of the batch, with comparable versions (`Lineage.of_group`).
        records: the step's records; needed for a critic, for penalties and for DPO, else may be empty.
        uses: how often earlier batches were trained on a group, by id; absent: never.
        version: the trainer's version when the batch began; None for recorded groups, which have no bound.

    Raises:
        TrainingError: a group cannot be trained on with these settings, or a record that is needed is
            missing.
    """
    ordered = ordered_groups(groups)
    prepared = [prepare_group(group, algorithm) for group in ordered]
    replayed = {group_id: use for group_id, use in uses.items() if use}
    data = assemble_batch(prepared, algorithm, replayed=replayed)
    if version is not None:
        samples, _ = mask_stale(data.samples, version=version, max_staleness=max_staleness)
        data = keep_samples(data, samples)
    by_turn = {(record.turn_id, record.use): record for record in records}
    places = [_places(sample, data, by_turn) for sample in data.samples]
    if isinstance(algorithm.policy_loss, DpoLoss):
        of_tokens = _of_pairs(data, places, beta=algorithm.policy_loss.dpo_beta)
    elif algorithm.needs_token_credit and data.samples:
        of_tokens = _of_tokens(data, places, algorithm)
    else:
        of_tokens = [sample.advantages[sample.loss_mask] for sample in data.samples]
    comparisons: dict[str, Comparison] = {}
    estimator = algorithm.estimator
    if (
        isinstance(estimator, GroupEstimator)
        and isinstance(estimator.credit, EpisodeCredit | RewardToGo)
        and not algorithm.needs_token_credit
    ):
        members = [[data.rewards[r.episode.id] for r in group.rollouts] for group in ordered]
        comparisons = dict(zip([group.id for group in ordered], estimator.compare(members), strict=True))
    advantages: dict[str, Floats] = {}
    for place, values in zip(places, of_tokens, strict=True):
        for turn, value in zip(place, values, strict=True):
            found = advantages.setdefault(turn.turn_id, np.full(turn.tokens, np.nan, np.float32))
            found[turn.index] = value
    return StepCredit(data, {group.id: group for group in ordered}, comparisons, advantages)


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Where a trained token of a sample is recorded: token `index` of a turn of `tokens` tokens."""

    turn_id: str
    tokens: int
    index: int
    record: TurnRecord | None

    def value(self, name: str) -> float:
        """Return a recorded value. Raises TrainingError if there is none."""
        value = np.nan
        if self.record is not None and self.record.untrained is None:
            value = float(self.record.values[name][self.index])
        if np.isnan(value):
            raise TrainingError(f"turn {self.turn_id}: its record has no {name} of token {self.index}")
        return value


def _places(
    sample: TrainingSample, data: TrainingData, records: Mapping[tuple[str, int], TurnRecord]
) -> list[_Place]:
    """The places of a sample's trained tokens, in order."""
    places, turns = [], data.turns[sample.episode_id]
    use = data.uses.get(sample.group_id, 0)
    first: dict[int, int] = {}
    for position, turn in enumerate(sample.turn_index.tolist()):
        first.setdefault(turn, position)
    for position in np.flatnonzero(sample.loss_mask).tolist():
        turn = int(sample.turn_index[position])
        known = turns[turn]
        places.append(_Place(known.id, known.tokens, position - first[turn], records.get((known.id, use))))
    return places


def _of_tokens(
    data: TrainingData, places: Sequence[Sequence[_Place]], algorithm: AlgorithmConfig
) -> list[Floats]:
    """The advantages of the trained tokens of each sample, from recorded values and logprobs."""

    def spread(value: Callable[[_Place], float]) -> list[Floats]:
        arrays = []
        for sample, of_sample in zip(data.samples, places, strict=True):
            array = np.zeros(int(sample.scored_mask.sum()), np.float32)
            array[sample.loss_mask[sample.scored_mask]] = [value(place) for place in of_sample]
            arrays.append(array)
        return arrays

    values = penalties = None
    if algorithm.needs_critic:
        values = spread(lambda place: place.value("value"))
    if isinstance(algorithm.kl_in, KlInReward):
        estimator = algorithm.kl_in.kl_estimator
        proximal = spread(lambda place: place.value("proximal"))
        reference = spread(lambda place: place.value("reference"))
        penalties = [
            kl_estimate(torch.from_numpy(a), torch.from_numpy(b), estimator=estimator).numpy()
            for a, b in zip(proximal, reference, strict=True)
        ]
    credit = token_advantages(data, values=values, penalties=penalties, config=algorithm)
    return [
        array[sample.loss_mask[sample.scored_mask]]
        for sample, array in zip(data.samples, credit.advantages, strict=True)
    ]


def _of_pairs(data: TrainingData, places: Sequence[Sequence[_Place]], *, beta: float) -> list[Floats]:
    """The coefficients of DPO at the trained tokens of each sample; a pair is in one minibatch."""
    sums: dict[str, dict[str, float]] = {"current": {}, "reference": {}}
    minibatch: dict[str, int | None] = {}
    for sample, of_sample in zip(data.samples, places, strict=True):
        for name, of_name in sums.items():
            total = float(np.sum([place.value(name) for place in of_sample], dtype=np.float64))
            of_name[sample.episode_id] = of_name.get(sample.episode_id, 0.0) + total
        record = of_sample[0].record
        assert record is not None
        minibatch[sample.episode_id] = record.minibatch
    by_episode: dict[str, float] = {}
    for part in set(minibatch.values()):
        pairs = [pair for pair in data.pairs if minibatch[pair[0]] == part]
        by_episode |= dpo_coefficients(sums["current"], sums["reference"], pairs, beta=beta).by_episode
    return [
        np.full(len(of_sample), by_episode[sample.episode_id], np.float32)
        for sample, of_sample in zip(data.samples, places, strict=True)
    ]
