"""Advantages, losses and gradients, compared with TRL's GRPO trainer on the same model and episodes.

TRL is used through its public interface: a rollout function returns the recorded completions, a reward
function their rewards, and its `compute_loss` runs a real model. Where its definitions differ
from those of the papers or of this package, the test accounts for exactly these differences:

- TRL divides advantages by std + 1e-4, this package by std + 1e-5;
- without vLLM, TRL has no weight π_prox/μ, so the behavior policy is the proximal policy here too;
- by default TRL multiplies the KL by the ratio (DeepSeek-V3.2), unlike eq. 4 of the paper on GRPO;
- TRL's constant of Dr.GRPO is `max_completion_length`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.losses.objective import Objective, policy_loss
from areal_agents.algorithms.packing.flops import ModelShape
from areal_agents.algorithms.samples import build_training_data
from areal_agents.core.rollout import RolloutGroup
from areal_agents.core.sample import TrainingSample
from benchmarks.trainer.data import Recorder, save_model

pytest.importorskip("trl")

GROUPS, SIZE, LONGEST = 2, 4, 9
SHAPE = ModelShape(layers=1, hidden=16, heads=2, kv_heads=1, head_dim=8, intermediate=24, vocab=40)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("oracle"), SHAPE)


@pytest.fixture(scope="module")
def groups() -> list[RolloutGroup]:
    """Completions and prompts of different lengths, with random rewards."""
    recorder = Recorder(SHAPE.vocab, seed=0)
    return [
        recorder.answers(g, prompt=3 + g, lengths=recorder.rng.integers(2, LONGEST + 1, SIZE))
        for g in range(GROUPS)
    ]


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():  # under the initial weights every logprob would be nearly the same
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)
    return model


def logprobs_of(model: Any, sample: TrainingSample) -> Tensor:
    """The logprobs of the trained tokens by their definition, without padding and chunks."""
    ids = torch.from_numpy(sample.token_ids.astype(np.int64))
    logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], -1)
    chosen = logprobs.gather(1, ids[1:, None])[:, 0]
    return chosen[torch.from_numpy(sample.loss_mask[1:])]


def trl_side(
    folder: Path, scratch: Path, groups: list[RolloutGroup], **options: Any
) -> tuple[Any, dict[str, Any]]:
    """TRL's trainer, and the inputs that it makes from the recorded episodes."""
    from benchmarks.trainer.peers import grpo_trainer

    episodes = [rollout.episode for group in groups for rollout in group.rollouts]
    turns = [episode.turns[0] for episode in episodes]

    def recorded(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        return {
            "prompt_ids": [turn.new_prompt_ids.tolist() for turn in turns],
            "completion_ids": [turn.completion.token_ids.tolist() for turn in turns],
            "logprobs": None,
        }

    def reward(completions: list[Any], **kwargs: Any) -> list[float]:
        return [episode.score for episode in episodes]

    trainer = grpo_trainer(
        load(folder),
        scratch,
        rollout_func=recorded,
        reward=reward,
        per_device_train_batch_size=len(turns),
        num_generations=SIZE,
        max_completion_length=LONGEST,
        **options,
    )
    trainer.current_gradient_accumulation_steps = 1
    prompts = [{"prompt": "a"} for _ in turns]
    return trainer, dict(trainer._generate_and_score_completions(prompts))


def padded(arrays: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(arrays, batch_first=True)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    # preset: settings of this package, settings of TRL, and the KL coefficient (beta in TRL)
    "grpo": ({}, {"loss_type": "grpo", "use_bias_correction_kl": False}, 0.04),
    "dr_grpo": ({"loss_constant": LONGEST}, {"loss_type": "dr_grpo", "scale_rewards": "none"}, 0.0),
    "dapo": (
        {"length_penalty": "none", "refill_equal_groups": False, "minibatches": 1},
        {"loss_type": "dapo", "epsilon_high": 0.28},
        0.0,
    ),
    "gspo": (
        {},
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 3e-4,
            "epsilon_high": 4e-4,
        },
        0.0,
    ),
}


@pytest.mark.parametrize("preset", CASES)
def test_loss_advantages_and_gradient_equal_those_of_trl(
    preset: str, model_folder: Path, groups: list[RolloutGroup], tmp_path: Path
) -> None:
    settings, options, beta = CASES[preset]
    algorithm = AlgorithmConfig(preset=preset, **settings)
    data = build_training_data(groups, algorithm)
    samples = data.samples
    assert len(samples) == GROUPS * SIZE
    trainer, inputs = trl_side(model_folder, tmp_path, groups, **options)

    ours = [sample.advantages[sample.loss_mask][0] for sample in samples]
    scale = [1.0] * len(samples)
    if algorithm.estimator.advantage_std == "group":
        stds = [np.std(data.group_scores[sample.group_id], ddof=1) for sample in samples]
        scale = [(std + 1e-4) / (std + 1e-5) for std in stds]
    theirs = inputs["advantages"].numpy() * scale
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)

    model = load(model_folder)
    current = [logprobs_of(model, sample) for sample in samples]
    noise = torch.Generator().manual_seed(0)
    proximal, reference = (
        [values.detach() + 0.3 * torch.randn(len(values), generator=noise) for values in current]
        for _ in range(2)
    )
    inputs["old_per_token_logps"] = padded(proximal)
    inputs["advantages"] = torch.tensor(ours)
    trainer.beta = beta
    inputs["ref_per_token_logps"] = padded(reference)
    expected = trainer.compute_loss(trainer.model, inputs)
    expected.backward()

    weights = algorithm.loss_normalization.weights(samples)
    advantages = [torch.from_numpy(sample.advantages[sample.loss_mask]) for sample in samples]
    loss, statistics, _ = policy_loss(
        torch.cat(current),
        Objective.of(algorithm),
        proximal=torch.cat(proximal),
        behavior=torch.cat(proximal),
        advantages=torch.cat(advantages),
        loss_weights=torch.from_numpy(np.concatenate(weights)),
        sequence_ids=torch.cat([torch.full((len(a),), i) for i, a in enumerate(advantages)]),
        reference=torch.cat(reference) if algorithm.needs_reference else None,
    )
    loss.backward()

    sums = statistics.as_dict()
    assert sums["clipped_low"] and sums["clipped_high"], "a case in which nothing is clipped shows little"
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5, abs=1e-6)
    for (name, mine), (_, other) in zip(
        model.named_parameters(), trainer.model.named_parameters(), strict=True
    ):
        torch.testing.assert_close(
            mine.grad, other.grad, rtol=1e-3, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
