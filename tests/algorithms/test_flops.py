"""Counts of FLOPs, compared with torch's counter on a real model and with numbers computed by hand."""

from __future__ import annotations

import pytest
import torch
from algorithms_support import sample
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen3Config

from areal_agents.algorithms.packing.flops import ModelShape
from areal_agents.algorithms.packing.microbatches import pack


def test_a_dense_model_costs_what_torch_counts() -> None:
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(40)[None], use_cache=False)
    shape = ModelShape.from_config(config.to_dict())
    want = shape.flops(rows=40, pairs=40 * 40, predictions=40)  # eager attention computes every pair
    assert counter.get_total_flops() == pytest.approx(want, rel=1e-3)  # torch also counts the rotary angles


def test_a_mixture_of_experts_costs_only_the_experts_that_a_token_uses() -> None:
    shape = ModelShape.from_config(
        {
            "num_hidden_layers": 4,
            "hidden_size": 8,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 16,
            "vocab_size": 10,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 5,
            "mlp_only_layers": [0],
        }
    )
    attention = 8 * 4 * (2 + 1 + 1 + 2)  # q, k, v, o
    dense, sparse = 3 * 8 * 16, 2 * 3 * 8 * 5 + 8 * 6
    assert shape.per_row == 2 * (4 * attention + dense + 3 * sparse)
    assert (shape.per_pair, shape.per_prediction) == (4 * 4 * 2 * 4, 2 * 8 * 10)


def test_a_shared_prefix_is_counted_once_and_attended_to_by_all_samples() -> None:
    shape = ModelShape(layers=1, hidden=4, heads=1, kv_heads=1, head_dim=4, intermediate=4, vocab=8)
    prompt = list(range(40))
    samples = [sample([*prompt, 100 + i, 200 + i, 300], [41, 42]) for i in range(3)]
    (batch,) = pack(samples, token_budget=200, shape=shape)
    rows, pairs = 40 + 3 * 2, 40 * 41 // 2 + 3 * (41 + 42)
    assert batch.forward_flops(shape) == shape.flops(rows=rows, pairs=pairs, predictions=6)
    (flat,) = pack(samples, token_budget=200, shape=shape, share_prefixes=False)
    assert flat.forward_flops(shape) == 3 * shape.flops(rows=42, pairs=42 * 43 // 2, predictions=2)


def test_a_nested_text_config_is_found_and_a_missing_size_is_named() -> None:
    text = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 10}
    assert ModelShape.from_config({"text_config": text}) == ModelShape.from_config(text)
    with pytest.raises(ValueError, match="lacks num_attention_heads, vocab_size"):
        ModelShape.from_config({"num_hidden_layers": 2, "hidden_size": 8})
