"""The files of a checkpoint: which folders are complete, and which files have changed since."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from areal_agents.errors import TrainingError
from areal_agents.training.distributed import Ranks
from areal_agents.training.step.optimizer import plain_name

_PIECE = 1 << 24  # bytes read at a time


def complete_steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, ascending."""
    names = (p.name.removeprefix("step-") for p in folder.glob("step-*"))
    return sorted(int(name) for name in names if name.isdigit())


def sizes_and_sums(folder: Path) -> dict[str, tuple[int, int]]:
    """Return (bytes, CRC-32) of each file. A CRC detects damage by a disk or a copy, not tampering."""
    return {file.name: _size_and_sum(file) for file in sorted(folder.iterdir()) if file.is_file()}


def sync_files(folder: Path) -> None:
    """Sync the files of a folder and their names to the disk."""
    for file in folder.iterdir():
        _sync(file)
    sync_names(folder)


def sync_names(folder: Path) -> None:
    """Sync the names in a folder to the disk, for example after a rename."""
    _sync(folder)


def check_files(path: Path, files: Mapping[str, Sequence[int]], ranks: Ranks) -> None:
    """Compare the files of a checkpoint with the recorded sizes and sums; each rank checks a share.
    Collective.

    Raises:
        TrainingError: a file is damaged; raised on every rank, and the rank that found it names the file.
    """
    fault = ""
    for name in sorted(files)[ranks.rank :: ranks.count]:
        size, checksum = files[name]
        try:
            found = _size_and_sum(path / name)
        except OSError as error:
            fault = fault or f"{path / name}: {error}"
            continue
        if found[0] != size:
            fault = fault or f"{path / name} has {found[0]} bytes, {size} were written"
        elif found[1] != checksum:
            fault = fault or f"{path / name} has changed since it was written (CRC-32)"
    if ranks.any(bool(fault)):
        raise TrainingError(
            f"the checkpoint {path} is damaged: {fault or 'the log of another rank names the file'}; remove "
            "the folder to resume from the previous one"
        )


def fingerprint(module: nn.Module) -> str:
    """Return a digest of the names and unsharded shapes of the parameters."""
    shapes = sorted((plain_name(name), tuple(p.shape)) for name, p in module.named_parameters())
    return hashlib.blake2b(repr(shapes).encode(), digest_size=16).hexdigest()


def rng_state() -> dict[str, Any]:
    """Return the state of torch's random number generators."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore a state that `rng_state` returned."""
    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _size_and_sum(file: Path) -> tuple[int, int]:
    size = checksum = 0
    with file.open("rb") as opened:
        while piece := opened.read(_PIECE):
            size += len(piece)
            checksum = zlib.crc32(piece, checksum)
    return size, checksum


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
