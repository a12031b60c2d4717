"""Lays out a batch for its passes: minibatches, this rank's micro-batches, and the position of each token.

The first rank has the batch, packs it, and sends each rank its micro-batches and no others.

The scored tokens of a batch are numbered 0 … M − 1, minibatch after minibatch, sample after sample. They are
the trained tokens, those that are only needed for the ratios of whole paths (`TrainingSample.prefix_mask`),
and the observations (`TrainingSample.observation_mask`).
The result of a pass is one array [M], complete and equal on every rank, so everything that is computed from
it is equal too. A micro-batch takes its share by the indices of its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.demonstrations import with_demonstrations
from areal_agents.algorithms.losses.dpo import DpoLoss
from areal_agents.algorithms.losses.observation import observation_weights
from areal_agents.algorithms.packing.balance import imbalance
from areal_agents.algorithms.packing.flops import ModelShape
from areal_agents.algorithms.packing.microbatches import MicroBatch, pack
from areal_agents.algorithms.packing.minibatches import split_minibatches
from areal_agents.algorithms.samples import TrainingData
from areal_agents.algorithms.staleness import age_weights
from areal_agents.core.sample import TrainingSample
from areal_agents.errors import TrainingError
from areal_agents.training.distributed import Ranks
from areal_agents.training.step.wire import TURN_BITS, WireBatch, from_wire, narrow, to_wire

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TrainedTurn:
    """A turn with a trained token, as its records name it.

    Attributes:
        use: how often earlier batches were trained on its group.
        start: position of its first sampled token in the sequence.
        tokens: number of its sampled tokens.
        stale: those of them that are not trained because they exceed the staleness bound, by their index in
            the turn.
    """

    group_id: str
    episode_id: str
    turn_id: str
    use: int
    start: int
    tokens: int
    stale: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class PlannedMicroBatch:
    """One micro-batch of this rank.

    Attributes:
        indices: [N] int64, the indices of its scored tokens in the batch.
        turns: the turns that it trains, by `MicroBatch.turn_ids`; empty unless tokens are recorded.
    """

    batch: MicroBatch
    indices: Tensor
    turns: Mapping[int, TrainedTurn] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (to_wire(self.batch), narrow(self.indices), dict(self.turns))


@dataclass(frozen=True, slots=True, eq=False)
class Minibatch:
    """The data of one optimizer step.

    Attributes:
        samples: its samples over all ranks, on the first rank; empty on the others.
        tokens: the indices of its scored tokens.
        work: this rank's micro-batches; every rank has the same number.
    """

    samples: tuple[TrainingSample, ...]
    tokens: slice
    work: tuple[PlannedMicroBatch, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """The cost of the passes over a batch, over all ranks.

    Attributes:
        microbatches: number of micro-batches. model_tokens: tokens that go through the model; sample_tokens:
            what they would be without shared prefixes.
        scored_tokens: tokens whose logprob is computed.
        fill: model tokens / token capacity of the micro-batches that train something.
        imbalance: FLOPs of the busiest rank / mean − 1, summed over the minibatches, because all ranks wait
            at the end of each.
        rank_tokens: model tokens by data rank.
        forward_flops: FLOPs of one forward pass over the batch.
    """

    microbatches: int
    model_tokens: int
    sample_tokens: int
    scored_tokens: int
    fill: float
    imbalance: float
    rank_tokens: tuple[int, ...]
    forward_flops: float


@dataclass(frozen=True, slots=True, eq=False)
class BatchPlan:
    """The layout of a batch.

    Attributes:
        data: the batch, on the first rank, with the samples in the order of the minibatches; None on the
            others.
        tokens: M, the number of scored tokens.
        with_demonstrations: this rank's micro-batches of the same tokens, each sample after its
            demonstration; empty without self-distillation.
    """

    data: TrainingData | None
    minibatches: tuple[Minibatch, ...]
    tokens: int
    load: Load
    with_demonstrations: tuple[PlannedMicroBatch, ...] = ()

    @property
    def work(self) -> list[PlannedMicroBatch]:
        """This rank's micro-batches of all minibatches."""
        return [work for minibatch in self.minibatches for work in minibatch.work]

    @property
    def samples(self) -> tuple[TrainingSample, ...]:
        """The samples of the batch, in the order of the minibatches. On the first rank only."""
        assert self.data is not None, "only the first rank has the samples"
        return self.data.samples


def by_sample(values: Tensor, samples: Sequence[TrainingSample]) -> list[Floats]:
    """Split values of the scored tokens of consecutive samples into an array [N_s] per sample."""
    counts = [int(sample.scored_mask.sum()) for sample in samples]
    return np.split(values.float().cpu().numpy(), np.cumsum(counts)[:-1])


