"""Prints the table of docs/gpus.md: the memory of a trainer's GPU, computed from the sizes of public models.

python tools/memory_table.py            all models
python tools/memory_table.py 0.6B 8B    some of them
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.training.config import TrainerConfig
from areal_agents.training.memory.estimate import TrainerMemory
from areal_agents.training.memory.states import fake_ranks

GIB = 2**30
TOKENS = 32768
RANKS = (1, 4, 8, 16)
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8,
    "vocab_size": 151936, "max_position_embeddings": 40960, "dtype": "bfloat16", "hidden_act": "silu",
    "rms_norm_eps": 1e-06, "rope_theta": 1000000,
}  # fmt: skip
# hidden size, size of the MLP, layers, heads, whether embedding and head are one matrix
DENSE = {
    "0.6B": (1024, 3072, 28, 16, True),
    "1.7B": (2048, 6144, 28, 16, True),
    "4B": (2560, 9728, 36, 32, True),
    "8B": (4096, 12288, 36, 32, False),
    "14B": (5120, 17408, 40, 40, False),
    "32B": (5120, 25600, 64, 64, False),
}
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "norm_topk_prob": True,
    "tie_word_embeddings": False,
}  # fmt: skip
NAMES = (*DENSE, "30B-A3B")
HEADER = (
    "Qwen3", "weights in bfloat16", *(f"all weights, {ranks} GPU{'s' * (ranks > 1)}" for ranks in RANKS),
    "adapter, 1 GPU", "keys and values of 32k tokens",
)  # fmt: skip


def model_config(name: str) -> dict[str, Any]:
    """The config.json of Qwen3-`name`, as far as it decides the memory."""
    if name not in DENSE:
        return {**QWEN3, **EXPERTS}
    hidden, mlp, layers, heads, tied = DENSE[name]
    return {
        **QWEN3,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
    }


def row(name: str) -> str:
    """The row of one model."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model_config(name)))
        measured: dict[object, Any] = {}

        def memory(ranks: int, **settings: Any) -> TrainerMemory:
            config = TrainerConfig(ranks=ranks, **settings)
            with fake_ranks(ranks) as group:
                return TrainerMemory(
                    config, AlgorithmConfig(), Path(folder), group, on_gpu=True, measured=measured
                )

        whole = [memory(ranks) for ranks in RANKS]
        adapter = memory(1, lora={"rank": 32})
    elements, cache = whole[0].model_elements, whole[0].cache_elements()
    peaks = [one.need("full", TOKENS).peak for one in (*whole, adapter)]
    cells = [2 * elements, *peaks, round(2 * cache * TOKENS)]
    return f"| {name} | " + " | ".join(f"{cell / GIB:.1f}" for cell in cells) + " |"


def main() -> None:
    """Print the table of the models that are named, or of all."""
    names = sys.argv[1:] or NAMES
    print("| " + " | ".join(HEADER) + " |")
    print("| --- " * len(HEADER) + "|")
    for name in names:
        print(row(name), flush=True)


if __name__ == "__main__":
    main()
