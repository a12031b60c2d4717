"""Micro-batches that are split over two gloo ranks give the results of one process.

The ranks are spawned once for the module.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from context_worker import batches, main
from families_support import build_family, build_tiny, tiny_config
from model_support import reference, samples
from training_support import make_sample

from areal_agents.algorithms.packing.microbatches import pack
from areal_agents.errors import TrainingError
from areal_agents.inference.ports import reserved_ports
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.context_parallel import check_heads, local_share
from areal_agents.training.model.model import load_policy


@pytest.fixture(scope="module")
def folders(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A Qwen3, and a gpt-oss with attention sinks and a sliding window in every other block."""
    return [model_folder, build_family("gpt_oss", tmp_path_factory.mktemp("gpt_oss"))]


@pytest.fixture(scope="module")
def spawned(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The results of the two ranks."""
    out = tmp_path_factory.mktemp("context")
    with reserved_ports(1) as (port,):
        mp.spawn(main, (port, [str(folder) for folder in folders], str(out)), nprocs=2)
    return [torch.load(out / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("model", [0, 1], ids=["qwen3", "gpt_oss"])
def test_two_ranks_of_a_context_give_the_logprobs_and_gradients_of_one(
    spawned: list[Any], folders: list[Path], model: int
) -> None:
    whole = samples()
    logprobs, gradients = reference(folders[model], whole)
    seen: Counter[int] = Counter()
    for place, batch in enumerate(batches()):
        shares = [results[model][0][place] for results in spawned]
        assert sum(len(share[0]) for share in shares) == batch.scored_tokens
        for index, target, value in (entry for share in shares for entry in zip(*share, strict=True)):
            # whichever rank computed the logprob, the sample has a token with this target and logprob
            sample = whole[int(index)]
            targets = sample.token_ids[sample.loss_mask]
            wanted = logprobs[int(index)][torch.from_numpy(targets == int(target))]
            assert (wanted - value).abs().min() <= 1e-5
            seen[int(index)] += 1
    assert seen == Counter({i: int(s.loss_mask.sum()) for i, s in enumerate(whole)})
    for results in spawned:
        got = results[model][1]
        assert got.keys() == gradients.keys()
        for name, gradient in gradients.items():
            error = (got[name] - gradient).abs().max() / gradient.abs().max()
            assert error <= 1e-5, (name, float(error))


def test_exchanging_heads_is_exact_even_with_fewer_key_heads_than_ranks(spawned: list[Any]) -> None:
    for *_, differences in spawned:
        assert max(differences) <= 1e-5


def test_a_single_rank_keeps_its_micro_batch_and_a_missing_group_is_refused() -> None:
    (batch,) = pack([make_sample([1, 2, 3], [2], rng=np.random.default_rng(0))], token_budget=8)
    assert local_share(batch, 0, 1, None) is batch
    with pytest.raises(ValueError, match="process group of 2 ranks"):
        local_share(batch, 0, 2, None)


def test_heads_that_the_ranks_cannot_share_are_refused() -> None:
    check_heads(16, 8, 16)
    check_heads(16, 2, 4)
    with pytest.raises(ValueError, match="3 ranks cannot share 16 query heads and 8"):
        check_heads(16, 8, 3)
    with pytest.raises(ValueError, match="8 ranks cannot share 12 query heads and 3"):
        check_heads(12, 3, 8)


def test_a_model_that_a_context_cannot_share_is_refused_when_it_is_loaded(
    model_folder: Path, group: Ranks
) -> None:
    with pytest.raises(TrainingError, match=r"3 ranks cannot share 4 query heads and 2 key heads") as caught:
        load_policy(model_folder, replace(group, context_count=3))
    assert str(model_folder) in str(caught.value)


def test_the_heads_of_every_layer_are_checked(tmp_path: Path, group: Ranks) -> None:
    config = tiny_config("laguna")
    config.num_attention_heads_per_layer = [4, 6]
    with pytest.raises(TrainingError, match=r"4 ranks cannot share 6 query heads and 2 key heads"):
        load_policy(build_tiny(config, tmp_path), replace(group, context_count=4))
