"""A token shared by several samples goes through the model once, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from model_support import packed
from training_support import VOCAB, make_sample

from areal_agents.algorithms.packing.microbatches import pack
from areal_agents.core.sample import TrainingSample
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.model import load_policy


def group_of_eight() -> list[TrainingSample]:
    """Eight samples with a common prompt of 160 tokens and responses of 40 tokens."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(2, VOCAB, 160).tolist()
    return [
        make_sample(prompt + rng.integers(2, VOCAB, 40).tolist(), range(160, 200), rng=rng) for _ in range(8)
    ]


def branching_episode() -> list[TrainingSample]:
    """Twenty turns of 15 observed and 9 sampled tokens. At some turns another branch begins, which continues
    to the last turn. Each sampled token is trained in the first branch that contains it."""
    rng = np.random.default_rng(1)

    def turns(tokens: list[int], count: int) -> tuple[list[int], list[int]]:
        trained: list[int] = []
        for _ in range(count):
            tokens = tokens + rng.integers(2, VOCAB, 24).tolist()
            trained += range(len(tokens) - 9, len(tokens))
        return tokens, trained

    trunk, trained = turns(rng.integers(2, VOCAB, 50).tolist(), 20)
    branches = [(trunk, trained)]
    for turn in (3, 9, 9, 16):
        branches.append(turns(trunk[: 50 + 24 * turn], 20 - turn))
    other, _ = branches[2]
    branches.append(turns(other[: 50 + 24 * 13], 7))  # a branch of a branch
    return [make_sample(tokens, at, rng=rng) for tokens, at in branches]


@pytest.mark.parametrize(
    ("make", "want_tokens", "flat_tokens"),
    [
        (group_of_eight, 160 + 8 * 39, 8 * 199),
        # the trunk and what each branch adds, without the last tokens, which are only predicted
        (branching_episode, 530 + 24 * (17 + 11 + 11 + 4 + 7) - 6, 6 * 529),
    ],
)
@pytest.mark.parametrize("budget", [4096, 640])
def test_shared_prefixes_change_neither_logprobs_nor_gradients(
    make, want_tokens: int, flat_tokens: int, budget: int, model_folder: Path, group: Ranks
) -> None:  # type: ignore[no-untyped-def]
    samples = make()
    policy = load_policy(model_folder, group)
    shared_logprobs, shared = packed(policy, samples, token_budget=budget)
    flat_logprobs, flat = packed(policy, samples, token_budget=budget, share_prefixes=False)
    for got, want in zip(shared_logprobs, flat_logprobs, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    for name, gradient in flat.items():
        assert (shared[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name
    batches = pack(samples, token_budget=budget)
    assert sum(batch.sample_tokens for batch in batches) == flat_tokens
    if budget >= want_tokens:
        assert [len(batch.input_ids) for batch in batches] == [want_tokens]
    else:
        assert len(batches) > 1