def lay_out(
    data: TrainingData | None,
    algorithm: AlgorithmConfig,
    *,
    ranks: Ranks,
    shape: ModelShape,
    token_budget: int,
    share_prefixes: bool,
    seed: int,
    downweight_at: int | None = None,
    names_turns: bool = False,
) -> BatchPlan:
    """Cut a batch into minibatches, pack each, and return this rank's part. Collective.

    Args:
        data: the batch, on the first rank; None on the others.
        seed: seed of the order of the minibatches.
        downweight_at: the trainer's version if older tokens count less (`staleness.age_weights`), else None.
        names_turns: whether micro-batches name their turns, because their tokens are recorded.

    Raises:
        TrainingError: a sample does not fit a micro-batch.
        ValueError: there are no samples.
    """
    packing = _Packing(ranks.data_count, shape, token_budget, share_prefixes)
    shares: Sequence[BatchPlan | Exception] | None = None
    if data is not None:
        try:
            shares = _shares(
                data, algorithm, packing, seed=seed, downweight_at=downweight_at, names_turns=names_turns
            )
        except (TrainingError, ValueError) as error:
            shares = [error] * ranks.data_count
        shares = [_without_batch(shares[rank // ranks.context_count], rank) for rank in range(ranks.count)]
    share = ranks.scatter(shares)
    if isinstance(share, Exception):
        raise share
    return replace(
        share,
        minibatches=tuple(replace(one, work=_placed(one.work, ranks)) for one in share.minibatches),
        with_demonstrations=_placed(share.with_demonstrations, ranks),
    )


@dataclass(frozen=True, slots=True)
class _Packing:
    """How samples are packed, see `pack`."""

    ranks: int
    shape: ModelShape
    token_budget: int
    share_prefixes: bool

    def __call__(
        self, samples: Sequence[TrainingSample], *, weights: Sequence[Floats] | None = None
    ) -> list[MicroBatch]:
        return pack(
            samples,
            token_budget=self.token_budget,
            ranks=self.ranks,
            share_prefixes=self.share_prefixes,
            weights=weights,
            shape=self.shape,
        )


def _without_batch(share: BatchPlan | Exception, rank: int) -> BatchPlan | Exception:
    """Return a share as a rank gets it: those that share rank 0's sequences get no samples."""
    if rank == 0 or isinstance(share, Exception):
        return share
    minibatches = tuple(replace(one, samples=()) for one in share.minibatches)
    return replace(share, data=None, minibatches=minibatches)


def _shares(
    data: TrainingData,
    algorithm: AlgorithmConfig,
    packing: _Packing,
    *,
    seed: int,
    downweight_at: int | None,
    names_turns: bool,
) -> list[BatchPlan]:
    """Return the plan of each data rank, on the CPU. That of rank 0 keeps the whole batch."""
    if not data.samples:
        raise ValueError("expected at least one sample to train on, got none")
    count = algorithm.minibatches
    # minibatches of whole groups, since both episodes of a pair are in one group
    if isinstance(algorithm.policy_loss, DpoLoss):
        count = min(count, len({sample.group_id for sample in data.samples}))
    parts = split_minibatches(data.samples, count, seed=seed)
    packed = []
    for part in parts:
        losses = zip(_loss_weights(part, algorithm, downweight_at), observation_weights(part), strict=True)
        packed.append(packing(part, weights=[policy + observation for policy, observation in losses]))
    minibatches: list[list[Minibatch]] = [[] for _ in range(packing.ranks)]
    start = 0
    for part, batches in zip(parts, packed, strict=True):
        turns = _trained_turns(part, data) if names_turns else {}
        work = _by_rank(part, batches, start, packing.ranks, turns)
        tokens = slice(start, start + sum(int(sample.scored_mask.sum()) for sample in part))
        for rank, own in enumerate(work):
            minibatches[rank].append(Minibatch(() if rank else tuple(part), tokens, own))
        start = tokens.stop
    ordered = replace(data, samples=tuple(sample for part in parts for sample in part))
    load = _load(packed, ranks=packing.ranks, shape=packing.shape, token_budget=packing.token_budget)
    demonstrated: list[tuple[PlannedMicroBatch, ...]] = [()] * packing.ranks
    if ordered.demonstrations:
        prefixed = with_demonstrations(ordered.samples, ordered.demonstrations)
        demonstrated = _by_rank(prefixed, packing(prefixed), 0, packing.ranks)
    return [
        BatchPlan(None if rank else ordered, tuple(minibatches[rank]), start, load, demonstrated[rank])
        for rank in range(packing.ranks)
    ]


def _loss_weights(
    part: Sequence[TrainingSample], algorithm: AlgorithmConfig, downweight_at: int | None
) -> list[Floats]:
    """The coefficient c_t of the policy's loss at each scored token; 0 where the token is not trained."""
    if isinstance(algorithm.policy_loss, DpoLoss):  # the coefficients already include the mean over pairs
        return [sample.loss_mask[sample.scored_mask].astype(np.float32) for sample in part]
    weights = algorithm.loss_normalization.weights(part)
    if downweight_at is None:
        return weights
    return [
        weight * age_weights(sample.versions[sample.scored_mask], version=downweight_at)
        for weight, sample in zip(weights, part, strict=True)
    ]


def _by_rank(
    part: Sequence[TrainingSample],
    batches: Sequence[MicroBatch],
    start: int,
    ranks: int,
    turns: Mapping[int, Mapping[int, TrainedTurn]] | None = None,
) -> list[tuple[PlannedMicroBatch, ...]]:
    """Return the micro-batches of each data rank, with the indices of their tokens; those of `part` begin at
    `start`, and `turns` are their trained turns by sample and `MicroBatch.turn_ids`."""
    counts = [int(sample.scored_mask.sum()) for sample in part]
    starts = start + np.cumsum([0, *counts[:-1]])
    work = []
    for batch in batches:
        owners = batch.sample_index.unique().tolist() if turns else []
        named = {turn: name for owner in owners for turn, name in (turns or {})[owner].items()}
        work.append(PlannedMicroBatch(batch, torch.from_numpy(_token_indices(batch, part, starts)), named))
    return [tuple(work[rank::ranks]) for rank in range(ranks)]


def _trained_turns(part: Sequence[TrainingSample], data: TrainingData) -> dict[int, dict[int, TrainedTurn]]:
    """Name the turns that each sample trains, by the sample's index and by `MicroBatch.turn_ids`."""
    named: dict[int, dict[int, TrainedTurn]] = {}
    for index, sample in enumerate(part):
        edges = np.flatnonzero(np.diff(sample.turn_index)) + 1
        spans = zip([0, *edges.tolist()], [*edges.tolist(), len(sample)], strict=True)
        named[index] = {}
        for start, end in spans:
            trained, place = sample.loss_mask[start:end], int(sample.turn_index[start])
            if not trained.any():
                continue
            turn = data.turns[sample.episode_id][place]
            stale = [*np.flatnonzero(~trained).tolist(), *range(end - start, turn.tokens)]
            named[index][(index << TURN_BITS) + place] = TrainedTurn(
                sample.group_id, sample.episode_id, turn.id, data.uses.get(sample.group_id, 0),
                start, turn.tokens, tuple(stale),
            )  # fmt: skip
    return named


def _placed(work: Sequence[PlannedMicroBatch], ranks: Ranks) -> tuple[PlannedMicroBatch, ...]:
    """Return the micro-batches on this rank's device; within a context, its part of each."""
    placed = []
    for one in work:
        batch, indices = one.batch, one.indices
        if ranks.context_count > 1:
            from areal_agents.training.model.context_parallel import local_share, predicted_here

            indices = indices[predicted_here(batch, ranks.context_rank, ranks.context_count)]
            batch = local_share(batch, ranks.context_rank, ranks.context_count, ranks.context_group)
        placed.append(PlannedMicroBatch(batch.to(ranks.device), indices.to(ranks.device), one.turns))
    return tuple(placed)


def _unpacked(
    wire: WireBatch, indices: npt.NDArray[Any], turns: Mapping[int, TrainedTurn]
) -> PlannedMicroBatch:
    return PlannedMicroBatch(from_wire(wire), torch.from_numpy(indices.astype(np.int64)), turns)


def _token_indices(
    batch: MicroBatch, part: Sequence[TrainingSample], starts: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return [N], the index of each scored token: the start of its sample plus the number of scored tokens
    before it in the sample."""
    owners = batch.sample_index.numpy()
    positions = batch.position_ids[batch.predictor_rows].numpy() + 1
    indices = np.empty(len(owners), np.int64)
    for owner in np.unique(owners):
        own = owners == owner
        before = np.cumsum(part[owner].scored_mask) - 1
        indices[own] = starts[owner] + before[positions[own]]
    return indices


def _load(
    packed: Sequence[Sequence[MicroBatch]], *, ranks: int, shape: ModelShape, token_budget: int
) -> Load:
    everything = [batch for batches in packed for batch in batches]
    real = [len(batch.input_ids) for batch in everything if batch.scored_tokens]
    flops = [[batch.forward_flops(shape) for batch in batches] for batches in packed]
    by_rank = [[sum(costs[rank::ranks]) for rank in range(ranks)] for costs in flops]
    whole = sum(map(sum, by_rank))
    return Load(
        microbatches=len(everything),
        model_tokens=sum(len(batch.input_ids) for batch in everything),
        sample_tokens=sum(batch.sample_tokens for batch in everything),
        scored_tokens=sum(batch.scored_tokens for batch in everything),
        fill=sum(real) / (len(real) * token_budget),
        imbalance=sum(imbalance(sums) * sum(sums) for sums in by_rank) / whole,
        rank_tokens=tuple(
            sum(len(batch.input_ids) for batches in packed for batch in batches[rank::ranks])
            for rank in range(ranks)
        ),
        forward_flops=whole,
    )
