"""The architecture of a decoder, read from a Hugging Face config.json: what the forward pass needs.

A model that passes these checks is computed exactly; any other is refused with an error that names the
unsupported feature.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from areal_agents.errors import ConfigError
from areal_agents.model_folder import folder_fault

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SUPPORTED = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Architecture:
    """One decoder: sizes, and which optional parts it has.

    Attributes:
        inverse_frequencies: [head_dim / 2] rotary frequencies, scaling included.
        rotary_scale: factor on cos and sin (1 except for yarn).
        eos_ids: tokens that end a completion unless the request ignores them.
    """

    model_type: str
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    norm_eps: float
    qkv_bias: bool
    head_norm: bool
    tied_embeddings: bool
    max_positions: int
    inverse_frequencies: npt.NDArray[np.float32]
    rotary_scale: float
    eos_ids: tuple[int, ...]

    @property
    def qkv_width(self) -> int:
        """Columns of the fused query, key and value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def rotary_tables(self, positions: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """cos and sin, each [positions, head_dim / 2], computed in float32 like transformers'."""
        angles = np.arange(positions, dtype=np.float32)[:, None] * self.inverse_frequencies[None, :]
        return (
            (np.cos(angles) * np.float32(self.rotary_scale)).astype(np.float32),
            (np.sin(angles) * np.float32(self.rotary_scale)).astype(np.float32),
        )


def read_architecture(folder: Path) -> Architecture:
    """Read `folder`/config.json; ConfigError when it is missing or describes an unsupported model."""
    if fault := folder_fault(folder):
        raise ConfigError(f"model: {fault}")
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except (ValueError, KeyError, OSError, TypeError) as error:
        raise ConfigError(f"model: {folder / 'config.json'} cannot be read: {error}") from error
    _check_supported(config, folder)
    frequencies, rotary_scale = _rotary(config, folder)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Architecture(
        model_type=config.model_type,
        vocab_size=config.vocab_size,
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        feed_forward=config.intermediate_size,
        norm_eps=config.rms_norm_eps,
        qkv_bias=config.model_type == "qwen2",
        head_norm=config.model_type == "qwen3",
        tied_embeddings=bool(config.tie_word_embeddings),
        max_positions=config.max_position_embeddings,
        inverse_frequencies=frequencies,
        rotary_scale=rotary_scale,
        eos_ids=_eos_ids(config, folder),
    )


def _check_supported(config: PretrainedConfig, folder: Path) -> None:
    def refuse(what: str) -> ConfigError:
        return ConfigError(
            f"model: {folder} {what}; the embedded engine computes {', '.join(SUPPORTED.values())} with full "
            "attention and silu, without experts (serve other models with SGLang: engine.kind=sglang)"
        )

    if config.model_type not in SUPPORTED:
        raise refuse(f"is of type {config.model_type!r}")
    if getattr(config, "use_sliding_window", False) or "sliding_attention" in (
        getattr(config, "layer_types", None) or ()
    ):
        raise refuse("uses sliding-window attention")
    if config.hidden_act != "silu":
        raise refuse(f"uses hidden_act {config.hidden_act!r}")
    for name in ("attention_bias", "mlp_bias"):
        if getattr(config, name, False):
            raise refuse(f"sets {name}")
    if getattr(config, "quantization_config", None):
        raise refuse("is quantized")


def _rotary(config: PretrainedConfig, folder: Path) -> tuple[npt.NDArray[np.float32], float]:
    """Rotary frequencies from transformers' own initialisers, so that every scaling agrees with it."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters: dict[str, Any] = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind not in ROPE_TYPES or parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            f"model: {folder} has rope_parameters {parameters}; supported rope_type: {ROPE_TYPES}"
        )
    if kind == "default":
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        import torch

        exponents = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
        return (1.0 / (parameters["rope_theta"] ** exponents)).numpy(), 1.0
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, device=None)
    return frequencies.float().numpy(), float(scale)


def _eos_ids(config: PretrainedConfig, folder: Path) -> tuple[int, ...]:
    """End-of-sequence ids of config.json and generation_config.json together, as SGLang takes them."""
    found: list[Any] = [config.eos_token_id]
    generation = folder / "generation_config.json"
    if generation.is_file():
        found.append(json.loads(generation.read_text()).get("eos_token_id"))
    ids: set[int] = set()
    for value in found:
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(ids))
