"""The runner for all devices and types that torch supports; the reference for the numba kernel."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from areal_agents.inference.embedded.model.architecture import Architecture
from areal_agents.inference.embedded.model.head import wide_logits
from areal_agents.inference.embedded.model.runner import Int32, Rows
from areal_agents.inference.embedded.model.weights import Weights
from areal_agents.inference.embedded.scheduling.sampling import Float32, SamplingBatch, sample


class TorchRunner:
    """Caches [L, slot, kv head, position, head_dim] on `device` in `dtype`.

    Decoding segments (one row each) attend in one batched call; longer ones one by one, causally.
    """

    kind: Literal["torch"] = "torch"

    def __init__(
        self, arch: Architecture, *, slots: int, max_context: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._arch = arch
        self._device = device
        self._dtype = dtype
        self._cache_shape = (arch.layers, slots, arch.kv_heads, max_context, arch.head_dim)
        self.make_cache()
        cos, sin = arch.rotary_tables(max_context)
        self._cos = torch.from_numpy(cos).to(device, dtype)
        self._sin = torch.from_numpy(sin).to(device, dtype)
        self._weights: Weights | None = None

    def place(self, weights: Weights) -> Weights:
        """See ModelRunner.place."""
        placed: dict[int, Tensor] = {}  # by the original's id: a tied head remains one with the embedding
        for tensor in weights.tensors():
            if id(tensor) not in placed:
                placed[id(tensor)] = tensor.to(self._device, self._dtype)
        names = Weights.__dataclass_fields__
        return Weights(**{name: placed[id(getattr(weights, name))] for name in names})

    def load(self, weights: Weights) -> None:
        """See ModelRunner.load."""
        self._weights = self.place(weights)

    def unload(self) -> None:
        """See ModelRunner.unload."""
        self._weights = None

    def free_cache(self) -> None:
        """See ModelRunner.free_cache."""
        self._keys = self._values = torch.zeros(0, device=self._device, dtype=self._dtype)

    def make_cache(self) -> None:
        """See ModelRunner.make_cache."""
        self._keys = torch.zeros(self._cache_shape, device=self._device, dtype=self._dtype)
        self._values = torch.zeros(self._cache_shape, device=self._device, dtype=self._dtype)

    def return_memory(self) -> None:
        """See ModelRunner.return_memory."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # torch keeps what is freed for itself

    @torch.inference_mode()
    def forward(self, rows: Rows) -> Tensor:
        """See ModelRunner.forward."""
        weights, arch = self._loaded(), self._arch
        tokens, slots, positions, outputs = (
            torch.from_numpy(a).to(self._device, torch.long)
            for a in (rows.tokens, rows.slots, rows.positions, rows.outputs)
        )
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        x = weights.embedding[tokens]
        for i in range(arch.layers):
            qkv = linear(self._norm(x, weights.attention_norm[i]), weights.qkv[i], weights.qkv_bias[i])
            q, k, v = qkv.view(len(x), -1, arch.head_dim).split(
                [arch.heads, arch.kv_heads, arch.kv_heads], dim=1
            )
            if arch.head_norm:
                q, k = self._norm(q, weights.q_norm[i]), self._norm(k, weights.k_norm[i])
            self._keys[i, slots, :, positions] = _rotate(k, cos, sin)
            self._values[i, slots, :, positions] = v
            x = x + linear(self._attend(i, _rotate(q, cos, sin), rows), weights.output[i])
            gate, up = linear(self._norm(x, weights.mlp_norm[i]), weights.gate_up[i]).chunk(2, dim=-1)
            x = x + linear(silu(gate) * up, weights.down[i])
        return wide_logits(self._norm(x[outputs], weights.final_norm), weights.lm_head)

    def sample(self, logits: Tensor, batch: SamplingBatch) -> tuple[Int32, Float32]:
        """See ModelRunner.sample."""
        return sample(logits, batch)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """See ModelRunner.copy_prefix."""
        self._keys[:, target, :, :length] = self._keys[:, source, :, :length]
        self._values[:, target, :, :length] = self._values[:, source, :, :length]

    def _loaded(self) -> Weights:
        assert self._weights is not None, "load() comes before forward()"
        return self._weights

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm in float32 with the weight applied in the compute type, as transformers does it."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._arch.norm_eps)
        return weight * wide.to(x.dtype)

    def _attend(self, layer: int, query: Tensor, rows: Rows) -> Tensor:
        """Attention output [N, heads · head_dim] for rotated queries [N, heads, head_dim]."""
        arch = self._arch
        out = torch.empty_like(query)
        starts = rows.segment_starts
        lengths = np.diff(starts)
        single = starts[:-1][lengths == 1]
        if len(single):
            out[single] = self._attend_single(
                layer, query[single], rows.slots[single], rows.positions[single]
            )
        for first, count in zip(
            starts[:-1][lengths > 1].tolist(), lengths[lengths > 1].tolist(), strict=True
        ):
            slot, position = int(rows.slots[first]), int(rows.positions[first])
            seen = position + count
            mask = torch.ones(count, seen, dtype=torch.bool, device=self._device).tril(position)
            out[first : first + count] = scaled_dot_product_attention(
                query[None, first : first + count].transpose(1, 2),
                self._keys[layer, slot, None, :, :seen],
                self._values[layer, slot, None, :, :seen],
                attn_mask=mask,
                enable_gqa=True,
            )[0].transpose(0, 1)
        return out.reshape(len(query), arch.heads * arch.head_dim)

    def _attend_single(self, layer: int, query: Tensor, slots: np.ndarray, positions: np.ndarray) -> Tensor:
        """One row per slot, [B, heads, head_dim]; query heads of one kv head become query positions."""
        arch = self._arch
        seen = int(positions.max()) + 1
        index = torch.from_numpy(slots).to(self._device, torch.long)
        limit = torch.from_numpy(positions).to(self._device, torch.long)
        mask = (torch.arange(seen, device=self._device) <= limit[:, None])[:, None, None]
        grouped = query.view(len(slots), arch.kv_heads, arch.heads // arch.kv_heads, arch.head_dim)
        attended = scaled_dot_product_attention(
            grouped, self._keys[layer, index, :, :seen], self._values[layer, index, :, :seen], attn_mask=mask
        )
        return attended.reshape(query.shape)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [N, heads, head_dim] in the half-split form."""
    low, high = heads.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
