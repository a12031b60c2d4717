"""Frozen weights in four bits (NF4 of QLoRA, arXiv 2305.14314, §3), by the kernels of bitsandbytes.

Each 64 neighbours in a row share a scale. A row's codes and scales are the bytes of one row of one tensor, so
FSDP divides it like any other weight, and gathers 0.56 bytes for each weight. Products use the weights in the
compute type, which exist only for one matrix at a time; the backward pass makes them again.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from areal_agents.errors import AdapterError
from areal_agents.training.model.experts import has_experts
from areal_agents.training.model.images import sees_images
from areal_agents.training.model.sharding import blocks

BLOCK = 64  # weights that share a scale, which is a float32
NAME = "packed"  # of the parameter, in place of `weight`
FIRST_TORCH = "2.13"  # FSDP of 2.11 refuses parameters of integers


class Nf4Linear(nn.Module):
    """A linear layer whose frozen weight [out, in] is packed in `packed` [out, in · 9/16] uint8."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        columns = packed_columns(linear.in_features)
        packed = torch.empty(linear.out_features, columns, dtype=torch.uint8, device=linear.weight.device)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden · weightᵀ + bias."""
        product: Tensor = _Product.apply(hidden, self.packed)
        return product if self.bias is None else product + self.bias


class _Product(torch.autograd.Function):
    """hidden [..., in] · weightᵀ. Only the packed weight is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, packed: Tensor) -> Tensor:
        ctx.save_for_backward(packed)
        return hidden @ dequantize(packed, hidden.dtype).T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (packed,) = ctx.saved_tensors
        return gradient @ dequantize(packed, gradient.dtype), None


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A packed weight as loading and publishing see it: under the name and with the shape of the weight."""

    packed: Tensor

    @property
    def shape(self) -> torch.Size:
        """[out, in]"""
        rows, columns = self.packed.shape
        return torch.Size((rows, columns * 16 // 9))

    def fill(self, rows: Tensor) -> None:
        """Set this rank's rows [n, in]."""
        local = self.packed.to_local() if isinstance(self.packed, DTensor) else self.packed
        local.copy_(quantize(rows.to(local.device)))


def use_nf4(model: PreTrainedModel) -> None:
    """Replace the linear layers of the decoder's blocks, adapters excluded, in place.

    Raises:
        AdapterError: bitsandbytes is not installed, this PyTorch cannot divide packed weights, or the model
            has layers that cannot be packed.
    """
    import_bitsandbytes()
    if torch.__version__ < FIRST_TORCH:
        raise AdapterError(
            f"trainer.lora.base: nf4 needs PyTorch {FIRST_TORCH}, whose FSDP divides weights that are not of "
            f"a floating-point type, and this is {torch.__version__}; install it, or leave nf4 out"
        )
    if has_experts(model) or sees_images(model.config):
        raise AdapterError(
            f"trainer.lora.base: nf4 is for dense text models, not {model.config.model_type}; leave it out"
        )
    for block in blocks(model):
        for name, parent in list(block.named_modules()):
            if "lora_" in name:
                continue
            for child, layer in list(parent.named_children()):
                if type(layer) is nn.Linear and not child.startswith("lora_"):
                    if layer.in_features % BLOCK:
                        raise AdapterError(
                            f"trainer.lora.base: nf4 packs rows of a multiple of {BLOCK} weights, and "
                            f"{name or child} has rows of {layer.in_features}; leave it out"
                        )
                    setattr(parent, child, Nf4Linear(layer))


def import_bitsandbytes() -> None:
    """Load the kernels. Raises AdapterError if they are not installed."""
    try:
        importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise AdapterError(
            f"trainer.lora.base: nf4 needs bitsandbytes ({error}): pip install 'areal-agents[gpu]'"
        ) from error


def packed_columns(columns: int) -> int:
    """Bytes of a packed row: half a byte for each weight, and four for each block."""
    return columns // 2 + columns // BLOCK * 4


def quantize(rows: Tensor) -> Tensor:
    """Pack rows [n, in]."""
    count, columns = rows.shape
    if not count:
        return torch.empty(0, packed_columns(columns), dtype=torch.uint8, device=rows.device)
    operators = torch.ops.bitsandbytes
    codes, scales = operators.quantize_4bit(rows.float().contiguous(), BLOCK, "nf4", torch.uint8)
    return torch.cat([codes.view(count, -1), scales.view(count, -1).view(torch.uint8)], 1)


def dequantize(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Unpack to weights [n, in] of a type."""
    count, columns = packed.shape[0], packed.shape[1] * 16 // 9
    codes = packed[:, : columns // 2].reshape(-1, 1)
    scales = packed[:, columns // 2 :].contiguous().view(torch.float32).view(-1)
    weights: Tensor = torch.ops.bitsandbytes.dequantize_4bit(
        codes, scales, BLOCK, "nf4", [count, columns], dtype
    )
    return weights
