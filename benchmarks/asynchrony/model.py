"""The models of the benchmark: the quick start's, modified so that it never ends a reply on its own, and a
large one.

The workload determines the lengths, so the policy must not end a reply on its own: the tokens that end a
reply get the embedding of a token that it never samples. Nothing else in the model changes, and no shape.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from areal_agents.errors import ConfigError

QUICK_START_MODEL = Path("examples/search_agent/model")
EMBEDDING = "model.embed_tokens.weight"
UNLIKELY_TOKEN = 901  # a token of the quick start's vocabulary; its mean probability in the workload is 8e-7


def endless_model(folder: Path) -> Path:
    """Write the quick-start model, modified so that it does not end replies, to `folder`.

    Raises:
        ConfigError: the working directory is not a checkout with the quick-start model.
    """
    from safetensors.torch import load_file, save_file

    if not (QUICK_START_MODEL / "config.json").is_file():
        raise ConfigError(
            f"bench async measures the quick-start model, but there is no {QUICK_START_MODEL} here; run it "
            "in a checkout of the project"
        )
    shutil.copytree(QUICK_START_MODEL, folder)
    tensors = load_file(folder / "model.safetensors")
    stops = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    tensors[EMBEDDING][stops] = tensors[EMBEDDING][UNLIKELY_TOKEN].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def random_model(folder: Path, *, megabytes: int) -> Path:
    """Write a random Qwen3 of at least `megabytes` MB in float32, without a tokenizer, to `folder`."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    hidden, vocab = 1024, 8192
    layer = hidden * (2 * 1024 + 2 * 512 + 3 * 3072)
    layers = max(1, -(-(megabytes * 10**6 // 4 - hidden * vocab) // layer))
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def other_weights(folder: Path, copy: Path) -> Path:
    """Write the model in `folder`, with slightly larger weights, to `copy`."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = {name: tensor * 1.01 for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy
