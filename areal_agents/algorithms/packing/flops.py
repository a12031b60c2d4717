"""FLOPs of a decoder's forward pass: the cost by which micro-batches are balanced.

The cost of a row consists of its matrix products and of attention to every row that it sees; a trained token
adds a row of logits. A sequence of s tokens therefore costs a·s + b·s², and a shared prefix is counted once,
because it is computed once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# forward and backward pass together cost three forward passes: the backward pass has two products for each
# one
TRAINING = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder with gated feed-forward layers or experts, from which the cost of one token follows.

    Attributes:
        heads, kv_heads: number of attention heads, and of key and value heads. head_dim: width of each head.
        intermediate: width of a dense feed-forward layer.
        moe_layers: number of layers that have experts instead of a dense feed-forward layer.
        experts: number of experts per such layer. experts_per_token: number of experts that one token uses.
        expert_intermediate: width of one expert. shared_intermediate: width of the part that every token
            uses.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    moe_layers: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read the shape from a Hugging Face config (`config.to_dict()`, or config.json).

        Raises:
            ValueError: a size that every decoder has is missing.
        """
        text: Mapping[str, Any] = config.get("text_config") or config
        names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
        missing = [name for name in names if not text.get(name)]
        if missing:
            raise ValueError(
                f"a model config must describe a decoder with attention, but it lacks {', '.join(missing)}"
            )
        layers, hidden, heads, vocab = (int(text[name]) for name in names)
        experts = int(text.get("num_experts") or text.get("num_local_experts") or 0)
        width = int(text.get("intermediate_size") or 4 * hidden)
        dense = len(text.get("mlp_only_layers") or ())
        return cls(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=int(text.get("head_dim") or hidden // heads),
            intermediate=width,
            vocab=vocab,
            moe_layers=(layers - dense) // int(text.get("decoder_sparse_step") or 1) if experts else 0,
            experts=experts,
            experts_per_token=int(text.get("num_experts_per_tok") or 0) if experts else 0,
            expert_intermediate=int(text.get("moe_intermediate_size") or width) if experts else 0,
            shared_intermediate=int(text.get("shared_expert_intermediate_size") or 0) if experts else 0,
        )

    @property
    def per_row(self) -> int:
        """FLOPs of the matrix products of one row in all layers: 2 per weight that it is multiplied by."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)  # q and o; k and v
        dense = 3 * self.hidden * self.intermediate  # gate, up and down
        active = self.experts_per_token * self.expert_intermediate + self.shared_intermediate
        sparse = 3 * self.hidden * active + self.hidden * self.experts  # and the router
        return 2 * (
            self.layers * attention + (self.layers - self.moe_layers) * dense + self.moe_layers * sparse
        )

    @property
    def per_pair(self) -> int:
        """FLOPs of one row attending to one row, in all layers: a score and a weighted sum."""
        return 4 * self.layers * self.heads * self.head_dim

    @property
    def per_prediction(self) -> int:
        """FLOPs of the logits at one row."""
        return 2 * self.hidden * self.vocab

    def flops(self, *, rows: float, pairs: float, predictions: float) -> float:
        """FLOPs of a forward pass.

        Args:
            rows: number of tokens that go through the layers.
            pairs: number of rows attended to, summed over the rows: Σ (position + 1).
            predictions: number of rows with logits.
        """
        return float(self.per_row * rows + self.per_pair * pairs + self.per_prediction * predictions)
