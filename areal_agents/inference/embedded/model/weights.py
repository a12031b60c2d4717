"""Reads the weights of a decoder from safetensors and checks them against its architecture.

Invariant: `Weights` is complete and every tensor has the shape that the architecture gives it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from areal_agents.errors import ConfigError
from areal_agents.inference.embedded.model.architecture import Architecture


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Matrices are [out, in], layers (L) stacked in front; V vocabulary, H hidden, F feed-forward."""

    embedding: Tensor  # [V, H]
    lm_head: Tensor  # [V, H]; the embedding itself where they are tied
    final_norm: Tensor  # [H]
    attention_norm: Tensor  # [L, H]
    qkv: Tensor  # [L, (heads + 2 kv heads) head_dim, H]
    qkv_bias: Tensor  # [L, (heads + 2 kv heads) head_dim], zero where there is none
    q_norm: Tensor  # [L, head_dim], one where there is none
    k_norm: Tensor  # [L, head_dim], one where there is none
    output: Tensor  # [L, H, heads head_dim]
    mlp_norm: Tensor  # [L, H]
    gate_up: Tensor  # [L, 2 F, H]
    down: Tensor  # [L, H, F]

    @property
    def nbytes(self) -> int:
        """The total size in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Return all tensors."""
        return [getattr(self, name) for name in self.__dataclass_fields__]


def expected_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor that a checkpoint of `arch` must contain."""
    h, f, d = arch.hidden, arch.feed_forward, arch.head_dim
    q, kv = arch.heads * d, arch.kv_heads * d
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (arch.vocab_size, h),
        "model.norm.weight": (h,),
    }
    if not arch.tied_embeddings:
        shapes["lm_head.weight"] = (arch.vocab_size, h)
    for i in range(arch.layers):
        layer = f"model.layers.{i}."
        shapes |= {
            f"{layer}input_layernorm.weight": (h,),
            f"{layer}post_attention_layernorm.weight": (h,),
            f"{layer}self_attn.q_proj.weight": (q, h),
            f"{layer}self_attn.k_proj.weight": (kv, h),
            f"{layer}self_attn.v_proj.weight": (kv, h),
            f"{layer}self_attn.o_proj.weight": (h, q),
            f"{layer}mlp.gate_proj.weight": (f, h),
            f"{layer}mlp.up_proj.weight": (f, h),
            f"{layer}mlp.down_proj.weight": (h, f),
        }
        if arch.qkv_bias:
            shapes |= {f"{layer}self_attn.{p}_proj.bias": (q if p == "q" else kv,) for p in "qkv"}
        if arch.head_norm:
            shapes |= {f"{layer}self_attn.{p}_norm.weight": (d,) for p in "qk"}
    return shapes


def is_derived(name: str, arch: Architecture) -> bool:
    """Whether checkpoints may contain this tensor although it is computed from the configuration."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and arch.tied_embeddings)


def load_weights(folder: Path, arch: Architecture) -> Weights:
    """Read a safetensors folder; ConfigError names the missing, unknown or misshapen tensor or file."""
    shapes = expected_shapes(arch)
    tensors: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        for name, tensor in _read(path):
            if is_derived(name, arch):
                continue
            if name not in shapes:
                raise ConfigError(
                    f"model: {path.name} holds {name}, which a {arch.model_type} model does not have"
                )
            if tuple(tensor.shape) != shapes[name]:
                raise ConfigError(f"model: {name} has shape {tuple(tensor.shape)}, expected {shapes[name]}")
            tensors[name] = tensor.float()
    if missing := sorted(shapes.keys() - tensors.keys()):
        raise ConfigError(f"model: {folder} lacks {len(missing)} tensors, the first is {missing[0]}")
    return assemble(tensors, arch)


def random_weights(arch: Architecture, seed: int) -> Weights:
    """Random weights of `seed` at the scale of a fresh transformers model, for benchmarks."""
    generator = torch.Generator().manual_seed(seed)
    return assemble(
        {
            name: torch.ones(shape)
            if name.endswith("norm.weight")
            else torch.empty(shape).normal_(0.0, 0.02, generator=generator)
            for name, shape in expected_shapes(arch).items()
        },
        arch,
    )


