"""Training on recorded episodes: an epoch has every group once, in an order that a resumed run continues."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path

import pytest
from safetensors.torch import load_file
from store_queries import lease_groups
from stored_support import break_reward, put_episode, put_group

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.errors import TrainingError
from areal_agents.store import Store
from areal_agents.training.batches.checks import SampleLimits
from areal_agents.training.batches.recorded import RecordedGroups, next_recorded_batch, recorded_store
from areal_agents.training.config import TrainerConfig
from areal_agents.training.run import RunResult, run

SFT = AlgorithmConfig.model_validate("sft")
LIMITS = SampleLimits(64, 96)


def take(source: RecordedGroups, position: int, *, groups: int = 2, algorithm: AlgorithmConfig = SFT):
    return next_recorded_batch(
        source, algorithm, groups=groups, step=1, position=position, limits=LIMITS, stop=threading.Event()
    )


def fill(store: Store) -> None:
    """Store five groups, of which one is dropped and one was trained, and an episode without a group."""
    for index in range(5):
        put_group(store, f"g{index}", [0, 1])
    store.drop_group("g4", "stale", step=1)
    (leased,) = lease_groups(store, 1, step=1)
    store.mark_trained([leased.id], step=1, version=1)
    put_episode(store, "alone", 1.0)


def test_each_epoch_has_every_group_once_in_another_order(store: Store) -> None:
    fill(store)
    source = RecordedGroups.read(store, seed=3)
    assert source.fewer_than(5) is None
    assert "5 groups to train on, fewer than rollout.groups (6)" in str(source.fewer_than(6))
    epochs = [[source.group_at(5 * epoch + place).id for place in range(5)] for epoch in range(8)]
    assert all(sorted(names) == ["alone", "g0", "g1", "g2", "g3"] for names in epochs)
    assert len({tuple(names) for names in epochs}) > 1
    again = RecordedGroups.read(store, seed=3)
    assert [again.group_at(place) for place in range(40)] == [source.group_at(place) for place in range(40)]
    assert [RecordedGroups.read(store, seed=4).group_at(p).id for p in range(5)] != epochs[0]


def test_batches_follow_the_order_and_have_the_position_at_which_they_end(store: Store) -> None:
    fill(store)
    source = RecordedGroups.read(store, seed=0)
    seen: Counter[str] = Counter()
    position = 0
    for _ in range(5):
        batch = take(source, position)
        assert batch is not None and batch.position == position + len(batch.group_ids)
        position = batch.position
        seen.update(batch.group_ids)
        assert all((sample.versions == -1).all() for sample in batch.samples)  # the tokens are of another run
    assert position == 9  # a batch never holds a group twice, so one was cut short between two epochs
    assert max(seen.values()) - min(seen.values()) <= 1


def test_a_bad_group_is_skipped_and_named(store: Store) -> None:
    fill(store)
    break_reward(store, "g1-0")
    source = RecordedGroups.read(store, seed=0)
    batch = take(source, 0, groups=5)
    assert batch is not None and batch.position == 6  # the next epoch begins with g1, then repeats a group
    assert sorted(batch.group_ids) == ["alone", "g0", "g2", "g3"]
    assert "a reward must be a finite number" in batch.bad_groups["g1"]
    assert store.group_counts()["dropped"] == 1  # the recorded store is only read


def test_nothing_to_train_on_is_an_error(store: Store, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="holds nothing to train on: it has no episodes"):
        RecordedGroups.read(store, seed=0)
    put_group(store, "equal", [1, 1])
    with pytest.raises(
        TrainingError, match="none of the 1 recorded groups has anything .* scores must differ"
    ):
        take(RecordedGroups.read(store, seed=0), 0)


def test_evaluation_episodes_are_trained_on_if_they_were_sampled_as_in_training(store: Store) -> None:
    with pytest.raises(TrainingError, match="it has no episodes"):
        RecordedGroups.read(store, seed=0, split="eval")
    put_episode(store, "cold", 1.0, split="eval", temperature=0.5)
    put_episode(store, "plain", 0.5, split="eval")
    with pytest.raises(TrainingError, match=r"2 rewarded episodes are of split eval.*data\.split=eval"):
        RecordedGroups.read(store, seed=0)
    source = RecordedGroups.read(store, seed=0, split="eval")
    loaded = source.load(source.groups)
    constrained = {group.id: group.rollouts[0].episode.turns[0].constrained for group in loaded}
    assert constrained == {"cold": True, "plain": False}
    assert not store.load_episode("cold").turns[0].constrained  # the store is only read


def test_a_run_folder_names_its_store(tmp_path: Path) -> None:
    assert recorded_store(str(tmp_path)) == tmp_path / "store.db"
    assert recorded_store("postgresql://host/db") == "postgresql://host/db"


@pytest.mark.parametrize("name", ["sft", "dpo", "decoupled_ppo"])
def test_a_run_on_recorded_episodes_learns_and_resumes(
    store: Store, model_folder: Path, tmp_path: Path, name: str
) -> None:
    for index in range(4):
        put_group(store, f"g{index}", [0, 1])
    run_dir = tmp_path / "offline"

    def train(steps: int) -> RunResult:
        with Store.open(run_dir / "store.db") as own:
            return run(
                TrainerConfig(steps=steps, lr=1e-2, checkpoint_every=1),
                AlgorithmConfig.model_validate(name),
                store=own,
                engines=[],
                model_path=model_folder,
                run_dir=run_dir,
                groups=2,
                max_staleness=0,
                stop=threading.Event(),
                recorded=RecordedGroups.read(store, seed=0),
            )

    assert train(2) == RunResult(2, 2, finished=True)
    assert train(4) == RunResult(4, 4, finished=True)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["tokens"] > 0 and line["grad_norm"] > 0 for line in lines)
    if name == "sft":
        assert lines[-1]["loss"] < lines[0]["loss"]
    facts = json.loads((run_dir / "checkpoints" / "step-4" / "trainer.json").read_text())
    assert facts["position"] == 8
    before, after = (load_file(f / "model.safetensors") for f in (model_folder, run_dir / "final"))
    assert any((before[key] != after[key]).any() for key in before)
    assert not (run_dir / "weights").exists()
    assert store.group_counts()["complete"] == 4  # the recorded groups are not marked as trained
