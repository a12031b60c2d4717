"""Packs samples into micro-batches within a token budget: the same number for each rank, of about equal cost.

A micro-batch separates what the model reads (the token tree, [T]) from what the loss needs (one
entry per scored token, [N], pointing at the row whose output predicts it). A row that several
samples share can carry several entries, so sharing never changes which tokens are trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from areal_agents.algorithms.packing.flops import ModelShape
from areal_agents.algorithms.packing.model_inputs import ImageRows, image_rows, merge_keys, routed_rows
from areal_agents.algorithms.packing.placement import place
from areal_agents.algorithms.packing.token_tree import Segment, TokenTree, build_forest, build_tree
from areal_agents.core.sample import TrainingSample
from areal_agents.errors import TrainingError

# A shorter common prefix is not shared: otherwise samples that have in common only what a chat template
# writes before every prompt would form a token tree, whose attention is slower.
MIN_SAVED = 32


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """One forward and backward pass.

    Attributes:
        input_ids, position_ids: [T] int64.
        segments: which rows attend to which, see `token_tree`.
        predictor_rows: [N] int64, the row that predicts each scored token.
        target_ids: [N] int64, the scored tokens.
        trained: [N] bool, sampled tokens with a gradient. Those of the other tokens that are in
            `TrainingSample.prefix_mask` are trained by another sample.
        behavior_logprobs, temperatures, advantages: [N] float32.
        loss_weights: [N] float32, the factor of each token's loss; the loss is the sum.
        versions: [N] int64, the policy version that sampled each token.
        sample_index: [N] int64, the index in the packed list of the sample that each token belongs to.
        turn_ids: [N] int64, equal for tokens of one turn of one sample only.
        sample_tokens: number of tokens that the samples have without sharing.
        context_group: the ranks that hold the other rows; None if this rank has all T rows. If it is set,
            `segments` cover all rows, whereas the other arrays cover the rows of this rank ([T]) and the
            tokens that they predict ([N]).
        observed: [N] bool, the tokens of `TrainingSample.observation_mask`; None if there are none.
        images: the images; None if there are none. routed_experts: [T, layers, k] int64, the experts that the
            engine chose, -1 if it did not return them; None if there are none at all. See `model_inputs`.
    """

    input_ids: Tensor
    position_ids: Tensor
    segments: tuple[Segment, ...]
    predictor_rows: Tensor
    target_ids: Tensor
    trained: Tensor
    behavior_logprobs: Tensor
    temperatures: Tensor
    advantages: Tensor
    loss_weights: Tensor
    versions: Tensor
    sample_index: Tensor
    turn_ids: Tensor
    sample_tokens: int
    context_group: ProcessGroup | None = None
    observed: Tensor | None = None
    images: ImageRows | None = None
    routed_experts: Tensor | None = None

    @property
    def scored_tokens(self) -> int:
        """N."""
        return len(self.target_ids)

    def forward_flops(self, shape: ModelShape) -> float:
        """FLOPs of a forward pass: shared rows count once, and attention counts the rows attended to."""
        pairs = sum(segment.pairs for segment in self.segments)
        rows = self.segments[-1].end
        return shape.flops(rows=rows, pairs=pairs, predictions=self.scored_tokens)

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same micro-batch with its tensors on `device`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in values.items() if isinstance(value, Tensor | ImageRows)
        }
        return replace(self, **moved)


def pack(
    samples: Sequence[TrainingSample],
    *,
    token_budget: int,
    ranks: int = 1,
    share_prefixes: bool = True,
    weights: Sequence[npt.NDArray[np.float32]] | None = None,
    shape: ModelShape | None = None,
) -> list[MicroBatch]:
    """Pack the samples into micro-batches of at most `token_budget` model tokens; their number is a multiple
    of `ranks`.

    Samples with a common prefix stay together, so that it is computed once, unless they do not
    fit or a rank would wait for another. `batches[r::ranks]` are those of rank r, the costliest first.
    If there are too few samples for the ranks, micro-batches of one token that trains nothing are added,
    because every rank takes part in every collective.

    Args:
        weights: per sample [N_s], the factors of the loss of its scored tokens. By default the factors of all
            trained tokens are equal and sum to 1.
        shape: the model shape from which the cost of a micro-batch is computed; without it, each token costs
            1.

    Raises:
        TrainingError: a sample alone is longer than the budget.
        ValueError: there are no samples, or the weights are not one per scored token.
    """
    if not samples:
        raise ValueError("a batch must have at least one sample, got none")
    counts = [int(sample.scored_mask.sum()) for sample in samples]
    if weights is None:
        trained = [sample.loss_mask[sample.scored_mask] for sample in samples]
        total = np.float32(sum(int(mask.sum()) for mask in trained))
        weights = [(mask / total).astype(np.float32) for mask in trained]
    if [len(array) for array in weights] != counts:
        raise ValueError(
            f"weights must have one number per scored token, {counts}, got {[len(w) for w in weights]}"
        )
    inputs = [_model_input(sample) for sample in samples]
    for sample, tokens in zip(samples, inputs, strict=True):
        if len(tokens) > token_budget:
            raise TrainingError(
                f"group {sample.group_id}, episode {sample.episode_id}: a sample of {len(tokens)} tokens "
                f"does not fit a micro-batch of {token_budget}; raise trainer.microbatch_tokens"
            )
    keys = merge_keys(samples, [len(tokens) for tokens in inputs])
    forest = build_forest(inputs, min_saved=MIN_SAVED if share_prefixes else None, keys=keys)
    bins = place(forest, counts, token_budget=token_budget, ranks=ranks, shape=shape)
    filler = build_tree([inputs[0][:1]])
    return [
        _microbatch(samples, members, forest.layout(members) if members else filler, weights)
        for members in map(sorted, bins)
    ]


def _model_input(sample: TrainingSample) -> npt.NDArray[np.int32]:
    """The tokens that the model must read: those before the last trained token."""
    return sample.token_ids[: int(np.flatnonzero(sample.loss_mask)[-1])]


def _microbatch(
    samples: Sequence[TrainingSample],
    indices: Sequence[int],
    tree: TokenTree,
    weights: Sequence[npt.NDArray[np.float32]],
) -> MicroBatch:
    members = [samples[i] for i in indices]
    scored = [np.flatnonzero(sample.scored_mask) for sample in members]

    def gather(name: str, dtype: torch.dtype) -> Tensor:
        arrays = [getattr(samples[i], name)[at] for i, at in zip(indices, scored, strict=True)]
        return torch.from_numpy(np.concatenate([np.empty(0), *arrays])).to(dtype)

    rows = [tree.rows[j][at - 1] for j, at in enumerate(scored)]
    owners = [np.full(len(at), i) for i, at in zip(indices, scored, strict=True)]
    turns = [
        sample.turn_index[at].astype(np.int64) + (i << 32)
        for i, sample, at in zip(indices, members, scored, strict=True)
    ]
    return MicroBatch(
        input_ids=torch.from_numpy(tree.token_ids),
        position_ids=torch.from_numpy(tree.position_ids),
        segments=tree.segments,
        predictor_rows=torch.from_numpy(np.concatenate([np.empty(0, np.int64), *rows])),
        target_ids=gather("token_ids", torch.int64),
        trained=gather("loss_mask", torch.bool),
        behavior_logprobs=gather("behavior_logprobs", torch.float32),
        temperatures=gather("temperatures", torch.float32),
        advantages=gather("advantages", torch.float32),
        loss_weights=torch.from_numpy(
            np.concatenate([np.empty(0, np.float32), *(weights[i] for i in indices)])
        ),
        versions=gather("versions", torch.int64),
        sample_index=torch.from_numpy(np.concatenate([np.empty(0, np.int64), *owners])),
        turn_ids=torch.from_numpy(np.concatenate([np.empty(0, np.int64), *turns])),
        sample_tokens=sum(int(at[-1]) for at in scored),
        observed=gather("observed", torch.bool) if any(s.observed.any() for s in members) else None,
        images=image_rows(members, tree.rows[: len(members)]),
        routed_experts=routed_rows(members, tree.rows[: len(members)], len(tree.token_ids)),
    )
