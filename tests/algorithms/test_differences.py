"""Differences between the logprobs of engine and trainer, by position in the sequence and by routing."""

from __future__ import annotations

import pytest
import torch

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.losses.objective import Objective, policy_loss
from areal_agents.algorithms.losses.statistics import POSITIONS


def test_differences_are_summed_by_position_and_by_routing() -> None:
    tokens = 6
    _, statistics, _ = policy_loss(
        torch.zeros(tokens, requires_grad=True),
        Objective.of(AlgorithmConfig()),
        proximal=torch.zeros(tokens),
        behavior=-torch.tensor([0.125, 0.25, 0.5, 1.0, 2.0, 4.0]),
        advantages=torch.ones(tokens),
        loss_weights=torch.full((tokens,), 1 / tokens),
        sequence_ids=torch.zeros(tokens, dtype=torch.int64),
        on_policy=torch.tensor([True, True, True, True, True, False]),
        positions=torch.tensor([1, 255, 256, 5000, 20_000, 3]),
        replayed=torch.tensor([True, False, True, False, False, True]),
        rerouted=torch.tensor([0.25, 0.0, 0.0, 0.0, 0.0, 1.0]),  # the last token has an older version
    )
    found = statistics.as_dict()
    assert {name: found[f"tokens_at_{name}"] for name in POSITIONS} == {
        "0-255": 2, "256-1023": 1, "1024-4095": 0, "4096-16383": 1, "16384+": 1,
    }  # fmt: skip
    assert {name: found[f"abs_diff_at_{name}"] for name in POSITIONS} == pytest.approx(
        {"0-255": 0.375, "256-1023": 0.5, "1024-4095": 0, "4096-16383": 1.0, "16384+": 2.0}
    )
    assert found["on_policy_tokens"] == 5 and found["on_policy_abs_diff"] == pytest.approx(3.875)
    assert (found["rerouted_tokens"], found["rerouted_layers"]) == (1, 0.25)
    assert found["replayed_tokens"] == 2 and found["replayed_abs_diff"] == pytest.approx(0.625)


def test_without_positions_all_tokens_are_in_the_first_range_and_none_is_replayed() -> None:
    zeros = torch.zeros(3)
    _, statistics, _ = policy_loss(
        zeros, Objective.of(AlgorithmConfig()), proximal=zeros, behavior=zeros - 0.5, advantages=zeros,
        loss_weights=zeros, sequence_ids=torch.zeros(3, dtype=torch.int64),
    )  # fmt: skip
    found = statistics.as_dict()
    assert found["tokens_at_0-255"] == found["on_policy_tokens"] == 3
    assert found["abs_diff_at_0-255"] == pytest.approx(1.5) and found["replayed_tokens"] == 0
    assert found["rerouted_tokens"] == found["rerouted_layers"] == 0
