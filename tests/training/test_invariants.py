"""For every preset: the gradient depends on the samples alone, and on-policy every part is neutral."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from presets_support import WHOLE, groups, largest_difference, preset, train_once
from torch import Tensor
from training_support import build_model

from areal_agents.algorithms.packing.microbatches import pack
from areal_agents.algorithms.presets import PRESETS
from areal_agents.algorithms.samples import TrainingData, build_training_data
from areal_agents.training.distributed import Ranks
from areal_agents.training.model import load_policy


@pytest.fixture(scope="module")
def reference_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that differs from the policy, so that a KL is not 0."""
    return build_model(tmp_path_factory.mktemp("reference"), seed=1)


@pytest.fixture(scope="module")
def initial(model_folder: Path, reference_folder: Path, group: Ranks) -> dict[str, Tensor]:
    """The weights of policy and critic before any step."""
    return train_once(preset("ppo"), model_folder, reference_folder, group, lr=0.0)[1]


@pytest.mark.parametrize("name", PRESETS)
def test_the_gradient_is_that_of_the_flat_computation(
    name: str, model_folder: Path, reference_folder: Path, group: Ranks, initial: dict[str, Tensor]
) -> None:
    """Shared prefixes = flat; one micro-batch with whole logits = many with chunks of them."""
    algorithm = preset(name)
    result, weights = train_once(algorithm, model_folder, reference_folder, group)
    moved = largest_difference(weights, {name: initial[name] for name in weights})
    assert moved > 1e-5 and result.skipped_steps == 0
    assert result.sample_tokens > result.model_tokens  # something was shared
    for options, chunk_logits in (
        (replace(WHOLE, share_prefixes=False), None),
        (replace(WHOLE, microbatch_tokens=90), 96 * 7),
    ):
        other, other_weights = train_once(
            algorithm, model_folder, reference_folder, group, options=options, chunk_logits=chunk_logits
        )
        assert largest_difference(weights, other_weights) <= 1e-5 * moved + 1e-7, options
        assert other.grad_norm == pytest.approx(result.grad_norm, rel=1e-4)
        for statistic, value in result.statistics.as_dict().items():
            assert other.statistics.as_dict()[statistic] == pytest.approx(value, rel=1e-3, abs=1e-4), (
                statistic
            )


@pytest.mark.parametrize("name", [name for name in PRESETS if not preset(name).is_supervised])
def test_on_policy_the_ratio_is_one_and_nothing_is_clipped(
    name: str, model_folder: Path, group: Ranks
) -> None:
    """Sampled by the very weights, all minibatches at lr = 0, the reference the same model: every part is
    at its neutral point, and the gradient is the policy gradient."""
    algorithm = preset(name)
    data = on_policy(build_training_data(groups(), algorithm), model_folder, group)
    result, _ = train_once(algorithm, model_folder, model_folder, group, data=data, lr=0.0)
    values = result.statistics.as_dict()
    tokens = sum(int(sample.loss_mask.sum()) for sample in data.samples)
    assert values["tokens"] == values["on_policy_tokens"] == tokens
    assert values["abs_diff_max"] < 1e-5 and values["abs_log_ratio_max"] < 1e-5
    assert values["ratio"] == pytest.approx(tokens, rel=1e-5)
    assert values["weight"] == pytest.approx(tokens, rel=1e-5)
    assert values["kl_k3"] == pytest.approx(0, abs=1e-6) == values["kl_reference"]
    idle = (
        "clipped_low",
        "clipped_high",
        "dual_clipped",
        "weight_capped",
        "rejected_tokens",
        "dropped_tokens",
    )
    assert [values[part] for part in idle] == [0] * len(idle)


def on_policy(data: TrainingData, folder: Path, group: Ranks) -> TrainingData:
    """The data with the folder's own logprobs as behavior logprobs."""
    policy = load_policy(folder, group)
    logprobs = [np.zeros(len(sample), np.float32) for sample in data.samples]
    with torch.no_grad():
        for batch in pack(data.samples, token_budget=4096):
            values = policy(batch)[0].numpy()
            for index in np.unique(batch.sample_index):
                logprobs[index][data.samples[index].scored_mask] = values[batch.sample_index == index]
    pairs = zip(data.samples, logprobs, strict=True)
    return replace(data, samples=tuple(replace(s, behavior_logprobs=array) for s, array in pairs))


def test_m2po_leaves_tokens_out(model_folder: Path, group: Ranks) -> None:
    """Else the tests above would not tell whether its mask is that of the whole minibatch."""
    result, _ = train_once(preset("m2po"), model_folder, model_folder, group)
    values = result.statistics.as_dict()
    assert 0 < values["dropped_tokens"] < values["tokens"]
