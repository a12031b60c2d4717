"""Compares two gloo ranks that share a model with transformers. The ranks are spawned once per module."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from model_support import (
    assert_same,
    build_moe,
    build_wide,
    packed,
    reference,
    samples,
    set_adapters,
)
from safetensors.torch import load_file
from sharding_worker import HALF, NF4, OPTIONS, gradients, main
from spawned_ranks import spawn
from torch import Tensor
from training_support import build_model
from vision_support import build_vision_model, samples_with_images

from areal_agents.algorithms.packing.microbatches import pack
from areal_agents.inference.ports import reserved_ports
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.model import ModelOptions, load_policy


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models with tied embeddings, untied ones, a truncated file, experts, wide rows and a vision tower."""
    root = tmp_path_factory.mktemp("models")
    found = {name: build_model(root / name, tied=name == "tied") for name in ("tied", "untied")}
    found["broken"] = shutil.copytree(found["tied"], root / "broken")
    file = found["broken"] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    found["experts"] = build_moe(root / "experts")
    found["wide"] = build_wide(root / "wide")
    found["vision"] = build_vision_model(root / "vision")
    return found


@pytest.fixture(scope="module")
def results(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of each of two ranks."""
    out = tmp_path_factory.mktemp("sharding")
    with reserved_ports(1) as (port,):
        spawn(main, (port, folders, out), count=2)
    return [torch.load(out / f"{rank}.pt") for rank in range(2)]


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], bound: float = 1e-5) -> None:
    got = {name.removeprefix("model."): tensor for name, tensor in got.items()}
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        error = (got[name] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-12)
        assert error <= bound, (name, float(error))


def test_two_ranks_share_a_base_in_four_bits(
    folders: dict[str, Path], results: list[dict[str, Any]], group: Ranks
) -> None:
    policy = load_policy(folders["wide"], group, options=NF4)
    set_adapters(policy)
    want, whole = gradients(policy, group), policy.full_state_dict()
    frozen = sum(p.to_local().nbytes for p in policy.parameters() if not p.requires_grad)  # type: ignore[attr-defined]
    assert want and all("lora_" in name for name in want)
    for result in results:
        assert_close(result["nf4"], {name.removeprefix("model."): g for name, g in want.items()})
        assert all(torch.equal(result["nf4 whole"][name], tensor) for name, tensor in whole.items())
        assert result["nf4 adapter"].keys() == policy.adapter_state_dict().keys()  # type: ignore[union-attr]
    assert sum(result["nf4 local"] for result in results) == frozen


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "lora"])
def test_two_ranks_have_the_gradient_of_transformers(
    name: str, folders: dict[str, Path], results: list[dict[str, Any]]
) -> None:
    _, want = reference(folders["untied"], samples())
    for result in results:
        assert_close(result[name], want)


@pytest.mark.parametrize("name", ["tied", "replicated"])
def test_tied_embeddings_can_be_sharded_and_replicated(
    name: str, folders: dict[str, Path], results: list[dict[str, Any]]
) -> None:
    _, want = reference(folders["tied"], samples())
    for result in results:
        assert_close(result[name], want)


def test_adapters_begin_with_the_same_values_on_one_rank_and_two(
    folders: dict[str, Path], results: list[dict[str, Any]], group: Ranks
) -> None:
    torch.manual_seed(5)
    policy = load_policy(folders["untied"], group, options=OPTIONS["lora"])
    want = {name.removeprefix("model."): grad for name, grad in gradients(policy, group).items()}
    assert len(want) == 2 * 2 * 7
    assert any(grad.abs().max() > 0 for name, grad in want.items() if ".lora_B." in name)
    for result in results:
        assert_close(result["lora"], want)


def test_a_rank_reads_and_holds_only_its_share(
    folders: dict[str, Path], results: list[dict[str, Any]]
) -> None:
    weights = load_file(folders["tied"] / "model.safetensors")
    whole = sum(tensor.nbytes for tensor in weights.values())
    assert sum(result["read"] for result in results) == whole
    for result in results:
        assert result["read"] == 4 * result["local"] <= 0.51 * whole
        assert result["replicated read"] == whole  # each rank has a copy, as configured
    assert results[0]["whole"].keys() == weights.keys() and results[1]["whole"] == {}
    assert all(torch.equal(results[0]["whole"][name], tensor) for name, tensor in weights.items())


def test_experts_are_sharded_and_read_by_expert(
    folders: dict[str, Path], results: list[dict[str, Any]], group: Ranks
) -> None:
    _, want = reference(folders["experts"], samples())
    half = gradients(load_policy(folders["experts"], group, options=HALF), group)
    weights = load_file(folders["experts"] / "model.safetensors")
    for result in results:
        assert_close(result["experts"], want, 2e-5)
        for name, gradient in half.items():
            cosine = torch.cosine_similarity(result["half"][name].flatten(), gradient.flatten(), dim=0)
            assert cosine > 0.98, (name, float(cosine))
        assert result["experts whole"].keys() == weights.keys()
        assert all(torch.equal(result["experts whole"][name], tensor) for name, tensor in weights.items())
    assert sum(result["experts read"] for result in results) == sum(t.nbytes for t in weights.values())


def test_a_rank_without_images_goes_through_the_vision_tower_too(
    folders: dict[str, Path], results: list[dict[str, Any]], group: Ranks
) -> None:
    batches = pack(samples_with_images()[::5], token_budget=250, ranks=2)
    assert sorted(batch.images is None for batch in batches) == [False, True]
    policy = load_policy(folders["vision"], group)
    want = gradients(policy, group, samples_with_images()[::5])
    assert any(gradient.any() for name, gradient in want.items() if ".visual." in name)
    for result in results:
        assert_close(result["vision"], {name.removeprefix("model."): t for name, t in want.items()})


def test_the_ranks_of_a_context_group_count_as_one_data_rank(results: list[dict[str, Any]]) -> None:
    assert [result["paired"] for result in results] == [(0, 1, 0, 2, 2), (0, 1, 1, 2, 2)]


def test_an_error_on_one_rank_is_raised_on_both(
    folders: dict[str, Path], results: list[dict[str, Any]]
) -> None:
    wrong = "ValueError: replicas: expected a divisor of the 2 ranks, got 3"
    tied, broken = folders["tied"], folders["broken"] / "model.safetensors"
    assert results[0]["errors"] == [wrong, f"TrainingError: {tied}: another rank could not load the model"]
    assert results[1]["errors"][0] == wrong
    assert results[1]["errors"][1].startswith(f"TrainingError: {broken} is not a valid safetensors file")


@pytest.mark.parametrize("setting", ["full", 1, 2])
def test_checkpointed_blocks_keep_only_their_input(
    setting: Any, folders: dict[str, Path], group: Ranks
) -> None:
    def kept(options: ModelOptions) -> int:
        policy, saved = load_policy(folders["untied"], group, options=options), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
            packed(policy, samples())
        return sum(saved)

    full, off = kept(ModelOptions(activation_checkpointing="full")), kept(ModelOptions())
    assert full < 0.5 * off
    some = kept(ModelOptions(activation_checkpointing=setting))
    assert some == full if setting in ("full", 1) else full < some < off
    got = packed(
        load_policy(folders["untied"], group, options=ModelOptions(activation_checkpointing=setting)),
        samples(),
    )
    assert_same(got, reference(folders["untied"], samples()))
    with pytest.raises(ValueError, match="expected off, full or a number"):
        load_policy(folders["untied"], group, options=ModelOptions(activation_checkpointing=0))
