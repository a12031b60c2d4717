"""For every preset, the gradient depends only on the samples, and every part is neutral on-policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

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
from areal_agents.training.model.model import load_policy
from areal_agents.training.step.results import StepResult


@pytest.fixture(scope="module")
def reference_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that differs from the policy, so that the KL is not 0."""
    return build_model(tmp_path_factory.mktemp("reference"), seed=1)


@pytest.fixture(scope="module")
def initial(model_folder: Path, reference_folder: Path, group: Ranks) -> dict[str, Tensor]:
    """The weights of policy and critic before any step."""
    return train_once(preset("ppo"), model_folder, reference_folder, group, lr=0.0)[1]


@pytest.mark.parametrize("name", PRESETS)
def test_the_gradient_is_that_of_the_flat_computation(
    name: str, model_folder: Path, reference_folder: Path, group: Ranks, initial: dict[str, Tensor]
) -> None:
    """Shared prefixes give the gradient of separate sequences, and one micro-batch with all logits at once
    gives that of many with chunked logits."""
    algorithm = preset(name)
    result, weights = train_once(algorithm, model_folder, reference_folder, group)
    moved = largest_difference(weights, {name: initial[name] for name in weights})
    assert moved > 1e-5 and result.skipped_steps == 0
    assert result.sample_tokens > result.model_tokens  # some prefixes were shared
    for options, chunk_logits in (
        (replace(WHOLE, share_prefixes=False), None),
        (replace(WHOLE, microbatch_tokens=180 if algorithm.teacher == "self" else 90), 96 * 7),
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


# Clip-Cov leaves out tokens whichever policy sampled them.
NEUTRAL_ON_POLICY = [name for name in PRESETS if not preset(name).is_supervised and name != "clip_cov"]


@pytest.mark.parametrize("name", NEUTRAL_ON_POLICY)
def test_on_policy_the_ratio_is_one_and_nothing_is_clipped(
    name: str, model_folder: Path, group: Ranks
) -> None:
    """The samples come from the same weights, lr is 0 for all minibatches, and the reference is the same
    model: every part is at its neutral point, and the gradient is the policy gradient."""
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
    """Return the data with the logprobs of the folder's model as behavior logprobs."""
    policy = load_policy(folder, group)
    logprobs = [np.zeros(len(sample), np.float32) for sample in data.samples]
    with torch.no_grad():
        for batch in pack(data.samples, token_budget=4096):
            values = policy(batch)[0].numpy()
            for index in np.unique(batch.sample_index):
                logprobs[index][data.samples[index].scored_mask] = values[batch.sample_index == index]
    pairs = zip(data.samples, logprobs, strict=True)
    return replace(data, samples=tuple(replace(s, behavior_logprobs=array) for s, array in pairs))


@pytest.mark.parametrize("name", ["m2po", "clip_cov"])
def test_a_trust_region_leaves_out_tokens(name: str, model_folder: Path, group: Ranks) -> None:
    """Otherwise the tests above would not show whether its mask covers the whole minibatch."""
    result, _ = train_once(preset(name), model_folder, model_folder, group)
    values = result.statistics.as_dict()
    assert 0 < values["dropped_tokens"] < values["tokens"]


@pytest.mark.parametrize("name", ["ppo", "m2po", "gspo", "reinforce_pp"])
def test_observations_add_their_own_gradient_and_change_nothing_else(
    name: str, model_folder: Path, reference_folder: Path, group: Ranks, initial: dict[str, Tensor]
) -> None:
    """There is one minibatch, so that the policy's statistics are of the same weights with and without
    observations. The gradient of the observations is linear in the coefficient, and does not depend on how
    the batch is divided."""

    def train(coefficient: float, **given: Any) -> tuple[StepResult, dict[str, Tensor]]:
        fields: dict[str, Any] = {"minibatches": 1, "observation_coefficient": coefficient}
        if name == "ppo":
            fields["value_clip"] = None
        return train_once(preset(name, **fields), model_folder, reference_folder, group, **given)

    without, weights = train(0.0)
    result, with_them = train(1.0)
    double, twice = train(2.0)
    assert result.observation is not None and double.observation == result.observation
    assert result.observation.tokens == 96  # 16 episodes, two turns of three tokens each
    values = without.statistics.as_dict()
    for more in (result, double):
        assert more.statistics.as_dict() == pytest.approx(values, rel=1e-5, abs=1e-6)
    added = {key: with_them[key] - weights[key] for key in weights}
    assert max(float(change.abs().max()) for change in added.values()) > 1e-3
    for key, change in added.items():
        torch.testing.assert_close(twice[key] - weights[key], 2 * change, atol=5e-7, rtol=1e-4)
        if key.startswith("critic."):
            assert float(change.abs().max()) <= 5e-7
    if without.critic is not None:
        assert result.critic is not None
        assert result.critic.loss == pytest.approx(without.critic.loss, rel=1e-5)
        assert result.critic.explained_variance == pytest.approx(
            without.critic.explained_variance, rel=1e-5, abs=1e-6
        )
    moved = largest_difference(with_them, {key: initial[key] for key in with_them})
    for options, chunk_logits in (
        (replace(WHOLE, share_prefixes=False), None),
        (replace(WHOLE, microbatch_tokens=90), 96 * 7),
    ):
        other, other_weights = train(1.0, options=options, chunk_logits=chunk_logits)
        assert largest_difference(with_them, other_weights) <= 1e-5 * moved + 1e-7, options
        assert other.observation is not None and other.observation.tokens == result.observation.tokens
        assert other.observation.loss == pytest.approx(result.observation.loss, rel=1e-5)


def test_kl_cov_penalizes_tokens_whose_logprobs_have_changed(
    model_folder: Path, group: Ranks, initial: dict[str, Tensor]
) -> None:
    """The penalty applies from the second minibatch on."""
    _, weights = train_once(preset("kl_cov"), model_folder, model_folder, group)
    _, without = train_once(preset("kl_cov", kl_cov_coefficient=1e-9), model_folder, model_folder, group)
    moved = largest_difference(weights, {name: initial[name] for name in weights})
    assert largest_difference(weights, without) > 1e-3 * moved
