"""What a step records of each token: the terms of its loss, and why it was not trained."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_support import record_groups

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.inference import SGLangEngine
from areal_agents.store import Store
from areal_agents.training import run as trainer
from areal_agents.training.config import TrainerConfig
from areal_agents.training.publish.config import PublishConfig
from areal_agents.training.records.files import TurnRecord, read_records


def train(
    store: Store,
    engine_url: str,
    model: Path,
    run_dir: Path,
    algorithm: dict[str, Any],
    *,
    steps: int = 2,
    max_staleness: int = 8,
    **trainer_settings: Any,
) -> None:
    trainer.run(
        TrainerConfig(
            steps=steps, lr=1e-2, threads=1, trackers=(), publish=PublishConfig(verify="off"),
            batch_timeout_s=30, **trainer_settings,
        ),
        AlgorithmConfig.model_validate(algorithm),
        store=store,
        engines=[SGLangEngine(engine_url, control_timeout_s=30)],
        model_path=model,
        run_dir=run_dir,
        groups=2,
        max_staleness=max_staleness,
        stop=threading.Event(),
    )  # fmt: skip


def check(record: TurnRecord, store: Store, *, low: float = 0.2, high: float = 0.2, cap: float = 5.0) -> None:
    """The terms are those of decoupled PPO, and their product is the loss."""
    turn = next(t for t in store.load_episode(record.episode_id).turns if t.id == record.turn_id)
    values, behavior = record.values, turn.completion.logprobs
    assert record.tokens == len(behavior)
    assert values["proximal"] == pytest.approx(behavior, abs=2e-3) or record.step > 1
    assert values["ratio"] == pytest.approx(np.exp(values["current"] - values["proximal"]), rel=1e-5)
    assert values["weight"] == pytest.approx(np.minimum(np.exp(values["proximal"] - behavior), cap), rel=1e-5)
    advantage, ratio = values["advantage"], values["ratio"]
    clipped = np.clip(ratio, 1 - low, 1 + high)
    loss = -np.minimum(ratio * advantage, clipped * advantage)
    assert values["loss"] == pytest.approx(
        values["loss_weight"] * values["weight"] * loss, rel=1e-4, abs=1e-9
    )
    bound = clipped * advantage < ratio * advantage
    assert record.clipped == tuple(
        "no" if not b else "low" if a < 0 else "high" for b, a in zip(bound, advantage, strict=True)
    )


def test_the_terms_of_decoupled_ppo_multiply_to_the_loss(
    store: Store, engine_url: str, model_folder: Path, run_dir: Path
) -> None:
    record_groups(store, engine_url, ["a", "b", "c", "d"])
    train(store, engine_url, model_folder, run_dir, {"minibatches": 2})
    records = read_records(run_dir)
    assert [record.step for record in records] == [1] * 16 + [2] * 16
    assert {record.version for record in records if record.step == 2} == {1}
    assert {record.minibatch for record in records} == {0, 1}
    for record in records:
        assert record.untrained is None and record.states == ("trained",) * 8
        check(record, store)
    assert any(set(record.clipped) != {"no"} for record in records)
    assert any((record.values["ratio"] != 1).any() for record in records)
    for step in (1, 2):
        for minibatch in (0, 1):
            part = [r for r in records if (r.step, r.minibatch) == (step, minibatch)]
            assert sum(r.values["loss_weight"].sum() for r in part) == pytest.approx(1)
    (one,) = read_records(run_dir, turn_ids=["c-2-1"])
    assert one.as_dict() == next(r for r in records if r.turn_id == "c-2-1").as_dict()
    assert one.as_dict()["value"] == [None] * 8
