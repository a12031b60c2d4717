"""A run with bad input: errors name the input, nothing is trained on it, and no other group is lost."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stored_support import break_reward, drop_reasons, empty_group, execute, put_group, shorten_logprobs
from training_support import build_model

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.errors import TrainingError
from areal_agents.inference import SGLangEngine
from areal_agents.store import Store
from areal_agents.training.config import TrainerConfig
from areal_agents.training.run import RunResult, run

BUDGET = 64


def train(store: Store, engine_url: str, model_folder: Path, run_dir: Path, **config: Any) -> RunResult:
    options = {"steps": 2, "lr": 1e-2, "microbatch_tokens": BUDGET, "checkpoint_every": 1, **config}
    return run(
        TrainerConfig(**options, batch_timeout_s=2, trackers=()),
        AlgorithmConfig(),
        store=store,
        engines=[SGLangEngine(engine_url, control_timeout_s=20)],
        model_path=model_folder,
        run_dir=run_dir,
        groups=2,
        max_staleness=8,
        stop=threading.Event(),
    )


def metrics_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def put_good(store: Store, *names: str) -> None:
    for name in names:
        put_group(store, name, [0, 1, 1])


# How each group is damaged, and a part of its error; the groups are spread over the two batches of a run.
BAD: dict[str, tuple[Callable[[Store, str], None], str]] = {
    "infinite": (lambda store, name: break_reward(store, f"{name}-1"), "a reward must be a finite number"),
    "nan": (
        lambda store, name: execute(
            store, "update rewards set value = 'nan' where episode_id = ?", f"{name}-0"
        ),
        "it cannot be read: must be real number",  # SQLite stores NaN only as a string
    ),
    "empty": (empty_group, "group empty must have at least one rollout"),
    "short": (lambda store, name: shorten_logprobs(store, f"{name}-0"), "5 token ids, 4 logprobs"),
    "long": (lambda store, name: None, "a sample of 84 tokens does not fit a micro-batch of 64"),
}


def put_bad(store: Store, name: str) -> None:
    put_group(store, name, [0, 1, 1], prompt=80 if name == "long" else 6)
    BAD[name][0](store, name)


def test_bad_groups_are_named_and_dropped_and_do_not_affect_the_weights(
    store: Store, engine_url: str, model_folder: Path, run_dir: Path, tmp_path: Path
) -> None:
    for name in ("infinite", "nan", "empty"):
        put_bad(store, name)
    put_good(store, "a", "b")
    for name in ("short", "long"):
        put_bad(store, name)
    put_good(store, "c", "d", "left")
    assert train(store, engine_url, model_folder, run_dir).finished
    reasons = drop_reasons(store)
    assert reasons.keys() == BAD.keys()
    for name, (_, said) in BAD.items():
        assert said in reasons[name], (name, reasons[name])
    assert [line["groups_bad"] for line in metrics_of(run_dir)] == [3, 2]
    # Nothing is lost: the good groups of both batches are trained once, and the last group remains complete.
    assert store.group_counts() == {"pending": 0, "complete": 1, "leased": 0, "trained": 4, "dropped": 5}
    # Nothing was trained on the bad groups: the weights equal those of a run without them.
    with Store.open(tmp_path / "clean" / "store.db") as clean:
        put_good(clean, "a", "b", "c", "d")
        train(clean, engine_url, model_folder, tmp_path / "clean")
    met, never = (load_file(path / "final" / "model.safetensors") for path in (run_dir, tmp_path / "clean"))
    assert all(torch.equal(met[name], never[name]) for name in never)
    initial = load_file(model_folder / "model.safetensors")
    assert any(not torch.equal(met[name], initial[name]) for name in initial)


def flip(file: Path) -> None:
    """Change bytes in the middle of a file, but not its length."""
    data = bytearray(file.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(byte ^ 0xFF for byte in data[middle : middle + 64])
    file.write_bytes(data)


def state(store: Store) -> tuple[dict[str, int], int]:
    return store.group_counts(), store.max_version()


def test_an_unusable_checkpoint_is_refused_before_any_group_is_leased(
    store: Store, engine_url: str, model_folder: Path, run_dir: Path, tmp_path: Path
) -> None:
    put_good(store, "a", "b", "c", "d", "e", "f")
    train(store, engine_url, model_folder, run_dir)
    before = state(store)
    # a checkpoint of another model
    with pytest.raises(TrainingError, match="step-2 is a checkpoint of another model"):
        train(store, engine_url, build_model(tmp_path / "llama", "llama"), run_dir, steps=3)
    assert state(store) == before
    # a corrupted shard
    (shard,) = (run_dir / "checkpoints" / "step-2").glob("*.distcp")
    kept = shard.read_bytes()
    flip(shard)
    with pytest.raises(
        TrainingError, match=r"step-2 is damaged: .*\.distcp has changed since it was written"
    ):
        train(store, engine_url, model_folder, run_dir, steps=3)
    assert state(store) == before
    # With the right model and the intact shard, the run continues with the remaining groups.
    shard.write_bytes(kept)
    assert train(store, engine_url, model_folder, run_dir, steps=3) == RunResult(3, 4, finished=True)
    assert [line["step"] for line in metrics_of(run_dir)] == [1, 2, 3]
    assert store.group_counts()["trained"] == 6


def test_a_run_resumes_from_the_previous_checkpoint_if_the_last_one_is_removed(
    store: Store, engine_url: str, model_folder: Path, run_dir: Path
) -> None:
    put_good(store, "a", "b", "c", "d")
    train(store, engine_url, model_folder, run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "step-2")
    assert train(store, engine_url, model_folder, run_dir) == RunResult(2, 4, finished=True)
    assert store.group_counts()["trained"] == 4  # the groups of step 2 were returned, and trained again
    assert [line["step"] for line in metrics_of(run_dir)] == [1, 2]


@pytest.mark.parametrize(("damage", "said"), [("cut", "not a valid safetensors file"), ("nan", "not finite")])
def test_a_model_with_a_corrupted_shard_is_refused_with_the_name_of_the_file(
    store: Store, engine_url: str, model_folder: Path, run_dir: Path, tmp_path: Path, damage: str, said: str
) -> None:
    put_good(store, "a", "b")
    folder = shutil.copytree(model_folder, tmp_path / "copy")
    shard = folder / "model.safetensors"
    data = shard.read_bytes()
    if damage == "cut":
        shard.write_bytes(data[: len(data) // 2])
    else:
        shard.write_bytes(data[:-400] + b"\xff" * 400)  # every float in it is NaN
    with pytest.raises(TrainingError, match=said) as caught:
        train(store, engine_url, folder, run_dir)
    assert str(shard) in str(caught.value)
    assert state(store) == ({"pending": 0, "complete": 2, "leased": 0, "trained": 0, "dropped": 0}, -1)
    assert not (run_dir / "metrics.jsonl").exists()