def stamp_of(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Return a stamp that changes when a folder's weight files are replaced. ConfigError as load_weights."""
    return tuple((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in _weight_files(folder))


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"model: {index} is not a safetensors index: {error!r}") from error
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"model: {folder} holds no .safetensors file")
    if lost := [path for path in files if not path.is_file()]:
        raise ConfigError(f"model: {lost[0]} is named in the index but does not exist")
    return files


def _read(path: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (safe_open is not a mapping)
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"model: {path} cannot be read: {error}") from error


def changed_weights(
    weights: Weights,
    whole: Mapping[str, Tensor],
    changes: Mapping[str, tuple[Tensor, Tensor]],
    arch: Architecture,
) -> Weights:
    """Return a copy of placed weights in which some tensors are replaced, and in others some values.

    Args:
        changes: by name of the checkpoint's tensor the flat indices [n] and the new values [n].
    """
    tensors = {name: getattr(weights, name) for name in Weights.__dataclass_fields__}
    if arch.tied_embeddings:
        tensors["lm_head"] = tensors["embedding"]
    made = Weights(**{name: tensor.clone() for name, tensor in tensors.items()})
    if arch.tied_embeddings:
        made = replace(made, lm_head=made.embedding)
    views = _views(made, arch)
    for name, tensor in whole.items():
        views[name].copy_(tensor)
    for name, (indices, values) in changes.items():
        view = views[name]
        places = torch.unravel_index(indices.to(view.device), view.shape)
        view[places] = values.to(view.device, view.dtype)
    return made


def _views(weights: Weights, arch: Architecture) -> dict[str, Tensor]:
    """Return the tensors of the checkpoint, by name, as views of their parts of the stacked weights."""
    q, kv, f = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim, arch.feed_forward
    rows = {"q": slice(0, q), "k": slice(q, q + kv), "v": slice(q + kv, None)}
    views = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.final_norm}
    views["lm_head.weight"] = weights.lm_head
    for i in range(arch.layers):
        layer = f"model.layers.{i}."
        views |= {
            f"{layer}input_layernorm.weight": weights.attention_norm[i],
            f"{layer}post_attention_layernorm.weight": weights.mlp_norm[i],
            **{f"{layer}self_attn.{p}_proj.weight": weights.qkv[i, part] for p, part in rows.items()},
            **{f"{layer}self_attn.{p}_proj.bias": weights.qkv_bias[i, part] for p, part in rows.items()},
            f"{layer}self_attn.q_norm.weight": weights.q_norm[i],
            f"{layer}self_attn.k_norm.weight": weights.k_norm[i],
            f"{layer}self_attn.o_proj.weight": weights.output[i],
            f"{layer}mlp.gate_proj.weight": weights.gate_up[i, :f],
            f"{layer}mlp.up_proj.weight": weights.gate_up[i, f:],
            f"{layer}mlp.down_proj.weight": weights.down[i],
        }
    return {name: views[name] for name in expected_shapes(arch)}


def assemble(tensors: dict[str, Tensor], arch: Architecture) -> Weights:
    """Stack the layers of a complete checkpoint's tensors, float32.

    All tensors are copied, because mapped files may change and tensors may be views of larger buffers.
    """

    layers = range(arch.layers)

    def stack(*names: str) -> Tensor:
        return torch.stack(
            [torch.cat([tensors[f"model.layers.{i}.{name}"] for name in names]) for i in layers]
        )

    def head_norm(which: str) -> Tensor:
        return (
            stack(f"self_attn.{which}_norm.weight")
            if arch.head_norm
            else torch.ones(arch.layers, arch.head_dim)
        )

    embedding = tensors["model.embed_tokens.weight"].clone()
    projections = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return Weights(
        embedding=embedding,
        lm_head=embedding if arch.tied_embeddings else tensors["lm_head.weight"].clone(),
        final_norm=tensors["model.norm.weight"].clone(),
        attention_norm=stack("input_layernorm.weight"),
        qkv=stack(*(f"{p}.weight" for p in projections)),
        qkv_bias=stack(*(f"{p}.bias" for p in projections))
        if arch.qkv_bias
        else torch.zeros(arch.layers, arch.qkv_width),
        q_norm=head_norm("q"),
        k_norm=head_norm("k"),
        output=stack("self_attn.o_proj.weight"),
        mlp_norm=stack("post_attention_layernorm.weight"),
        gate_up=stack("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        down=stack("mlp.down_proj.weight"),
    )
