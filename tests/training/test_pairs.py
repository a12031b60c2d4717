"""DPO and SFT on recorded episodes: what training increases, and how a batch of pairs may be divided."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from presets_support import WHOLE, groups, preset, train_once

from areal_agents.algorithms.samples import build_training_data
from areal_agents.training.config import TrainerConfig
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.model import load_policy
from areal_agents.training.model.run_models import load_reference
from areal_agents.training.step.optimizer import make_optimizer
from areal_agents.training.step.step import train_batch


def test_dpo_raises_the_margin_from_zero(model_folder: Path, group: Ranks) -> None:
    algorithm = preset("dpo", dpo_beta=0.5)
    data = build_training_data(groups(), algorithm)
    assert len(data.pairs) == 4
    policy, reference = load_policy(model_folder, group), load_reference(model_folder, group)
    optimizer = make_optimizer(policy, TrainerConfig(), lr=1e-3)
    results = []
    for seed in range(6):
        result = train_batch(
            policy, optimizer, data, algorithm, WHOLE, ranks=group, version=0, seed=seed, reference=reference
        ).dpo
        assert result is not None
        results.append(result)
    assert results[0].margin == pytest.approx(0, abs=1e-4)  # the policy still equals the reference
    assert results[0].loss == pytest.approx(math.log(2), abs=1e-4)
    margins = [result.margin for result in results]
    assert margins == sorted(margins) and margins[-1] > 1
    assert results[-1].accuracy == 1 and results[-1].loss < 0.3


def test_the_reference_is_frozen(model_folder: Path, group: Ranks) -> None:
    assert not any(p.requires_grad for p in load_reference(model_folder, group).parameters())


def test_minibatches_keep_a_pair_together(model_folder: Path, tmp_path: Path, group: Ranks) -> None:
    """If there are fewer pairs than `minibatches`, each pair is a minibatch with its own optimizer step."""
    algorithm = preset("dpo", minibatches=9)
    result, _ = train_once(algorithm, model_folder, model_folder, group, lr=0.0)
    assert result.microbatches == 4 and result.dpo is not None
    assert result.dpo.loss == pytest.approx(math.log(2), abs=1e-4)


def test_sft_raises_the_likelihood_of_the_best_episodes(model_folder: Path, group: Ranks) -> None:
    algorithm = preset("sft")
    data = build_training_data(groups(), algorithm)
    assert len({sample.episode_id for sample in data.samples}) == 4
    policy = load_policy(model_folder, group)
    optimizer = make_optimizer(policy, TrainerConfig(), lr=3e-3)
    losses = []
    for seed in range(10):
        result = train_batch(policy, optimizer, data, algorithm, WHOLE, ranks=group, version=0, seed=seed)
        values = result.statistics.as_dict()
        assert values["weight"] == values["tokens"]  # the policy that sampled an episode does not matter
        losses.append(values["loss"] / values["tokens"])
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.8 * losses[0]
