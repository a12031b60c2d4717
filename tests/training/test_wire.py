"""A micro-batch arrives on another rank as it was sent, in a fraction of its bytes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import fields, replace
from typing import cast

import numpy as np
import pytest
import torch
from model_support import samples
from training_support import random_group, training_data
from vision_support import samples_with_images

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.packing.flops import ModelShape
from areal_agents.algorithms.packing.microbatches import MicroBatch, pack
from areal_agents.algorithms.packing.model_inputs import ImageRows
from areal_agents.core.sample import TrainingSample
from areal_agents.errors import TrainingError
from areal_agents.training.control import Control
from areal_agents.training.distributed import Ranks
from areal_agents.training.step.plan import BatchPlan, PlannedMicroBatch, lay_out
from areal_agents.training.step.wire import from_wire, narrow, to_wire


def routed() -> list[TrainingSample]:
    rng = np.random.default_rng(0)
    return [
        replace(s, routed_experts=rng.integers(-1, 200, (len(s), 3, 2)).astype(np.int16)) for s in samples()
    ]


def nbytes(batch: MicroBatch) -> int:
    values = (getattr(batch, field.name) for field in fields(batch))
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


@pytest.mark.parametrize("build", [samples, samples_with_images, routed])
def test_a_micro_batch_arrives_as_it_was_sent(build: Callable[[], list[TrainingSample]]) -> None:
    packed = pack(build(), token_budget=250, ranks=4)
    packed += pack(build()[:1], token_budget=4096, ranks=2)[1:]  # a micro-batch that trains nothing
    for batch in packed:
        got = pickle.loads(pickle.dumps(PlannedMicroBatch(batch, torch.arange(batch.scored_tokens) + 70_000)))
        assert torch.equal(got.indices, torch.arange(batch.scored_tokens) + 70_000)
        for field in fields(batch):
            want, found = getattr(batch, field.name), getattr(got.batch, field.name)
            if isinstance(want, ImageRows):
                assert torch.equal(want.pixel_values, found.pixel_values)
                assert torch.equal(want.grid_thw, found.grid_thw)
            elif isinstance(want, torch.Tensor):
                assert found.dtype == want.dtype and torch.equal(found, want), field.name
            else:
                assert found == want, field.name


def test_a_micro_batch_is_sent_in_compact_types() -> None:
    batch = max(pack(routed(), token_budget=4096), key=lambda one: one.scored_tokens)
    wire = to_wire(batch)
    assert wire.arrays["target_ids"].dtype == np.int8 and wire.arrays["routed_experts"].dtype == np.int16
    assert wire.arrays["trained"].dtype == np.bool_ and wire.arrays["advantages"].dtype == np.float32
    assert len(pickle.dumps(wire)) < 0.4 * nbytes(batch)
    assert torch.equal(from_wire(wire).turn_ids, batch.turn_ids)


@pytest.mark.parametrize("value", [0, -1, 127, 128, -129, 40_000, 2**31 - 1, 2**31, -(2**40)])
def test_integers_of_any_size_arrive(value: int) -> None:
    array = narrow(torch.tensor([0, value]))
    assert array.astype(np.int64).tolist() == [0, value]


def test_each_rank_is_sent_its_micro_batches_and_no_samples(group: Ranks) -> None:
    sent: list[BatchPlan] = []

    class Recording:
        def scatter(self, parts: list[BatchPlan]) -> BatchPlan:
            sent[:] = parts
            return parts[0]

    ranks = replace(group, count=4, data_count=4, control=cast("Control", Recording()))
    data = training_data([s for g in "abcd" for s in random_group(np.random.default_rng(0), group_id=g)])
    shape = ModelShape(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, intermediate=64, vocab=128)
    plan = lay_out(
        data, AlgorithmConfig(minibatches=2), ranks=ranks, shape=shape, token_budget=150,
        share_prefixes=True, seed=0,
    )  # fmt: skip
    assert plan.samples and sent[0].data is not None
    arrived = [pickle.loads(pickle.dumps(share)) for share in sent[1:]]
    assert all(share.data is None for share in arrived)
    assert all(one.samples == () for share in arrived for one in share.minibatches)
    indices = [work.indices for share in [plan, *arrived] for work in share.work]
    assert torch.cat(indices).sort().values.tolist() == list(range(plan.tokens))  # each token on one rank
    assert {len(share.work) for share in [plan, *arrived]} == {plan.load.microbatches // 4}


def test_a_sample_that_cannot_be_packed_is_an_error_on_every_rank(group: Ranks) -> None:
    sent: list[object] = []

    class Recording:
        def scatter(self, parts: list[object]) -> object:
            sent[:] = parts
            return parts[0]

    ranks = replace(group, count=2, data_count=2, control=cast("Control", Recording()))
    data = training_data(random_group(np.random.default_rng(0), group_id="a"))
    with pytest.raises(TrainingError, match="does not fit a micro-batch of 5"):
        lay_out(
            data, AlgorithmConfig(), ranks=ranks, shape=cast("ModelShape", None), token_budget=5,
            share_prefixes=True, seed=0,
        )  # fmt: skip
    assert len(sent) == 2 and all(isinstance(pickle.loads(pickle.dumps(e)), TrainingError) for e in sent)
