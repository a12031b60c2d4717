"""Samples packed into micro-batches by a token budget, as many on every rank.

A micro-batch keeps apart what the model reads (the token tree, [T]) and what the loss needs (one
entry per trained token, [N], pointing at the row whose output predicts it). A row that several
samples share can carry several entries, so sharing never changes which tokens are trained.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from areal_agents.algorithms.token_tree import Segment, TokenTree, build_tree, common_prefix, prefix_order
from areal_agents.core.sample import TrainingSample
from areal_agents.errors import TrainingError

MIN_SAVED = 64  # tokens that one more segment must save: below, its extra attention calls cost more


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """One forward and backward pass.

    Attributes:
        input_ids, position_ids: [T] int64.
        segments: which rows attend to which, see `token_tree`.
        predictor_rows: [N] int64, the row that predicts each trained token.
        target_ids: [N] int64, the trained tokens.
        behavior_logprobs, temperatures, advantages: [N] float32.
        versions: [N] int64, the policy version that sampled each.
        sample_index: [N] int64, which sample of the packed list each belongs to.
        sample_tokens: tokens that the samples have without sharing.
    """

    input_ids: Tensor
    position_ids: Tensor
    segments: tuple[Segment, ...]
    predictor_rows: Tensor
    target_ids: Tensor
    behavior_logprobs: Tensor
    temperatures: Tensor
    advantages: Tensor
    versions: Tensor
    sample_index: Tensor
    sample_tokens: int

    @property
    def trained_tokens(self) -> int:
        """N."""
        return len(self.target_ids)

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same micro-batch with its tensors on `device`."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.type == "Tensor"}
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items()})


def pack(
    samples: Sequence[TrainingSample], *, token_budget: int, ranks: int = 1, share_prefixes: bool = True
) -> list[MicroBatch]:
    """Micro-batches of at most `token_budget` model tokens; their number is a multiple of `ranks`.

    Samples are cut into runs of neighbours in prefix order, of about equal cost, so that samples
    of one group stay together and their prefix is computed once. Where there are too few runs for
    the ranks, micro-batches of one token that trains nothing fill up: every rank takes part in
    every collective.

    Raises:
        TrainingError: a sample alone is longer than the budget.
        ValueError: no samples.
    """
    if not samples:
        raise ValueError("there is no sample to pack")
    inputs = [_model_input(sample) for sample in samples]
    for sample, tokens in zip(samples, inputs, strict=True):
        if len(tokens) > token_budget:
            raise TrainingError(
                f"group {sample.group_id}, episode {sample.episode_id}: a sample of {len(tokens)} tokens "
                f"does not fit a micro-batch of {token_budget}; raise trainer.microbatch_tokens"
            )
    order = prefix_order(inputs)
    costs = np.array([len(inputs[i]) for i in order])
    if share_prefixes:
        pairs = zip(order, order[1:], strict=False)
        costs[1:] -= np.array([common_prefix(inputs[a], inputs[b]) for a, b in pairs], np.int64)
    min_saved = MIN_SAVED if share_prefixes else None
    # at least 1, so that enough cuts take any two neighbours apart
    runs = _cut(inputs, order, np.maximum(costs, 1), token_budget, ranks, min_saved)
    trees = [build_tree([inputs[i] for i in run], min_saved=min_saved) for run in runs]
    batches = [_microbatch(samples, run, tree) for run, tree in zip(runs, trees, strict=True)]
    filler = _microbatch(samples, [], build_tree([inputs[0][:1]]))
    return batches + [filler] * (-len(batches) % ranks)


def _model_input(sample: TrainingSample) -> np.ndarray:
    """The tokens that the model must read: those before the last trained one."""
    return sample.token_ids[: int(np.flatnonzero(sample.loss_mask)[-1])]


def _cut(
    inputs: Sequence[np.ndarray],
    order: Sequence[int],
    costs: np.ndarray,
    token_budget: int,
    ranks: int,
    min_saved: int | None,
) -> list[list[int]]:
    """Runs of neighbours in `order` within the budget, of about equal cost, none empty."""
    count = ranks * math.ceil(costs.sum() / (token_budget * ranks))
    while True:
        middles = np.cumsum(costs) - costs / 2
        bins = (middles * count / costs.sum()).astype(int)
        runs = [[order[int(i)] for i in np.flatnonzero(bins == b)] for b in np.unique(bins)]
        trees = (build_tree([inputs[i] for i in run], min_saved=min_saved) for run in runs)
        if all(len(tree.token_ids) <= token_budget for tree in trees):
            return runs
        count += ranks


def _microbatch(samples: Sequence[TrainingSample], indices: Sequence[int], tree: TokenTree) -> MicroBatch:
    trained = [np.flatnonzero(samples[i].loss_mask) for i in indices]

    def gather(name: str, dtype: torch.dtype) -> Tensor:
        arrays = [getattr(samples[i], name)[at] for i, at in zip(indices, trained, strict=True)]
        return torch.from_numpy(np.concatenate([np.empty(0), *arrays])).to(dtype)

    rows = [tree.rows[j][at - 1] for j, at in enumerate(trained)]
    owners = [np.full(len(at), i) for i, at in zip(indices, trained, strict=True)]
    return MicroBatch(
        input_ids=torch.from_numpy(tree.token_ids),
        position_ids=torch.from_numpy(tree.position_ids),
        segments=tree.segments,
        predictor_rows=torch.from_numpy(np.concatenate([np.empty(0, np.int64), *rows])),
        target_ids=gather("token_ids", torch.int64),
        behavior_logprobs=gather("behavior_logprobs", torch.float32),
        temperatures=gather("temperatures", torch.float32),
        advantages=gather("advantages", torch.float32),
        versions=gather("versions", torch.int64),
        sample_index=torch.from_numpy(np.concatenate([np.empty(0, np.int64), *owners])),
        sample_tokens=sum(int(at[-1]) for at in trained),
    )
