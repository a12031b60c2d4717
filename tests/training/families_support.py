"""Tiny random models of every causal family of the installed transformers, made from their configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from training_support import VOCAB
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MOST_PARAMETERS = 80_000_000
WINDOW = 24  # shorter than the samples, so that ignoring the window changes the result
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "dff"), 48),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "top_k_experts", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 512),
    **dict.fromkeys(("pad_token_id", "bos_token_id"), 0),
    **dict.fromkeys(("hidden_dropout", "attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 0),
    "num_key_value_heads": 2,
    "multi_query_group_num": 2,
    "head_dim": 8,
    "rotary_dim": 8,
    "sliding_window": WINDOW,
    "eos_token_id": 1,
    "initializer_range": 0.15,
    "n_shared_experts": 1,
    "tie_word_embeddings": False,
}
NOT_NONE = ("num_key_value_heads", "head_dim", "n_routed_experts", "n_shared_experts", "num_experts_per_tok")
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")


def families() -> list[str]:
    """Return the model types of transformers' causal language models that take only text."""
    return [family for family in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) if _reads_text(family)]


def _reads_text(family: str) -> bool:
    others = getattr(CONFIG_MAPPING[family], "sub_configs", None) or {}
    return not any("vision" in name or "audio" in name or "vq" in name for name in others)


def tiny_config(family: str) -> PretrainedConfig:
    """Return the family's defaults with small sizes and two blocks, or one block of each kind of layer."""
    kind = CONFIG_MAPPING[family]
    default = kind().to_dict()
    values = {name: size for name, size in SIZES.items() if default.get(name) is not None}
    for name in NOT_NONE:  # None: derived from another size, or not set at all
        if name in default:
            values[name] = SIZES[name]
    if "kv_lora_rank" in default:  # latent attention has no groups of heads
        values["num_key_value_heads"] = SIZES["num_attention_heads"]
    deep = next((name for name in DEPTHS if isinstance(default.get(name), int)), None)
    depth = default[deep] if deep else 0
    layers = max(2, len(set(default.get("layer_types") or ())))
    if deep:
        values[deep] = layers
    for name, value in default.items():
        if isinstance(value, list) and depth > 2 and len(value) == depth:
            values[name] = (list(dict.fromkeys(value)) * layers)[:layers]
    if isinstance(default.get("rope_parameters"), dict):
        values["rope_parameters"] = default["rope_parameters"]
    return kind(**values)


def build_family(family: str, folder: Path) -> Path:
    """Write a random model of a family to a Hugging Face folder; no parameter value hides mistakes."""
    return build_tiny(tiny_config(family), folder)


def build_tiny(config: PretrainedConfig, folder: Path) -> Path:
    """Write a random model with a configuration to a folder, as `build_family` does.

    Raises:
        ValueError: the model is not tiny, because the family names its sizes differently.
    """
    with torch.device("meta"):
        count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{config.model_type}: {count} parameters with the sizes of a tiny model")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            mean = 1.0 if "norm" in name and "bias" not in name else 0.0
            nn.init.normal_(parameter, mean, 0.5 if "sink" in name else 0.1)
        elif parameter.ndim > 1 and not parameter.std() > 0.05:
            nn.init.normal_(parameter, 0.0, 0.15)
    for name, buffer in model.named_buffers():
        if "bias" in name and buffer.is_floating_point():  # a bias in the choice of experts
            nn.init.normal_(buffer, 0.0, 0.1)
    model.save_pretrained(folder)
    return folder
