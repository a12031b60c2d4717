"""A policy learns which first action is good, although its reward is posted on a later root."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from algorithms_support import episode, group, turn
from torch import Tensor

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.losses.objective import Objective, policy_loss
from areal_agents.algorithms.samples import TrainingData, build_training_data
from areal_agents.core.completion import Completion
from areal_agents.core.rollout import RecordedEpisode
from areal_agents.core.trajectory import Turn

STEPS = 150
GROUPS = 2
GROUP_SIZE = 4
LEARNING_RATE = 0.5
GOOD = 1  # the first turn's action that is rewarded


@pytest.mark.parametrize("credit", ["episode", "reward_to_go"])
@pytest.mark.parametrize("shape", ["linear", "new root"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_rewarded_action_is_learned(shape: str, credit: str, seed: int) -> None:
    config = AlgorithmConfig(credit=credit)  # type: ignore[call-arg]
    assert config.preset == "decoupled_ppo"
    logits = torch.zeros(2, 2, requires_grad=True)  # [turn, action]
    optimizer = torch.optim.SGD([logits], lr=LEARNING_RATE)
    rng = np.random.default_rng(seed)
    assert probability(logits) == 0.5
    for _ in range(STEPS):
        groups = [
            group([play(logits, rng, shape, f"{g}-{e}") for e in range(GROUP_SIZE)], id=f"{g}")
            for g in range(GROUPS)
        ]
        data = build_training_data(groups, config)
        if data.samples:  # a batch whose groups are all equal has no samples
            optimizer.zero_grad()
            loss_of(data, logits, config).backward()
            optimizer.step()
    assert probability(logits) > 0.95


def probability(logits: Tensor) -> float:
    """The probability of the good action in the first turn."""
    return float(logits.detach()[0].softmax(0)[GOOD])


def play(logits: Tensor, rng: np.random.Generator, shape: str, name: str) -> RecordedEpisode:
    """Two turns; the reward, 1 for the good first action, is posted when the second one is complete.

    The second turn continues the first one or is another root. Its action does not change the reward.
    """
    logprobs = logits.detach().log_softmax(1)
    turns: list[Turn] = []
    for place in range(2):
        action = int(rng.random() < float(logprobs[place, 1].exp()))
        parent = turns[0].id if turns and shape == "linear" else None
        completion = Completion([action], [float(logprobs[place, action])], [0], "stop")  # type: ignore[arg-type]
        recorded = turn(f"{name}-{place}", parent, recorded_before=place)
        turns.append(replace(recorded, completion=completion))
    reward = float(turns[0].completion.token_ids[0] == GOOD)
    return episode(turns, id=name, by_turn={turns[1].id: reward})


def loss_of(data: TrainingData, logits: Tensor, config: AlgorithmConfig) -> Tensor:
    """The loss of one batch as one micro-batch, under the weights that sampled it."""
    masks = [sample.loss_mask for sample in data.samples]

    def joined(name: str) -> Tensor:
        arrays = [getattr(s, name)[mask] for s, mask in zip(data.samples, masks, strict=True)]
        return torch.from_numpy(np.concatenate(arrays))

    current = logits.log_softmax(1)[joined("turn_index").long(), joined("token_ids").long()]
    loss, _, _ = policy_loss(
        current,
        Objective.of(config),
        proximal=current.detach(),
        behavior=joined("behavior_logprobs"),
        advantages=joined("advantages"),
        loss_weights=torch.from_numpy(np.concatenate(config.loss_normalization.weights(data.samples))),
        sequence_ids=torch.from_numpy(np.repeat(np.arange(len(masks)), [mask.sum() for mask in masks])),
    )
    return loss
