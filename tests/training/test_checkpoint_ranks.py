"""A checkpoint is passed from one rank to two and back: weights, moments, critic, and a whole run.

The two ranks are spawned once for the module.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from checkpoint_worker import build, main, step, train_recorded, whole
from safetensors.torch import load_file
from stored_support import put_group

from areal_agents.inference.ports import reserved_ports
from areal_agents.store import Store
from areal_agents.training.checkpoint.checkpoint import Checkpoints, TrainingProgress, load_checkpoint
from areal_agents.training.distributed import Ranks

Spawned = tuple[Path, dict[str, torch.Tensor], list[Any]]


@pytest.fixture(scope="module")
def spawned(model_folder: Path, group: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Spawned:
    """The folder, the state that one rank saved in it, and the results of the two ranks."""
    out = tmp_path_factory.mktemp("ranks")
    parts = build(model_folder, group)
    step(parts, group, 0)
    path = Checkpoints(out / "one", group, wait=True).save(parts, TrainingProgress(1, 7))
    shutil.copytree(path, out / "damaged" / "step-1")
    (shard,) = (out / "damaged" / "step-1").glob("*.distcp")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with Store.open(out / "recorded.db") as recorded:
        for index in range(6):
            put_group(recorded, f"g{index}", [0, 1], prompt=6 + index)
    train_recorded(model_folder, out / "run", out / "recorded.db", steps=1)
    with reserved_ports(1) as (port,):
        mp.spawn(main, (port, model_folder, out), nprocs=2)
    return out, whole(parts), [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(2)]


def test_two_ranks_load_what_one_saved(spawned: Spawned) -> None:
    _, saved, results = spawned
    for progress, loaded, *_ in results:
        assert progress == TrainingProgress(1, 7)
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[key], saved[key]) for key in saved)


def test_one_rank_loads_what_two_saved(spawned: Spawned, model_folder: Path, group: Ranks) -> None:
    out, _, results = spawned
    parts = build(model_folder, group)
    assert load_checkpoint(out / "two" / "step-2", parts, group) == TrainingProgress(2, 2)
    loaded = whole(parts)
    for _, _, stepped, *_ in results:
        assert loaded.keys() == stepped.keys()
        assert all(torch.equal(loaded[key], stepped[key]) for key in stepped)


def test_two_ranks_step_like_one_under_muon(spawned: Spawned, model_folder: Path, group: Ranks) -> None:
    out, _, results = spawned
    parts = build(model_folder, group)
    load_checkpoint(out / "one" / "step-1", parts, group)
    step(parts, group, 1)
    want = whole(parts)
    for key, value in want.items():  # Muon's iterations are in bfloat16, with another order of sums
        torch.testing.assert_close(results[0][2][key], value, atol=1e-3, rtol=2e-2)


def test_a_damaged_shard_is_refused_on_every_rank(spawned: Spawned) -> None:
    errors = [result[3] for result in spawned[2]]
    assert all("damaged/step-1 is damaged" in error for error in errors)
    assert any("__0_0.distcp has changed since it was written" in error for error in errors)


def test_a_run_continues_from_one_rank_to_two_and_back(
    spawned: Spawned, model_folder: Path, tmp_path: Path, group: Ranks
) -> None:
    out, _, results = spawned
    assert [result[4] for result in results] == [2, 2]
    assert train_recorded(model_folder, out / "run", out / "recorded.db", steps=3).step == 3
    train_recorded(model_folder, tmp_path, out / "recorded.db", steps=3)
    got, want = (load_file(folder / "final" / "model.safetensors") for folder in (out / "run", tmp_path))
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, atol=2e-5, rtol=1e-4)
