"""The trainer computes the engine's hashes of the same weights, in the form in which the engine has them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from model_support import build_moe
from safetensors.torch import load_file
from torch import Tensor

from areal_agents.errors import EngineError
from areal_agents.inference import SGLangEngine
from areal_agents.inference.engine import WeightsChecksum
from areal_agents.training.publish.checksums import (
    Agreement,
    Checksums,
    EngineComparison,
    FolderWeights,
    cpu_hash,
    gpu_hash,
)


def served(folder: Path) -> dict[str, Tensor]:
    """Return the tiny dense model's weights, fused as in engines."""
    weights = load_file(folder / "model.safetensors")
    for layer in (f"model.layers.{i}" for i in range(2)):
        for fused, parts in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
            parent = fused.partition(".")[0]
            names = [f"{layer}.{parent}.{part}_proj.weight" for part in parts]
            weights[f"{layer}.{fused}.weight"] = torch.cat([weights.pop(name) for name in names])
    return weights


class Serving(SGLangEngine):
    """A client of a server that reports these hashes, by tensor, for each of its ranks."""

    def __init__(self, *ranks: dict[str, str]) -> None:
        super().__init__("http://there")
        self._ranks = ranks

    async def checksum(self) -> WeightsChecksum:
        return WeightsChecksum(self._ranks)


def test_the_gpu_hash_equals_that_of_sglangs_kernel() -> None:
    """The expected hashes are those of SGLang's Triton kernel (0.5.21) in Triton's interpreter."""
    cases = {
        (5, torch.float32): "fd8c4b551551804c",
        (3, torch.bfloat16): "a368c20ae9156437",
        (9000, torch.float32): "c4ee075e02870ddd",
        (20001, torch.float16): "3914c17d751fcecf",
    }
    for (count, dtype), want in cases.items():
        values = torch.from_numpy(np.sin(np.arange(count, dtype=np.float64))).to(dtype)
        assert gpu_hash(values) == want, (count, dtype)
    assert gpu_hash(torch.zeros(0)) == "0" * 16


@pytest.mark.parametrize("hashed", [cpu_hash, gpu_hash])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
async def test_an_engine_may_hold_the_weights_in_any_type_on_any_device(
    hashed, dtype: torch.dtype, model_folder: Path
) -> None:
    held = {name: hashed(tensor.to(dtype)) for name, tensor in served(model_folder).items()}
    agreement = await Checksums(FolderWeights(model_folder)).check(Serving(held))
    assert agreement == Agreement(len(held), len(held))


async def test_a_weight_with_one_wrong_bit_is_named(model_folder: Path) -> None:
    for name, tensor in served(model_folder).items():
        held = {other: cpu_hash(t) for other, t in served(model_folder).items()}
        wrong = tensor.clone()
        wrong.view(-1).view(torch.int32)[-1] ^= 1
        held[name] = cpu_hash(wrong)
        with pytest.raises(EngineError, match=rf"http://there serves other weights.*: {name} differs"):
            await Checksums(FolderWeights(model_folder)).check(Serving(held))


async def test_weights_that_cannot_be_compared_are_not_reported_as_equal(
    model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held = {name: cpu_hash(tensor) for name, tensor in served(model_folder).items()}
    some = dict(list(held.items())[:3])
    with pytest.raises(EngineError, match="the weights that .* serves lack model"):
        await Checksums(FolderWeights(model_folder)).check(Serving(some))
    packed = {**some, "model.packed": "0" * 16}
    comparison = EngineComparison(FolderWeights(model_folder))
    await comparison(Serving(packed))
    assert comparison.share == 3 / 4 and "1 of 4 weights have an engine-specific form" in caplog.text
    with pytest.raises(EngineError, match="none of the published weights"):
        await Checksums(FolderWeights(model_folder)).check(Serving({"other": "0" * 16}))
    workers = EngineComparison(FolderWeights(model_folder))
    await workers(Serving(held, held))
    assert workers.share is None and "2 tensor-parallel workers are not compared" in caplog.text


async def test_a_padded_vocabulary_and_fused_experts_are_compared(model_folder: Path, tmp_path: Path) -> None:
    weights = served(model_folder)
    embedding = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = torch.cat([embedding, torch.zeros(32, 32)])
    held = {name: cpu_hash(tensor) for name, tensor in weights.items()}
    assert await Checksums(FolderWeights(model_folder)).check(Serving(held)) == Agreement(
        len(held), len(held)
    )

    moe = load_file(build_moe(tmp_path) / "model.safetensors")
    experts = "model.layers.0.mlp.experts"
    pairs = [
        torch.cat([moe[f"{experts}.{e}.{part}_proj.weight"] for part in ("gate", "up")]) for e in range(6)
    ]
    held = {
        f"{experts}.w13_weight": cpu_hash(torch.stack(pairs)),
        f"{experts}.w2_weight": cpu_hash(
            torch.stack([moe[f"{experts}.{e}.down_proj.weight"] for e in range(6)])
        ),
        "model.norm.weight": cpu_hash(moe["model.norm.weight"]),
        "model.of_its_own": "0" * 16,
    }
    assert await Checksums(FolderWeights(tmp_path)).check(Serving(held)) == Agreement(3, 4)
