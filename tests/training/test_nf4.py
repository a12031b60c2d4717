"""Adapters on frozen 4-bit weights give the same results as on the dequantized dense weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_worker import train_recorded
from model_support import assert_same, build_moe, build_wide, packed, samples, set_adapters
from safetensors.torch import load_file
from stored_support import put_group
from test_checkpoint import Run, assert_equal
from training_support import build_model

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.packing.microbatches import pack
from areal_agents.errors import TrainingError
from areal_agents.store import Store
from areal_agents.training.checkpoint.checkpoint import TrainingProgress
from areal_agents.training.checkpoint.export import export, write_final
from areal_agents.training.config import TrainerConfig
from areal_agents.training.distributed import Ranks
from areal_agents.training.memory.estimate import Need, TrainerMemory
from areal_agents.training.model.folder import write_model
from areal_agents.training.model.lora import LoraOptions, adapters_off
from areal_agents.training.model.model import ModelOptions, Policy, load_policy
from areal_agents.training.model.nf4 import import_bitsandbytes, quantize
from areal_agents.training.model.sharding import blocks

NF4, DENSE = LoraOptions(rank=3, base="nf4"), LoraOptions(rank=3)
# Appendix E of arXiv 2305.14314, rounded
TABLE = [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0,
         0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0]  # fmt: skip


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wide(tmp_path_factory.mktemp("wide") / "model")


def quantized(weight: np.ndarray) -> np.ndarray:
    """Replace each weight by the nearest value of the table, scaled by the largest magnitude in its block of
    64 weights."""
    grouped = weight.astype(np.float64).reshape(-1, 64)
    scale = np.abs(grouped).max(1, keepdims=True)
    nearest = np.abs(grouped[..., None] / scale[..., None] - np.array(TABLE)).argmin(-1)
    return (np.array(TABLE)[nearest] * scale).reshape(weight.shape)


def dense_twin(wide: Path, group: Ranks, folder: Path) -> Path:
    """Write a model folder with the dequantized weights; return `folder`."""
    policy = load_policy(wide, group, options=ModelOptions(lora=NF4))  # its adapters add nothing yet
    write_model(policy.full_state_dict(), folder, like=wide, dtype=torch.float32)
    return folder


def test_matrices_of_the_blocks_are_rounded_to_the_table_and_all_else_is_kept(
    wide: Path, group: Ranks
) -> None:
    policy = load_policy(wide, group, options=ModelOptions(lora=NF4))
    got, saved = policy.full_state_dict(), load_file(wide / "model.safetensors")
    assert got.keys() == saved.keys()
    rounded = [name for name, tensor in saved.items() if ".layers." in name and tensor.ndim == 2]
    assert len(rounded) == 2 * 7
    for name, tensor in saved.items():
        if name not in rounded:
            assert torch.equal(got[name], tensor), name
            continue
        want = quantized(tensor.numpy())
        # a weight halfway between two values may be rounded to either
        far = np.abs(got[name].numpy() - want) > 1e-3 * np.abs(tensor.numpy()).max()
        assert far.mean() < 0.001, name


def test_logprobs_and_gradients_are_those_of_the_dense_weights(
    wide: Path, group: Ranks, tmp_path: Path
) -> None:
    twin = dense_twin(wide, group, tmp_path / "twin")
    both: list[Policy] = []
    for folder, lora in ((wide, NF4), (twin, DENSE)):
        policy = load_policy(folder, group, options=ModelOptions(lora=lora))
        set_adapters(policy)
        both.append(policy)
    got, want = (packed(policy, samples()) for policy in both)
    assert want[1] and all("lora_" in name for name in want[1])
    assert_same(got, want)
    with torch.no_grad(), adapters_off(both[0].model), adapters_off(both[1].model):
        assert_same((packed_logprobs(both[0]), {}), (packed_logprobs(both[1]), {}))
    assert_equal_enough(both[0].full_state_dict(), both[1].full_state_dict())  # merged
    adapters = [policy.adapter_state_dict() for policy in both]
    assert_equal(adapters[0], adapters[1])  # type: ignore[arg-type]


def packed_logprobs(policy: Policy) -> list[torch.Tensor]:
    return [policy(micro).logprobs for micro in pack(samples(), token_budget=4096)]


def assert_equal_enough(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, atol=1e-6, rtol=1e-6, msg=name)


def test_a_run_is_resumed_and_exported_and_its_base_cannot_change(
    wide: Path, group: Ranks, tmp_path: Path
) -> None:
    straight = Run(wide, group, lora=NF4)
    straight.step(0, 1)
    path = straight.save(tmp_path, 2)
    straight.step(2)
    again = Run(wide, group, lora=NF4)
    assert again.load(path) == TrainingProgress(2, 2)
    again.step(2)
    assert_equal(again.weights(), straight.weights())
    with pytest.raises(TrainingError, match=r"of another trainer\.lora"):
        Run(wide, group, lora=DENSE).load(path)
    write_final(again.policy, tmp_path / "run", like=wide, writes=True)
    merged = load_file(tmp_path / "run" / "final" / "model.safetensors")
    assert_equal(merged, again.weights())
    adapter = load_file(tmp_path / "run" / "final-adapter" / "adapter_model.safetensors")
    assert adapter.keys() == again.policy.adapter_state_dict().keys()  # type: ignore[union-attr]


def test_a_run_trains_an_adapter_on_nf4_and_its_checkpoint_is_exported(wide: Path, tmp_path: Path) -> None:
    with Store.open(tmp_path / "recorded.db") as recorded:
        for index in range(4):
            put_group(recorded, f"g{index}", [0, 1], prompt=6 + index)
    run = tmp_path / "run"
    adapter = {"rank": 3, "base": "nf4"}
    assert train_recorded(wide, run, tmp_path / "recorded.db", steps=1, lora=adapter).step == 1
    export(run, tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert_equal(exported, load_file(run / "final" / "model.safetensors"))


def test_only_packed_weights_are_kept_for_the_backward_pass(wide: Path, group: Ranks) -> None:
    def need(base: str) -> Need:
        config = TrainerConfig(device="cpu", lora={"rank": 3, "base": base})
        return TrainerMemory(config, AlgorithmConfig(), wide, group, on_gpu=False).need("off", 64)

    packed, dense = need("nf4"), need("dtype")
    policy = load_policy(wide, group, options=ModelOptions(lora=NF4))
    frozen = sum(p.to_local().nbytes for p in policy.parameters() if not p.requires_grad)  # type: ignore[attr-defined]
    assert packed.frozen == frozen + sum(buffer.nbytes for buffer in policy.buffers())
    matrices = sum(p.numel() for p in blocks(load_policy(wide, group).model)[0].parameters() if p.ndim == 2)
    assert dense.frozen - packed.frozen == 2 * matrices * (4 - 9 / 16)
    assert packed.activations == dense.activations and packed.gathered < dense.gathered
    config = TrainerConfig(device="cpu", lora={"rank": 3, "base": "nf4"})
    memory = TrainerMemory(config, AlgorithmConfig(), wide, group, on_gpu=False)
    config = TrainerConfig(device="cpu", lora={"rank": 3})
    assert (
        memory.model_elements
        == TrainerMemory(config, AlgorithmConfig(), wide, group, on_gpu=False).model_elements
    )


def test_models_that_cannot_be_packed_are_refused_with_the_reason(
    group: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wide: Path
) -> None:
    for folder, message in (
        (build_moe(tmp_path / "experts"), "nf4 is for dense text models, not qwen3_moe"),
        (build_model(tmp_path / "narrow"), r"a multiple of 64 weights, and self_attn\.q_proj has rows of 32"),
    ):
        with pytest.raises(TrainingError, match=message):
            load_policy(folder, group, options=ModelOptions(lora=NF4))
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(TrainingError, match=r"nf4 needs bitsandbytes .*areal-agents\[gpu\]"):
        load_policy(wide, group, options=ModelOptions(lora=NF4))


def test_a_torch_version_that_cannot_shard_packed_weights_is_refused(
    wide: Path, group: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.11.0+cu130"))
    with pytest.raises(TrainingError, match=r"nf4 needs PyTorch 2\.13, .* this is 2\.11\.0\+cu130"):
        load_policy(wide, group, options=ModelOptions(lora=NF4))


def test_a_rank_without_rows_packs_nothing() -> None:
    import_bitsandbytes()
    rows: Any = torch.empty(0, 128)
    assert quantize(rows).shape == (0, 72)
