"""Compares a step with a plain loop: the same model in transformers, one sample at a time, and autograd."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from presets_support import groups, preset, train_once
from torch import Tensor
from training_support import build_model
from transformers import AutoModelForCausalLM

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.samples import TrainingData, build_training_data
from areal_agents.core.rollout import RolloutGroup
from areal_agents.core.sample import TrainingSample
from areal_agents.core.trajectory import Turn
from areal_agents.training.distributed import Ranks

LR = 0.05


class PlainModel:
    """A model that transformers loads in float64 and runs without packing."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)

    def cross_entropies(self, token_ids: np.ndarray, start: int) -> Tensor:
        """The cross entropies of the tokens from `start` on, at temperature 1."""
        ids = torch.tensor(token_ids.astype(np.int64))
        every = torch.log_softmax(self.model(ids[None]).logits[0], -1)
        return -every[torch.arange(start, len(ids)) - 1, ids[start:]]

    def logprobs(self, sample: TrainingSample) -> tuple[Tensor, Tensor]:
        """The logprobs and the entropies [N_s] of the trained tokens, at their temperatures."""
        places = np.flatnonzero(sample.loss_mask)
        logits = self.model(torch.tensor(sample.token_ids[None].astype(np.int64))).logits[0, places - 1]
        every = torch.log_softmax(logits / torch.tensor(sample.temperatures[places])[:, None], -1)
        targets = torch.tensor(sample.token_ids[places].astype(np.int64))
        return every[torch.arange(len(places)), targets], -(every.exp() * every).sum(-1)


def reinforced(model: PlainModel, samples: Sequence[TrainingSample], algorithm: AlgorithmConfig) -> Tensor:
    """Decoupled PPO at u = 1 with the capped weight (arXiv 2505.24298, eq. 5), and an entropy bonus."""
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for sample in samples:
        current, entropy = model.logprobs(sample)
        behavior = torch.tensor(sample.behavior_logprobs[sample.loss_mask]).double()
        advantages = torch.tensor(sample.advantages[sample.loss_mask]).double()
        weight = (current - behavior).exp().clamp(max=algorithm.correction.weight_cap).detach()
        ratio = (current - current.detach()).exp()
        total = total - (weight * ratio * advantages + algorithm.entropy_coefficient * entropy).sum()
        tokens += len(current)
    return total / tokens


def likelihood(model: PlainModel, samples: Sequence[TrainingSample], algorithm: AlgorithmConfig) -> Tensor:
    """The negative mean logprob."""
    return -torch.cat([model.logprobs(sample)[0] for sample in samples]).mean()


def preference(model: PlainModel, reference: PlainModel, data: TrainingData, beta: float) -> Tensor:
    """The loss of DPO (arXiv 2305.18290, eq. 7), in one graph."""

    def gain(episode: str) -> Tensor:
        own = [s for s in data.samples if s.episode_id == episode]
        return torch.stack(
            [(model.logprobs(s)[0] - reference.logprobs(s)[0].detach()).sum() for s in own]
        ).sum()

    margins = torch.stack([beta * (gain(chosen) - gain(rejected)) for chosen, rejected in data.pairs])
    return -torch.nn.functional.logsigmoid(margins).mean()


def observed(model: PlainModel, rollouts: Sequence[RolloutGroup], data: TrainingData) -> Tensor:
    """The cross entropies of the prompt tokens that each turn adds to its parent, from the episodes."""
    parts = []
    for episode in (rollout.episode for group in rollouts for rollout in group.rollouts):
        own = [s for s in data.samples if s.episode_id == episode.id]
        trained = {int(i) for s in own for i in s.turn_index[s.loss_mask]}
        by_id = {turn.id: turn for turn in episode.turns}

        def path(turn: Turn, by_id: dict[str, Turn] = by_id) -> list[Turn]:
            return [*(path(by_id[turn.parent]) if turn.parent else []), turn]

        leading = {turn.id for place in trained for turn in path(episode.turns[place])}
        for turn in episode.turns:
            if turn.parent is None or turn.id not in leading:
                continue
            before = [a for t in path(turn)[:-1] for a in (t.new_prompt_ids, t.completion.token_ids)]
            tokens = np.concatenate([*before, turn.new_prompt_ids])
            parts.append(model.cross_entropies(tokens, len(tokens) - len(turn.new_prompt_ids)))
    return torch.cat(parts)


@pytest.mark.parametrize(
    "algorithm",
    [
        preset("decoupled_ppo"),
        preset("decoupled_ppo", weight_cap=1.0, entropy_coefficient=0.5),
        preset("sft"),
        preset("dpo"),
        preset("decoupled_ppo", observation_coefficient=0.5),
        preset("sft", observation_coefficient=0.5),
        preset("dpo", observation_coefficient=0.5),
    ],
    ids=[
        "decoupled_ppo",
        "with_an_entropy_bonus",
        "sft",
        "dpo",
        "with_observations",
        "sft_with_observations",
        "dpo_with_observations",
    ],
)
def test_one_step_matches_that_of_the_plain_loop(
    algorithm: AlgorithmConfig, model_folder: Path, tmp_path: Path, group: Ranks
) -> None:
    reference_folder = build_model(tmp_path / "reference", seed=1)
    data = build_training_data(groups(), algorithm)
    result, weights = train_once(algorithm, model_folder, reference_folder, group, data=data, lr=LR)
    plain = PlainModel(model_folder)
    if algorithm.policy_loss.kind == "dpo":
        loss = preference(plain, PlainModel(reference_folder), data, algorithm.policy_loss.dpo_beta)
        assert result.dpo is not None and result.dpo.loss == pytest.approx(loss.item(), rel=1e-5)
    else:
        loss = (likelihood if algorithm.is_supervised else reinforced)(plain, data.samples, algorithm)
    if algorithm.observation_coefficient:
        entropies = observed(plain, groups(), data)
        loss = loss + algorithm.observation_coefficient * entropies.mean()
        assert result.observation is not None and result.observation.tokens == len(entropies) > 20
        assert result.observation.loss == pytest.approx(entropies.mean().item(), rel=1e-5)
    else:
        assert result.observation is None
    loss.backward()
    for name, parameter in plain.model.named_parameters():
        want = parameter.detach() - LR * parameter.grad
        torch.testing.assert_close(weights[name].double(), want, atol=2e-7, rtol=1e-5)
    gradient = torch.cat([p.grad.flatten() for p in plain.model.parameters()])
    assert result.grad_norm == pytest.approx(float(gradient.norm()), rel=1e-5)
    assert LR * gradient.abs().max() > 1e-3  # far above the tolerance
