"""Compares the policy's logprobs and gradients with those of transformers on each sequence alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from model_support import assert_same, packed, reference, samples
from training_support import VOCAB, build_model, make_sample
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma3TextConfig,
    Lfm2Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen3NextConfig,
)

from areal_agents.algorithms.packing.microbatches import pack
from areal_agents.errors import TrainingError
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.model import ModelOptions, load_policy

FIXED = {"rope_type": "default", "rope_theta": 10_000.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_shared_prefixes_give_the_flat_logprobs_and_gradients(
    kind: str, tied: bool, tmp_path: Path, group: Ranks
) -> None:
    folder = build_model(tmp_path, kind, tied=tied)
    batch = samples()
    policy = load_policy(folder, group)
    shared = packed(policy, batch)
    assert_same(shared, reference(folder, batch))
    assert sum(len(m.input_ids) for m in pack(batch, token_budget=4096)) < 0.5 * sum(map(len, batch))


@pytest.mark.parametrize("options", [{"share_prefixes": False}, {"token_budget": 120}, {"token_budget": 250}])
def test_packing_changes_nothing(options: dict, model_folder: Path, group: Ranks) -> None:
    batch = samples()
    assert_same(packed(load_policy(model_folder, group), batch, **options), reference(model_folder, batch))


def test_each_token_is_scored_at_its_own_temperature(model_folder: Path, group: Ranks) -> None:
    batch = [*samples(1, temperature=0.7), *samples(2, temperature=1.3)]
    assert_same(packed(load_policy(model_folder, group), batch), reference(model_folder, batch))


def test_chunks_of_the_head_change_nothing(model_folder: Path, group: Ranks) -> None:
    batch = samples()
    policy = load_policy(model_folder, group)
    policy.chunk_logits = 96 * 7
    assert_same(packed(policy, batch), reference(model_folder, batch))


def test_a_token_that_two_samples_predict_from_one_row_is_scored_for_both(
    model_folder: Path, group: Ranks
) -> None:
    rng = np.random.default_rng(3)
    prompt = rng.integers(2, 96, 80).tolist()
    batch = [
        make_sample([*prompt, token, 5], [80, 81], rng=rng, episode_id=str(token)) for token in (7, 7, 9)
    ]
    assert_same(packed(load_policy(model_folder, group), batch), reference(model_folder, batch))


def test_bfloat16_compute_keeps_float32_masters_and_gradients(model_folder: Path, group: Ranks) -> None:
    batch = samples()
    policy = load_policy(model_folder, group, options=ModelOptions(dtype=torch.bfloat16))
    logprobs, gradients = packed(policy, batch)
    assert {p.dtype for p in policy.parameters()} == {g.dtype for g in gradients.values()} == {torch.float32}
    want_logprobs, want_gradients = reference(model_folder, batch)
    difference = torch.cat(logprobs) - torch.cat(want_logprobs)
    assert 0 < difference.abs().mean() < 0.05
    for name, gradient in want_gradients.items():
        cosine = torch.cosine_similarity(gradients[name].flatten(), gradient.flatten(), dim=0)
        assert cosine > 0.98, (name, float(cosine))


def test_the_backbone_returns_the_states_that_predict_trained_tokens(
    model_folder: Path, group: Ranks
) -> None:
    batch = samples()[:1]
    (micro,) = pack(batch, token_budget=4096)
    decoder = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="eager").model
    ids = torch.from_numpy(batch[0].token_ids[None].astype(np.int64))
    want = decoder(ids).last_hidden_state[0, np.flatnonzero(batch[0].loss_mask) - 1]
    policy = load_policy(model_folder, group)
    hidden = policy.backbone(micro)
    torch.testing.assert_close(hidden, want, atol=1e-5, rtol=1e-5)
    hidden.sum().backward()
    assert all(p.grad is not None for p in policy.parameters())
    assert (policy.shape.layers, policy.shape.hidden, policy.shape.vocab) == (2, 32, 96)


def test_full_state_dict_is_what_was_loaded(tmp_path: Path, group: Ranks) -> None:
    for tied in (True, False):
        folder = build_model(tmp_path / str(tied), tied=tied)
        weights = load_policy(folder, group).full_state_dict()
        original = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        if tied:
            del original["lm_head.weight"]
        assert weights.keys() == original.keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in original.items())


def test_folders_that_cannot_be_trained_are_named(tmp_path: Path, group: Ranks) -> None:
    with pytest.raises(TrainingError, match=str(tmp_path / "nowhere")):
        load_policy(tmp_path / "nowhere", group)
    folder = build_model(tmp_path / "wider")
    config = json.loads((folder / "config.json").read_text())
    changed = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    (folder / "config.json").write_text(json.dumps({**config, **changed}))
    with pytest.raises(TrainingError, match=r"missing weights .*layers\.2"):
        load_policy(folder, group)
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(TrainingError, match=r"(?s)cannot load the model: .*num_hidden_layers"):
        load_policy(folder, group)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Qwen3NextConfig(layer_types=["linear_attention", "full_attention"], **SIZES), "linear_attention"),
        (Lfm2Config(layer_types=["conv", "full_attention"], **SIZES), "conv, full_attention"),
        (
            BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4),
            "their own attention implementation",
        ),
        (LlamaConfig(rope_parameters=DYNAMIC, **SIZES), "frequencies of type dynamic"),
        (
            Gemma3TextConfig(
                rope_parameters={"full_attention": DYNAMIC, "sliding_attention": FIXED}, **SIZES
            ),
            "frequencies of type dynamic",
        ),
    ],
    ids=[
        "recurrent",
        "convolution",
        "own attention",
        "frequencies by length",
        "frequencies by length in some layers",
    ],
)
def test_models_that_would_silently_be_computed_differently_are_refused(
    config: PretrainedConfig, reason: str, tmp_path: Path, group: Ranks
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(TrainingError, match=reason):
        load_policy(tmp_path, group)
