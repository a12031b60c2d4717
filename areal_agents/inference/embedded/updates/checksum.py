"""Hashes of the weights in use, under the names of SGLang's fused parameters, as its server returns them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from areal_agents.inference.embedded.model.architecture import Architecture
from areal_agents.inference.embedded.model.weights import Weights

HASH_DIGITS = 16
THREADS = 8  # each holds one tensor in host memory


def hash_weights(weights: Weights, arch: Architecture) -> dict[str, str]:
    """By parameter name the first digits of the SHA-256 of its row-major bytes, in the type it has.

    Tensors are hashed on several threads, because the engine may be paused meanwhile; hashing releases the
    interpreter's lock.
    """
    names, tensors = zip(*_parameters(weights, arch), strict=True)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="checksum") as threads:
        return dict(zip(names, threads.map(_hash, tensors), strict=True))


def overall_hash(hashes: dict[str, str]) -> str:
    """One SHA-256 over all names and hashes, sorted by name."""
    digest = hashlib.sha256()
    for name in sorted(hashes):
        digest.update(name.encode() + hashes[name].encode())
    return digest.hexdigest()


def _hash(tensor: Tensor) -> str:
    plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(plain.data).hexdigest()[:HASH_DIGITS]


def _parameters(weights: Weights, arch: Architecture) -> Iterator[tuple[str, Tensor]]:
    yield "model.embed_tokens.weight", weights.embedding
    yield "model.norm.weight", weights.final_norm
    if not arch.tied_embeddings:
        yield "lm_head.weight", weights.lm_head
    for i in range(arch.layers):
        layer = f"model.layers.{i}."
        yield f"{layer}input_layernorm.weight", weights.attention_norm[i]
        yield f"{layer}self_attn.qkv_proj.weight", weights.qkv[i]
        if arch.qkv_bias:
            yield f"{layer}self_attn.qkv_proj.bias", weights.qkv_bias[i]
        if arch.head_norm:
            yield f"{layer}self_attn.q_norm.weight", weights.q_norm[i]
            yield f"{layer}self_attn.k_norm.weight", weights.k_norm[i]
        yield f"{layer}self_attn.o_proj.weight", weights.output[i]
        yield f"{layer}post_attention_layernorm.weight", weights.mlp_norm[i]
        yield f"{layer}mlp.gate_up_proj.weight", weights.gate_up[i]
        yield f"{layer}mlp.down_proj.weight", weights.down[i]
