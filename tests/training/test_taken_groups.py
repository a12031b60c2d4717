"""What a batch takes from the store besides tokens: routed experts, and an order that is always the same."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from stored_support import drop_reasons, put_group

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.core.completion import Completion, SamplingParams
from areal_agents.core.messages import Message
from areal_agents.core.rollout import Reward, Task
from areal_agents.core.trajectory import Turn
from areal_agents.inference.expert_routing import ExpertLayout
from areal_agents.store import NewEpisode, Store
from areal_agents.training.batches.checks import SampleLimits
from areal_agents.training.batches.leasing import Batch, next_batch

LIMITS = SampleLimits(64, 96, ExpertLayout(layers=3, per_token=2))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store.db") as opened:
        yield opened


def take(store: Store, groups: int) -> Batch:
    batch = next_batch(
        store,
        AlgorithmConfig(),
        groups=groups,
        step=1,
        version=0,
        max_staleness=0,
        limits=LIMITS,
        timeout_s=0.2,
        stop=threading.Event(),
    )
    assert batch is not None
    return batch


def put_routed(store: Store, name: str, layers: int) -> None:
    """Store a group whose turns have the routed experts of their tokens."""
    routing = np.arange(6 * layers * 2, dtype=np.int16).reshape(6, layers, 2)
    for index in range(2):
        episode = f"{name}-{index}"
        key_hash = hashlib.sha256(episode.encode()).hexdigest()
        new = NewEpisode(episode, key_hash, Task(name, {}), name, 2, index=index)
        store.open_episode(new).result()
        drawn = Completion([5, 6, 7], [-1.0] * 3, [0] * 3, "stop", routed_experts=routing)  # type: ignore[arg-type]
        turn = Turn(
            f"{episode}-turn", None, (Message("user", "q"),), [1, 2, 3, 4], drawn, Message("assistant", "a"),  # type: ignore[arg-type]
            SamplingParams(8),
        )  # fmt: skip
        store.add_turn(episode, turn).result()
        store.set_rewards(episode, [Reward("episode", "", "return", float(index))]).result()
        store.seal(episode, "finished").result()


def test_routed_experts_reach_the_samples_and_the_report(store: Store) -> None:
    put_routed(store, "routed", layers=3)
    put_group(store, "silent", [0, 1])
    batch = take(store, 2)
    routed = [sample for sample in batch.samples if sample.group_id == "routed"]
    for sample in routed:
        assert sample.routed_experts is not None and sample.routed_experts.shape == (7, 3, 2)
        assert sample.routed_experts[:, 0, 0].tolist() == [0, 6, 12, 18, 24, 30, -1]
    assert {s.routed_experts is None for s in batch.samples if s.group_id == "silent"} == {True}
    assert batch.report.routed_tokens == 2 * 3


def test_a_group_of_another_model_is_dropped_with_the_reason(store: Store) -> None:
    put_routed(store, "other", layers=2)
    put_routed(store, "right", layers=3)
    batch = take(store, 1)
    assert batch.group_ids == ("right",)
    assert "routed experts cover 2 layers, 2 per token, but the model has 3" in drop_reasons(store)["other"]


def test_groups_come_in_the_order_of_their_ids(store: Store) -> None:
    for name in "cab":
        put_group(store, name, [0, 1])
    batch = take(store, 3)
    assert batch.group_ids == ("a", "b", "c")
    assert [sample.group_id for sample in batch.samples] == list("aabbcc")
