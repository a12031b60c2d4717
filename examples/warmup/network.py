"""The Qwen3 architecture, small and batched for training on one CPU core.

The arithmetic is that of transformers' Qwen3ForCausalLM; only the layout differs: q, k and v are one
matrix, gate and up another, and a prefix shared by every row (the system prompt) is computed once.
`to_hf_state` and `load_hf_state` translate the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of the network; the defaults make 0.92M parameters with tied embeddings."""

    vocab_size: int = 1024
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    feed_forward: int = 384
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    max_positions: int = 2048

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


class Layer(nn.Module):
    """One decoder layer: attention with RMS-normed heads, then a gated feed-forward, both pre-norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.input_norm = nn.Parameter(torch.ones(shape.hidden))
        self.post_norm = nn.Parameter(torch.ones(shape.hidden))
        self.q_norm = nn.Parameter(torch.ones(shape.head_dim))
        self.k_norm = nn.Parameter(torch.ones(shape.head_dim))
        self.qkv = nn.Linear(shape.hidden, shape.query_width + 2 * shape.kv_width, bias=False)
        self.out = nn.Linear(shape.query_width, shape.hidden, bias=False)
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.feed_forward, bias=False)
        self.down = nn.Linear(shape.feed_forward, shape.hidden, bias=False)

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, heads, T, D] and k, v [B, kv_heads, T, D] of hidden states x [B, T, hidden]."""
        s = self.shape
        batch, length, _ = x.shape
        normed = F.rms_norm(x, (s.hidden,), self.input_norm, s.norm_eps)
        q, k, v = self.qkv(normed).split([s.query_width, s.kv_width, s.kv_width], dim=-1)
        q = F.rms_norm(q.view(batch, length, s.heads, s.head_dim), (s.head_dim,), self.q_norm, s.norm_eps)
        k = F.rms_norm(k.view(batch, length, s.kv_heads, s.head_dim), (s.head_dim,), self.k_norm, s.norm_eps)
        v = v.view(batch, length, s.kv_heads, s.head_dim)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Residual additions of the attention result [B, heads, T, D] and of the feed-forward."""
        s = self.shape
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape[0], x.shape[1], s.query_width))
        gate, up = self.gate_up(F.rms_norm(x, (s.hidden,), self.post_norm, s.norm_eps)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Network(nn.Module):
    """The whole decoder; `forward` gives final hidden states, `logits` projects the ones that are needed."""

    cos: Tensor  # [max_positions, head_dim]
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.final_norm = nn.Parameter(torch.ones(shape.hidden))
        cos, sin = _rope_table(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise()

    def decoder(self) -> Iterator[Layer]:
        """The layers from input to output."""
        return cast("Iterator[Layer]", iter(self.layers))

    def _initialise(self) -> None:
        nn.init.normal_(self.embedding.weight, std=0.02)
        for layer in self.decoder():
            for linear in (layer.qkv, layer.out, layer.gate_up, layer.down):
                nn.init.normal_(linear.weight, std=linear.weight.shape[1] ** -0.5)
            for linear in (layer.out, layer.down):  # residual writes start small, as in GPT-2
                linear.weight.data.mul_((2 * self.shape.layers) ** -0.5)

    def forward(self, ids: Tensor, prefix: Tensor | None = None) -> Tensor:
        """Hidden states [B, T, hidden] of `ids` [B, T], each row following the same `prefix` [P]."""
        start = 0 if prefix is None else len(prefix)
        length = ids.shape[1]
        cos, sin = self.cos[start : start + length], self.sin[start : start + length]
        x = self.embedding(ids)
        shared = None if prefix is None else self.embedding(prefix)[None]
        mask = None
        if start:
            causal = torch.ones(length, length, dtype=torch.bool).tril()
            mask = torch.cat([torch.ones(length, start, dtype=torch.bool), causal], dim=1)
        for layer in self.decoder():
            q, k, v = layer.heads(x, cos, sin)
            if shared is not None:
                q0, k0, v0 = layer.heads(shared, self.cos[:start], self.sin[:start])
                k = torch.cat([k0.expand(len(ids), -1, -1, -1), k], dim=2)
                v = torch.cat([v0.expand(len(ids), -1, -1, -1), v], dim=2)
                shared = layer.finish(shared, _attend(q0, k0, v0, None))
            x = layer.finish(x, _attend(q, k, v, mask))
        return F.rms_norm(x, (self.shape.hidden,), self.final_norm, self.shape.norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocab] of hidden states [..., hidden]; the embedding is tied."""
        return hidden @ self.embedding.weight.T


def new_network(vocab_size: int, *, seed: int, threads: int) -> Network:
    """Return a network with random weights. The seed and the number of threads are set for all of torch."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    return Network(Shape(vocab_size=vocab_size))


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Causal grouped-query attention; `mask` [T, P + T] replaces plain causality where a prefix stands."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)


def _rope_table(shape: Shape) -> tuple[Tensor, Tensor]:
    inverse = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    angles = torch.outer(torch.arange(shape.max_positions).float(), inverse).repeat(1, 2)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding in the half-split form that Qwen3 uses."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def to_hf_state(network: Network) -> dict[str, Tensor]:
    """The weights under the names of transformers' Qwen3ForCausalLM (lm_head is tied, so absent)."""
    s = network.shape
    state: dict[str, Tensor] = {
        "model.embed_tokens.weight": network.embedding.weight,
        "model.norm.weight": network.final_norm,
    }
    for index, layer in enumerate(network.decoder()):
        q, k, v = layer.qkv.weight.split([s.query_width, s.kv_width, s.kv_width])
        gate, up = layer.gate_up.weight.chunk(2)
        parts = {
            "input_layernorm": layer.input_norm,
            "post_attention_layernorm": layer.post_norm,
            "self_attn.q_norm": layer.q_norm,
            "self_attn.k_norm": layer.k_norm,
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": layer.out.weight,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down.weight,
        }
        state |= {f"model.layers.{index}.{name}.weight": value for name, value in parts.items()}
    return {name: value.detach().clone().contiguous() for name, value in state.items()}


def load_hf_state(network: Network, state: Mapping[str, Tensor]) -> None:
    """Set the weights to those of `to_hf_state`. KeyError if one is missing."""

    def copy(into: Tensor, *names: str) -> None:
        into.data.copy_(torch.cat([state[name] for name in names]))

    copy(network.embedding.weight, "model.embed_tokens.weight")
    copy(network.final_norm, "model.norm.weight")
    for index, layer in enumerate(network.decoder()):
        at = f"model.layers.{index}."
        copy(layer.input_norm, f"{at}input_layernorm.weight")
        copy(layer.post_norm, f"{at}post_attention_layernorm.weight")
        copy(layer.q_norm, f"{at}self_attn.q_norm.weight")
        copy(layer.k_norm, f"{at}self_attn.k_norm.weight")
        copy(layer.qkv.weight, *(f"{at}self_attn.{name}_proj.weight" for name in "qkv"))
        copy(layer.out.weight, f"{at}self_attn.o_proj.weight")
        copy(layer.gate_up.weight, f"{at}mlp.gate_proj.weight", f"{at}mlp.up_proj.weight")
        copy(layer.down.weight, f"{at}mlp.down_proj.weight")
