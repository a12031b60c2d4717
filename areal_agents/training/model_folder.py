"""A plain Hugging Face folder of weights, as transformers, SGLang and vLLM load it: whole or not there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from areal_agents.errors import TrainingError

SHARD_BYTES = 5_000_000_000  # above it, several files and an index

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


def write_model(
    weights: Mapping[str, Tensor],
    path: Path,
    *,
    like: Path,
    dtype: torch.dtype,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `weights` as `dtype`, and every other file as in the folder `like`.

    An existing folder of that name is replaced; a reader never sees half a folder under it.

    Raises:
        TrainingError: the disk refuses, or `like` is gone.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for file in like.iterdir():
            if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES):
                shutil.copyfile(file, temporary / file.name)
        _name_dtype(temporary / "config.json", dtype)
        _write_weights(weights, temporary, dtype=dtype, shard_bytes=shard_bytes)
        if path.exists():
            shutil.rmtree(path)
        temporary.rename(path)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)  # the disk may be full of it
        raise TrainingError(f"cannot write the weights to {path}: {error}") from error


def remove_unfinished(folder: Path, pattern: str) -> None:
    """Remove what a killed `write_model` left for the names in `folder` that match `pattern`.

    Only for a folder that nobody else writes to.
    """
    for left in folder.glob(f".{pattern}.*.tmp"):
        shutil.rmtree(left, ignore_errors=True)


def _write_weights(
    weights: Mapping[str, Tensor], folder: Path, *, dtype: torch.dtype, shard_bytes: int
) -> None:
    """One file after the other, so that only one of them is held in the type it is saved in."""
    shards = _shards(weights, dtype=dtype, shard_bytes=shard_bytes)
    whole = len(shards) == 1
    places = {}
    for number, names in enumerate(shards, 1):
        file = "model.safetensors" if whole else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: weights[name].to(dtype).contiguous() for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(names, file))
    if not whole:
        total = sum(tensor.numel() for tensor in weights.values()) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _shards(weights: Mapping[str, Tensor], *, dtype: torch.dtype, shard_bytes: int) -> list[list[str]]:
    """Names, in order, in runs of at most `shard_bytes`; a tensor larger than that is one by itself."""
    shards: list[list[str]] = [[]]
    room = shard_bytes
    for name, tensor in weights.items():
        size = tensor.numel() * dtype.itemsize
        if size > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    return shards


def _name_dtype(config: Path, dtype: torch.dtype) -> None:
    """Let config.json say what type the weights have, where it says one at all."""
    if not config.is_file():
        return
    tree = json.loads(config.read_text())
    name = str(dtype).removeprefix("torch.")
    named = [key for key in ("dtype", "torch_dtype") if key in tree and tree[key] != name]
    if named:
        tree.update(dict.fromkeys(named, name))
        config.write_text(json.dumps(tree, indent=2) + "\n")
