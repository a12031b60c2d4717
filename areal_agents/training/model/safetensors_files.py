"""The safetensors files of a Hugging Face folder, read by rows; only the requested rows are read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from areal_agents.errors import TrainingError

_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a safetensors file, as its header describes it."""

    file: Path
    name: str
    shape: tuple[int, ...]


class Checkpoint:
    """The tensors of a folder's files.

    Attributes:
        tensors: the tensors by name.
        bytes_read: the number of bytes of tensor data read so far.
    """

    def __init__(self, folder: Path) -> None:
        """Read the headers of all files.

        Raises:
            TrainingError: there are no weights, the weights are quantised, or a file that the index names is
                missing, truncated or not a safetensors file.
        """
        self._files: dict[Path, Any] = {}
        self.tensors: dict[str, Stored] = {}
        self.bytes_read = 0
        for file, names in _weight_files(folder).items():
            try:
                opened = self._files[file] = safe_open(str(file), framework="pt")
                held = set(opened.keys())
                for name in sorted(held) if names is None else names:
                    if name not in held:
                        raise TrainingError(f"{file} lacks {name}, which the index places in it")
                    piece = opened.get_slice(name)
                    if piece.get_dtype() not in _FLOATS:
                        raise TrainingError(
                            f"{file}: {name} is {piece.get_dtype()}; only unquantised weights can be trained"
                        )
                    self.tensors[name] = Stored(file, name, tuple(piece.get_shape()))
            except (SafetensorError, OSError) as error:
                raise TrainingError(f"{file} is not a valid safetensors file: {error}") from error

    def read(self, stored: Stored, start: int = 0, end: int | None = None) -> Tensor:
        """Read rows [start, end) of a tensor, in the file's type; a scalar is read whole.

        Raises:
            TrainingError: the data cannot be read, or is not finite.
        """
        try:
            opened = self._files[stored.file]
            if stored.shape:
                rows: Tensor = opened.get_slice(stored.name)[start:end]
            else:
                rows = opened.get_tensor(stored.name)
        except (SafetensorError, OSError) as error:
            raise TrainingError(f"{stored.file}: cannot read {stored.name}: {error}") from error
        if not torch.isfinite(rows).all():
            raise TrainingError(f"{stored.file}: {stored.name} holds values that are not finite")
        self.bytes_read += rows.nbytes
        return rows


def _weight_files(folder: Path) -> dict[Path, list[str] | None]:
    """Return the safetensors files, with the names that the index lists for each; None without an index."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            placed = json.loads(index.read_text())["weight_map"].items()
            files: dict[Path, list[str]] = {}
            for name, file in placed:
                files.setdefault(folder / file, []).append(name)
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise TrainingError(f"{index} is not a valid index of weights: {error!r}") from error
        return dict(files)
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise TrainingError(f"{folder}: cannot load the model: there are no safetensors files")
    return {file: None for file in found}
