"""Compiled blocks compute the same as uncompiled blocks, for any batch, and are compiled once."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from model_support import assert_same, build_moe, packed, reference
from torch._dynamo.utils import counters
from training_support import build_model, random_group

from areal_agents.errors import TrainingError
from areal_agents.training.config import Fused
from areal_agents.training.distributed import Ranks
from areal_agents.training.model import attention, fused
from areal_agents.training.model.fused import fuse_blocks
from areal_agents.training.model.loading import build_model as build_on_meta
from areal_agents.training.model.lora import LoraOptions
from areal_agents.training.model.model import ModelOptions, load_policy
from areal_agents.training.model.sharding import Checkpointing


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """Begin each test without compiled code, and restore attention after it."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    attention.register()


@pytest.mark.parametrize("checkpointing", [pytest.param("off", marks=pytest.mark.slow), "full"])
def test_graphs_of_blocks_compute_the_same_and_serve_every_batch(
    checkpointing: Checkpointing, model_folder: Path, group: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graphs run without the C++ compiler, which is slow; the next test uses it."""
    monkeypatch.setattr(fused, "BACKEND", "aot_eager")
    options = ModelOptions(fused="compile", activation_checkpointing=checkpointing)
    policy = load_policy(model_folder, group, options=options)
    graphs = []
    for seed, groups in ((0, 1), (1, 3), (2, 2)):  # with other lengths and numbers of segments
        rng = np.random.default_rng(seed)
        batch = [sample for g in range(groups) for sample in random_group(rng, group_id=str(g))]
        assert_same(packed(policy, batch), reference(model_folder, batch))
        graphs.append(counters["stats"]["unique_graphs"])
    assert 0 < graphs[0] == graphs[-1] <= 8  # not one for each block or each batch


@pytest.mark.slow
def test_blocks_compiled_by_inductor_compute_the_same(tmp_path: Path, group: Ranks) -> None:
    folder = build_model(tmp_path)
    policy = load_policy(folder, group, options=ModelOptions(fused="compile"))
    batch = random_group(np.random.default_rng(0), group_id="g")
    assert_same(packed(policy, batch), reference(folder, batch))


@pytest.mark.slow
def test_adapters_are_compiled_with_their_blocks(
    model_folder: Path, group: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "BACKEND", "aot_eager")
    both = []
    for value in ("none", "compile"):
        torch.manual_seed(0)
        options = ModelOptions(fused=value, lora=LoraOptions(rank=2))  # type: ignore[arg-type]
        both.append(packed(load_policy(model_folder, group, options=options), batch_of_one()))
    assert both[0][1] and all("lora_" in name for name in both[0][1])
    trained = {name: gradient for name, gradient in both[0][1].items() if gradient.any()}
    assert_same((both[1][0], {name: both[1][1][name] for name in trained}), (both[0][0], trained))


def batch_of_one() -> list[Any]:
    return random_group(np.random.default_rng(4), group_id="g")


@pytest.mark.parametrize(("setting", "device"), [("liger", "cpu"), ("compile", "cpu")])
def test_a_setting_that_cannot_be_used_is_refused_with_the_reason(
    setting: Fused, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = build_on_meta(build_model(tmp_path / "dense"))
    if setting == "compile":
        monkeypatch.setenv("CXX", "no-such-compiler")
    message = {"liger": "liger needs a GPU", "compile": r"needs a C\+\+ compiler"}[setting]
    with pytest.raises(TrainingError, match=message):
        fuse_blocks(model, setting, torch.device(device))
    monkeypatch.delenv("CXX", raising=False)
    experts, _ = build_on_meta(build_moe(tmp_path / "experts"))
    with pytest.raises(TrainingError, match="qwen3_moe has experts"):
        fuse_blocks(experts, "compile", torch.device("cpu"))


def test_a_missing_package_is_named_with_its_extra(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = build_on_meta(model_folder)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "liger" in name else find(name))
    with pytest.raises(TrainingError, match=r"trainer\.fused: liger needs liger_kernel.*areal-agents\[gpu\]"):
        fuse_blocks(model, "liger", torch.device("cuda"))
    before = [block.forward for block in model.get_decoder().layers]
    fuse_blocks(model, "auto", torch.device("cuda"))
    assert [block.forward for block in model.get_decoder().layers] == before


def test_liger_replaces_only_norms_activations_and_the_rotary_embedding(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Liger's kernels need a GPU; `python -m benchmarks.gpu fused` compares and times them there."""
    asked: list[dict[str, bool]] = []
    library, package = ModuleType("liger_kernel.transformers.monkey_patch"), ModuleType("liger_kernel")
    library.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen3": None}  # type: ignore[attr-defined]
    library._apply_liger_kernel_to_instance = lambda model, **kinds: asked.append(kinds)  # type: ignore[attr-defined]
    transformers = ModuleType("liger_kernel.transformers")
    transformers.monkey_patch = library  # type: ignore[attr-defined]
    package.__spec__ = importlib.util.spec_from_loader("liger_kernel", None)
    for module in (package, transformers, library):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    model, _ = build_on_meta(model_folder)
    for setting in ("liger", "auto"):
        fuse_blocks(model, setting, torch.device("cuda"))  # type: ignore[arg-type]
    kinds = {"rope", "rms_norm", "swiglu"}
    assert [{kind for kind, wanted in each.items() if wanted} for each in asked] == [kinds] * 2
    experts, _ = build_on_meta(build_moe(tmp_path))
    with pytest.raises(TrainingError, match="dense text models of families that Liger knows, and qwen3_moe"):
        fuse_blocks(experts, "liger", torch.device("cuda"))


def test_models_that_are_built_after_liger_was_used_do_not_have_its_kernels(model_folder: Path) -> None:
    """A frozen reference, or a critic, is built without weights, which Liger's kernels would read."""
    pytest.importorskip("liger_kernel")
    family = importlib.import_module("transformers.models.qwen3.modeling_qwen3")
    before = dict(vars(family))
    try:
        model, _ = build_on_meta(model_folder)
        fused.patch_with_liger(model)
        assert hasattr(model.model.norm, "casting_mode")  # an attribute of Liger's norm
        assert family.Qwen3RMSNorm is before["Qwen3RMSNorm"]
        assert family.apply_rotary_pos_emb is not before["apply_rotary_pos_emb"]
        later, _ = build_on_meta(model_folder)  # building passes meta tensors through every layer
        assert not hasattr(later.model.norm, "casting_mode")
        cos, sin = torch.rand(2, 1, 4, 8).unbind()
        query, key = torch.rand(2, 1, 2, 4, 8).unbind()
        for one, other in zip(
            family.apply_rotary_pos_emb(query, key, cos, sin),
            before["apply_rotary_pos_emb"](query, key, cos, sin),
            strict=True,
        ):
            assert torch.equal(one, other)
    finally:
        vars(family).update(before)
