"""Shards loaded from files have the weights that transformers loads, and errors name the bad file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from model_support import assert_same, packed, reference, samples
from safetensors.torch import load_file, save_file
from training_support import VOCAB, build_model
from transformers import AutoModelForCausalLM, LlamaConfig

from areal_agents.errors import TrainingError
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.loading import load_weights
from areal_agents.training.model.model import load_policy
from areal_agents.training.model.safetensors_files import Checkpoint


def split(folder: Path, out: Path) -> Path:
    """Save the model again, in at least three files with an index."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(out, max_shard_size="20KB")
    assert len(list(out.glob("*.safetensors"))) >= 3
    return out


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace weights, add them, or remove those that are None."""
    file = folder / "model.safetensors"
    weights = {**load_file(file), **changes}
    save_file({n: t for n, t in weights.items() if t is not None}, file, metadata={"format": "pt"})


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_in_several_files_is_loaded(tied: bool, tmp_path: Path, group: Ranks) -> None:
    folder = build_model(tmp_path / "one", tied=tied)
    policy = load_policy(split(folder, tmp_path / "many"), group)
    original = load_file(folder / "model.safetensors")
    weights = policy.full_state_dict()
    assert weights.keys() == original.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in original.items())
    assert policy.full_state_dict(keep=False) == {}


def test_bfloat16_files_become_float32_masters(tmp_path: Path, group: Ranks) -> None:
    folder = build_model(tmp_path)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(tmp_path / "bf16")
    policy = load_policy(tmp_path / "bf16", group)
    want = {n: t.to(torch.bfloat16).float() for n, t in load_file(folder / "model.safetensors").items()}
    assert policy.saved_dtype == torch.bfloat16
    weights = policy.full_state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in want.items())
    on_disk = sum(t.nbytes for t in load_file(tmp_path / "bf16" / "model.safetensors").values())
    assert load_weights(policy.model, tmp_path / "bf16") == on_disk


def test_tied_weights_may_be_saved_under_either_name(tmp_path: Path, group: Ranks) -> None:
    folder = build_model(tmp_path)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    for stored in ({"lm_head.weight": embedding}, {"model.embed_tokens.weight": embedding}):
        rewrite(folder, **{"lm_head.weight": None, "model.embed_tokens.weight": None, **stored})
        weights = load_policy(folder, group).full_state_dict()
        assert torch.equal(weights["model.embed_tokens.weight"], embedding)
        assert "lm_head.weight" not in weights


def test_rotary_frequencies_are_rebuilt_in_float32(tmp_path: Path, group: Ranks) -> None:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    policy = load_policy(tmp_path, group)
    want, got = dict(model.named_buffers()), dict(policy.model.named_buffers())
    assert want.keys() == got.keys() and len(want) == 2
    for name, buffer in want.items():
        assert got[name].dtype == torch.float32 and torch.equal(got[name], buffer), name
    assert_same(packed(policy, samples()), reference(tmp_path, samples()))


def test_missing_extra_and_misshapen_weights_are_named(tmp_path: Path, group: Ranks) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    folder = build_model(tmp_path / "missing")
    rewrite(folder, **{name: None})
    with pytest.raises(TrainingError, match=rf"missing: missing weights \['{name}'\]"):
        load_policy(folder, group)
    folder = build_model(tmp_path / "extra")
    rewrite(folder, **{"model.layers.2.mlp.up_proj.weight": torch.zeros(3)})
    with pytest.raises(TrainingError, match=r"extra weights .*layers\.2.*\(model\.safetensors\)"):
        load_policy(folder, group)
    folder = build_model(tmp_path / "shape")
    rewrite(folder, **{name: torch.zeros(48, 31)})
    with pytest.raises(TrainingError, match=rf"{name} \(model.safetensors\) of shape \(48, 31\)"):
        load_policy(folder, group)
    folder = build_model(tmp_path / "quantised")
    rewrite(folder, **{name: torch.zeros(48, 32, dtype=torch.int8)})
    with pytest.raises(TrainingError, match=f"{name} is I8; only unquantised"):
        load_policy(folder, group)


def test_broken_files_are_named(tmp_path: Path, group: Ranks) -> None:
    whole = build_model(tmp_path / "whole")
    folder = split(whole, tmp_path / "many")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    broken = folder / index["weight_map"]["model.layers.1.mlp.up_proj.weight"]
    data = broken.read_bytes()

    broken.write_bytes(data[:-5])  # truncated
    with pytest.raises(TrainingError, match=rf"{broken} is not a valid safetensors file"):
        load_policy(folder, group)

    broken.write_bytes(b"\x07" * 8 + data[8:])  # a header of a nonsensical length
    with pytest.raises(TrainingError, match=rf"{broken} is not a valid safetensors file"):
        load_policy(folder, group)

    damaged = load_file(whole / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    weights = load_safetensors(data, tmp_path)
    weights["model.layers.1.mlp.up_proj.weight"] = damaged.index_fill(0, torch.tensor([7]), float("nan"))
    save_file(weights, broken, metadata={"format": "pt"})
    with pytest.raises(TrainingError, match=rf"{broken}: model.layers.1.mlp.up_proj.weight .*not finite"):
        load_policy(folder, group)

    broken.unlink()
    with pytest.raises(TrainingError, match=str(broken)):
        load_policy(folder, group)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ')
    with pytest.raises(TrainingError, match="index.json is not a valid index"):
        load_policy(folder, group)


def load_safetensors(data: bytes, folder: Path) -> dict[str, torch.Tensor]:
    (folder / "copy.safetensors").write_bytes(data)
    return load_file(folder / "copy.safetensors")


def test_rows_of_a_tensor_are_read_without_the_rest(tmp_path: Path) -> None:
    checkpoint = Checkpoint(build_model(tmp_path))
    stored = checkpoint.tensors["model.layers.0.mlp.up_proj.weight"]
    want = load_file(tmp_path / "model.safetensors")[stored.name]
    assert torch.equal(checkpoint.read(stored, 5, 9), want[5:9])
    assert checkpoint.bytes_read == 4 * 32 * 4
