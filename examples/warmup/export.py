"""Write a trained network as a Hugging Face folder, and prove that transformers computes the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from warmup.network import Network, Shape, to_hf_state
from warmup.tokenizer import END_OF_TEXT, TURN_END, marker_id, save_tokenizer


def save_model(network: Network, tokenizer: Tokenizer, folder: Path) -> None:
    """Write config, float32 weights and tokenizer. Raises RuntimeError if transformers disagrees."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(to_hf_state(network), folder / "model.safetensors", metadata={"format": "pt"})
    turn_end, pad = marker_id(tokenizer, TURN_END), marker_id(tokenizer, END_OF_TEXT)
    _write_json(folder / "config.json", _config(network.shape, turn_end, pad))
    _write_json(folder / "generation_config.json", {"eos_token_id": [turn_end, pad], "pad_token_id": pad})
    save_tokenizer(tokenizer, folder)
    difference = largest_difference(network, folder)
    if difference > 1e-4:
        raise RuntimeError(f"transformers' logits differ by {difference:.1e}, at most 1e-4 is rounding")


def largest_difference(network: Network, folder: Path) -> float:
    """Return the largest |difference| of logits between `network` and transformers, for random ids."""
    from transformers import AutoModelForCausalLM

    ids = torch.randint(0, network.shape.vocab_size, (2, 300), generator=torch.Generator().manual_seed(0))
    ids[1, :100] = ids[0, :100]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = model(ids).logits
        plain = network.logits(network(ids))
        prefixed = network.logits(network(ids[:, 100:], ids[0, :100]))
    differences = [(theirs - plain).abs().max(), (theirs[:, 100:] - prefixed).abs().max()]
    return float(max(differences))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _config(shape: Shape, turn_end: int, pad: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.feed_forward,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.max_positions,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "eos_token_id": turn_end,
        "pad_token_id": pad,
        "bos_token_id": None,
        "dtype": "float32",
    }
