"""LoRA adapters in the format of peft, merged into copies of the matrices that they change.

W + scale · B A (arXiv 2106.09685, §4.1), scale = lora_alpha / r, or / √r where the folder says so (rank-
stabilised, arXiv 2312.03732). An adapter with any other feature is refused with an error that names the
feature.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from areal_agents.errors import RequestError
from areal_agents.inference.embedded.model.architecture import Architecture
from areal_agents.inference.embedded.model.weights import Weights, expected_shapes

PREFIX = "base_model.model."
PLAIN: Mapping[str, tuple[Any, ...]] = {  # the values of adapter_config.json that this computation supports
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
}


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """The factors A [r, in] and B [out, r] by the name of the weight [out, in] to which scale · B A is
    added."""

    factors: Mapping[str, tuple[Tensor, Tensor]]
    scale: float


def read_adapter(folder: Path, arch: Architecture) -> Adapter:
    """Read a peft folder; RequestError if it is incomplete or not a plain LoRA of this model's layers."""
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
        tensors = load_file(folder / "adapter_model.safetensors")
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{folder} cannot be read as a LoRA adapter: {error!r}") from error
    for name, accepted in PLAIN.items():
        if name in config and config[name] not in accepted:
            raise RequestError(f"{folder}: {name} {config[name]!r} is not computed here, only plain LoRA is")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return Adapter(_factors(tensors, arch, rank, folder), scale)


def merge(base: Weights, adapter: Adapter, arch: Architecture) -> Weights:
    """Return `base` with the adapter added; matrices that it does not change are shared, not copied."""
    changed: dict[str, Tensor] = {}
    for layer, suffix, field, rows in _targets(arch):
        factors = adapter.factors.get(f"model.layers.{layer}.{suffix}.weight")
        if factors is None:
            continue
        if field not in changed:
            changed[field] = getattr(base, field).clone()  # has the same memory layout as the original
        a, b = factors
        part = changed[field][layer, rows]
        part += (adapter.scale * (b.float() @ a.float())).to(part.device, part.dtype)
    return replace(base, **changed)


def _targets(arch: Architecture) -> Iterator[tuple[int, str, str, slice]]:
    """Yield (layer, module, field of Weights, rows in it) for every matrix that can have an adapter."""
    q, kv, f = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim, arch.feed_forward
    parts = (
        ("self_attn.q_proj", "qkv", slice(0, q)),
        ("self_attn.k_proj", "qkv", slice(q, q + kv)),
        ("self_attn.v_proj", "qkv", slice(q + kv, q + 2 * kv)),
        ("self_attn.o_proj", "output", slice(None)),
        ("mlp.gate_proj", "gate_up", slice(0, f)),
        ("mlp.up_proj", "gate_up", slice(f, 2 * f)),
        ("mlp.down_proj", "down", slice(None)),
    )
    for layer in range(arch.layers):
        for suffix, field, rows in parts:
            yield layer, suffix, field, rows


def _factors(
    tensors: Mapping[str, Tensor], arch: Architecture, rank: int, folder: Path
) -> dict[str, tuple[Tensor, Tensor]]:
    shapes = expected_shapes(arch)
    known = {f"model.layers.{layer}.{suffix}" for layer, suffix, _, _ in _targets(arch)}
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name in tensors:
        module, _, kind = name.removeprefix(PREFIX).rpartition(".lora_")
        if module not in known or kind not in ("A.weight", "B.weight"):
            raise RequestError(f"{folder}: {name} is no LoRA factor of this {arch.model_type} model's layers")
        a, b = (tensors.get(f"{PREFIX}{module}.lora_{which}.weight") for which in "AB")
        if a is None or b is None:
            raise RequestError(f"{folder}: {module} has only one of lora_A and lora_B")
        out, width = shapes[f"{module}.weight"]
        if tuple(a.shape) != (rank, width) or tuple(b.shape) != (out, rank):
            raise RequestError(
                f"{folder}: {module} has factors {list(a.shape)} and {list(b.shape)}, expected "
                f"{[rank, width]} and {[out, rank]}"
            )
        found[f"{module}.weight"] = a, b
    if not found:
        raise RequestError(f"{folder} holds no LoRA factors")
    return found
