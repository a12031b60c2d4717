"""The two hashes by which engines say what a tensor in their memory holds, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import sha256

import torch
from torch import Tensor

from areal_agents.training.model_folder import raw_bytes

Hash = Callable[[Tensor], str]

_MASK = 0xFFFFFFFF
_MASK64 = (1 << 64) - 1
_SEED = 0x243F6A88
_SEEDS = (_SEED, (_SEED * 0x9E3779B1 ^ 0xDEADBEEF) & _MASK)
_POSITION = ((0x27D4EB2D, 15), (0x165667B1, 13))
_TILE = 8192  # words
_TILES_AT_ONCE = 512


def cpu_hash(tensor: Tensor) -> str:
    """What an engine on a CPU answers: the first 8 bytes of the SHA-256 of the row-major bytes, in hex."""
    return sha256(raw_bytes(tensor)).hexdigest()[:16]


def gpu_hash(tensor: Tensor) -> str:
    """What SGLang on a GPU answers (0.5.21, its `gpu_tensor_hash`), computed on the tensor's own device.

    Each 32-bit word is mixed with its position by MurmurHash3's finaliser, summed per tile of 8192 words,
    finalised, and the tiles' 64-bit sums go through splitmix64.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if not len(data):
        return f"{0:016x}"
    words = torch.nn.functional.pad(data, (0, -len(data) % 4)).view(torch.int32)
    total = 0
    for start in range(0, len(words), _TILE * _TILES_AT_ONCE):
        total += _tiles(words[start : start + _TILE * _TILES_AT_ONCE], start, len(words) * 4)
    return f"{_splitmix64(total & _MASK64):016x}"


HASHES: Mapping[str, Hash] = {"cpu": cpu_hash, "gpu": gpu_hash}


def _tiles(words: Tensor, start: int, nbytes: int) -> int:
    """The sum of the tiles' hashes; `words` begin at word `start` of a tensor of `nbytes`."""
    index = torch.arange(start, start + len(words), device=words.device) & _MASK
    values = words.long() & _MASK
    halves = []
    for seed, (factor, turn) in zip(_SEEDS, _POSITION, strict=True):
        place = ((index * factor + seed) & _MASK) ^ ((index << turn | index >> (32 - turn)) & _MASK)
        mixed = _finalise(values ^ place)
        mixed = torch.nn.functional.pad(mixed, (0, -len(mixed) % _TILE)).view(-1, _TILE)
        halves.append(_finalise((mixed.sum(1) & _MASK) ^ (nbytes & _MASK)))
    return sum(high << 32 | low for high, low in zip(*(h.tolist() for h in halves), strict=True))


def _finalise(x: Tensor) -> Tensor:
    """MurmurHash3's fmix32, on words held in 64 bits."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & _MASK
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


def _splitmix64(x: int) -> int:
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & _MASK64
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & _MASK64
    return x ^ x >> 31
