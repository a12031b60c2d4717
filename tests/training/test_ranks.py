"""Two gloo ranks give the same weights, metrics and checkpoints as one. They are spawned once per module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks_worker import LAYOUTS, main, train, train_preset
from safetensors.torch import load_file
from spawned_ranks import spawn
from training_support import build_model, record_groups

from areal_agents.inference import running_engine
from areal_agents.inference.ports import reserved_ports
from areal_agents.store import Store
from areal_agents.training.checkpoint.checkpoint import TrainingProgress, load_checkpoint
from areal_agents.training.config import TrainerConfig
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.model import load_policy
from areal_agents.training.records.files import TurnRecord, read_records
from areal_agents.training.step.optimizer import make_optimizer


@pytest.fixture(scope="module")
def spawned(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The folder that two ranks wrote, and what each of them returned."""
    out = tmp_path_factory.mktemp("ranks")
    build_model(out / "reference", seed=1)
    with (
        reserved_ports(1) as (port,),
        running_engine(model_folder, kernel="torch", threads=1, slots=16, max_context=256) as url,
        Store.open(out / "run" / "store.db") as store,
    ):
        record_groups(store, url, ["a", "b", "c", "d"])
        spawn(main, (port, str(model_folder), str(out / "reference"), str(out), url), count=2)
        assert store.group_counts()["trained"] == 4
    return out, [torch.load(out / f"{rank}.pt") for rank in range(2)]


def test_two_ranks_train_like_one(spawned: tuple[Path, list[Any]], model_folder: Path, group: Ranks) -> None:
    want_statistics, want_weights = train(model_folder, group)
    for statistics, weights, *_ in spawned[1]:
        for name, value in want_statistics.items():
            assert statistics[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
        for name, tensor in want_weights.items():
            torch.testing.assert_close(weights[name], tensor, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", LAYOUTS["data"])
def test_every_way_to_share_the_work_has_the_same_gradient(
    name: str, spawned: tuple[Path, list[Any]], model_folder: Path, group: Ranks, tmp_path: Path
) -> None:
    """Data parallelism, and for the presets that LAYOUTS lists also context parallelism and replicas."""
    out, results = spawned
    want_weights, want_statistics, want_norm = train_preset(
        name, model_folder, out / "reference", group, tmp_path
    )
    want_records = by_turn(tmp_path)
    for layout in [layout for layout, names in LAYOUTS.items() if name in names]:
        for weights, statistics, norm in (result[5][layout, name] for result in results):
            assert norm == pytest.approx(want_norm, rel=1e-4), layout
            for key, tensor in want_weights.items():
                torch.testing.assert_close(weights[key], tensor, atol=1e-6, rtol=1e-4, msg=f"{layout} {key}")
            if layout == "data":
                assert statistics == pytest.approx(want_statistics, rel=1e-3, abs=1e-4)
        records = by_turn(out / "records" / layout / name)
        assert records.keys() == want_records.keys()
        for turn_id, want in want_records.items():
            assert records[turn_id].states == want.states and None not in want.states
            assert records[turn_id].clipped == want.clipped
            for value, array in want.values.items():
                found = records[turn_id].values[value]
                np.testing.assert_allclose(found, array, rtol=1e-3, atol=1e-4, err_msg=f"{layout} {value}")


def by_turn(run_dir: Path) -> dict[str, TurnRecord]:
    return {record.turn_id: record for record in read_records(run_dir)}


@pytest.mark.parametrize("where", [("shards", "optimizer"), ("shards", "all"), ("copies", "all")])
def test_ranks_whose_weights_are_in_host_memory_train_like_one(
    where: tuple[str, str], spawned: tuple[Path, list[Any]], model_folder: Path, group: Ranks
) -> None:
    want_statistics, want_weights = train(model_folder, group)
    for statistics, weights in (result[10][where] for result in spawned[1]):
        for name, value in want_statistics.items():
            assert statistics[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
        for name, tensor in want_weights.items():
            torch.testing.assert_close(weights[name], tensor, atol=2e-5, rtol=1e-4)


def test_one_rank_resumes_the_checkpoint_of_two(
    spawned: tuple[Path, list[Any]], model_folder: Path, group: Ranks
) -> None:
    out, results = spawned
    policy = load_policy(model_folder, group)
    optimizer = make_optimizer(policy, TrainerConfig(lr=1e-2))
    assert load_checkpoint(
        out / "checkpoints" / "step-1", {"policy": (policy, optimizer)}, group
    ) == TrainingProgress(1, 1)
    for name, tensor in policy.full_state_dict().items():
        assert torch.equal(tensor, results[0][2][name])
    assert len(optimizer.state) == len(list(policy.parameters()))


def test_a_stop_on_one_rank_stops_both_and_leaves_no_gradient(spawned: tuple[Path, list[Any]]) -> None:
    assert [result[3] for result in spawned[1]] == [(True, False)] * 2


def test_the_loop_runs_on_two_ranks(spawned: tuple[Path, list[Any]]) -> None:
    out, results = spawned
    assert [result[4][1] for result in results] == [(2, 3, "step-2")] * 2
    published = load_file(out / "run" / "weights" / "v3" / "model.safetensors")
    final = load_file(out / "run" / "final" / "model.safetensors")
    assert all(torch.equal(published[name], final[name]) for name in published)
    assert len((out / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_missing_batch_ends_both_ranks_and_the_run_can_be_resumed(
    spawned: tuple[Path, list[Any]],
) -> None:
    out, results = spawned
    ended = [result[4][0] for result in results]
    assert "did not get 2 complete groups" in ended[0] and ended[1] == ended[0]
    weights = out / "run" / "weights"  # no step before the error is lost
    before, after = (load_file(weights / version / "model.safetensors") for version in ("v2", "v3"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_two_ranks_publish_with_every_transport(spawned: tuple[Path, list[Any]]) -> None:
    first, second = (result[6] for result in spawned[1])
    for transport in ("disk", "tensor", "broadcast", "lora"):
        assert first[transport] <= 1e-5 and second[transport] <= 1e-5
        assert (first[f"{transport} lost"], second[f"{transport} lost"]) == (0, 1)  # and neither rank waits


@pytest.mark.parametrize("stopped", [False, True])
def test_engines_wake_when_every_rank_has_freed_its_memory(
    stopped: bool, spawned: tuple[Path, list[Any]]
) -> None:
    first, second = (result[7][stopped] for result in spawned[1])
    assert first["freed"] < second["freed"] <= first["woken"]  # the second rank waits for the first


def test_no_collective_of_the_device_is_pending_while_the_first_rank_waits(
    spawned: tuple[Path, list[Any]],
) -> None:
    waits = spawned[1][0][8]
    assert {name for name, *_ in waits} == {"batch", "engines"}
    for spans in (result[9] for result in spawned[1]):
        assert any("reduce_scatter" in name for name, *_ in spans)
        for what, _, waited in waits:
            pending = [name for name, began, ended in spans if began < waited < ended]
            assert not pending, what
