"""Writes weights atomically as a Hugging Face folder that transformers, SGLang and vLLM can load.

The folder is written tensor by tensor, so that no process needs all the weights at once. The files have the
format that safetensors writes: the length of a JSON header in 8 bytes, the header, the tensors' bytes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal_agents.errors import TrainingError

SHARD_BYTES = 5_000_000_000  # larger models get several files and an index
Shape = tuple[int, ...]

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
_CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_PIECE = 64 << 20  # bytes per write


class ModelFolder:
    """A folder that is being written. `finish` gives it its final name, and replaces an existing folder of
    that name.

    Args:
        shapes: the shape of every weight by name; they determine files and offsets, so `add` may be called in
            any order.
        like: the folder whose other files (config, tokenizer) are copied.
        dtype: the type in which the weights are written.

    Raises:
        TrainingError: here or later, the disk cannot be written, or `like` no longer exists. Unfinished files
            are removed.
    """

    def __init__(
        self,
        path: Path,
        shapes: Mapping[str, Shape],
        *,
        like: Path,
        dtype: torch.dtype,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        self.path, self.dtype = path, dtype
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._shapes = dict(shapes)
        self._missing = set(shapes)
        self._places: dict[str, tuple[Path, int]] = {}
        try:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary.mkdir(parents=True)
            _copy_others(like, self._temporary, dtype)
            self._lay_out(shard_bytes)
        except OSError as error:
            raise self._failed(error) from error

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one weight, which may have any type and be on any device."""
        assert tuple(tensor.shape) == self._shapes[name], (name, tensor.shape, self._shapes[name])
        file, offset = self._places[name]
        data = memoryview(raw_bytes(tensor.to(self.dtype)))
        try:
            with file.open("r+b", buffering=0) as opened:
                opened.seek(offset)
                for start in range(0, len(data), _PIECE):
                    piece = data[start : start + _PIECE]
                    while piece:  # a write may be partial; the next one raises the reason
                        piece = piece[opened.write(piece) :]
        except OSError as error:
            raise self._failed(error) from error
        self._missing.discard(name)

    def finish(self) -> None:
        """Rename the complete folder to its final name."""
        assert not self._missing, f"not written: {sorted(self._missing)[:3]}"
        try:
            if self.path.exists():
                shutil.rmtree(self.path)
            self._temporary.rename(self.path)
        except OSError as error:
            raise self._failed(error) from error

    def discard(self) -> None:
        """Remove everything that was written."""
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _failed(self, error: OSError) -> TrainingError:
        self.discard()  # frees the space, since the disk may be full
        return TrainingError(f"cannot write the weights to {self.path}: {error}")

    def _lay_out(self, shard_bytes: int) -> None:
        """Create the files with their headers, and the index if there are several files."""
        shards = _shards(self._shapes, self.dtype.itemsize, shard_bytes)
        names = ["model.safetensors"]
        if len(shards) > 1:
            names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
        for file, held in zip(names, shards, strict=True):
            header, offsets = _header({name: self._shapes[name] for name in held}, self.dtype)
            (self._temporary / file).write_bytes(header)
            for name, offset in offsets.items():
                self._places[name] = self._temporary / file, len(header) + offset
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": sum(map(prod, self._shapes.values())) * self.dtype.itemsize},
                "weight_map": {name: file.name for name, (file, _) in self._places.items()},
            }
            (self._temporary / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def raw_bytes(tensor: Tensor) -> Any:
    """Return a tensor's bytes, row-major, as an array; it shares the memory of a contiguous CPU tensor."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def write_model(
    weights: Mapping[str, Tensor],
    path: Path,
    *,
    like: Path,
    dtype: torch.dtype,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `weights` as `dtype`, and copy every other file from the folder `like`.

    Raises:
        TrainingError: as `ModelFolder`.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    folder = ModelFolder(path, shapes, like=like, dtype=dtype, shard_bytes=shard_bytes)
    for name, tensor in weights.items():
        folder.add(name, tensor)
    folder.finish()


def remove_unfinished(folder: Path, pattern: str) -> None:
    """Remove unfinished folders of killed processes for the names in `folder` that match `pattern`.

    Use it only for a folder that no other process writes to.
    """
    for left in folder.glob(f".{pattern}.*.tmp"):
        shutil.rmtree(left, ignore_errors=True)


def _copy_others(like: Path, folder: Path, dtype: torch.dtype) -> None:
    for file in like.iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copyfile(file, folder / file.name)
    _name_dtype(folder / "config.json", dtype)


def _header(shapes: Mapping[str, Shape], dtype: torch.dtype) -> tuple[bytes, dict[str, int]]:
    """Return a file's bytes before its first tensor, and the offset of each tensor after them."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for name, shape in shapes.items():
        offsets[name], start = end, end
        end += prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors are aligned to 8 bytes
    return len(text).to_bytes(8, "little") + text, offsets


def _shards(shapes: Mapping[str, Shape], item_bytes: int, shard_bytes: int) -> list[list[str]]:
    """Return the names, in order, in groups of at most `shard_bytes`; a larger tensor forms a group by
    itself."""
    shards: list[list[str]] = [[]]
    bytes_left = shard_bytes
    for name, shape in shapes.items():
        size = prod(shape) * item_bytes
        if size > bytes_left and shards[-1]:
            shards.append([])
            bytes_left = shard_bytes
        shards[-1].append(name)
        bytes_left -= size
    return shards


def _name_dtype(config: Path, dtype: torch.dtype) -> None:
    """Update the dtype of the weights in config.json, if it has one."""
    if not config.is_file():
        return
    tree = json.loads(config.read_text())
    name = str(dtype).removeprefix("torch.")
    named = [key for key in ("dtype", "torch_dtype") if key in tree and tree[key] != name]
    if named:
        tree.update(dict.fromkeys(named, name))
        config.write_text(json.dumps(tree, indent=2) + "\n")
