"""Keeps the published weights in host memory: for the folder, the density, checksums and sparse updates.

A bucket is compared with the weights before it, bit for bit in the published type, and then replaces them.
There is one copy: a version is taken only once the folder of the version before is written.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from areal_agents.errors import TrainingError
from areal_agents.training.publish.buckets import Change, Packed

logger = logging.getLogger(__name__)

_COMPARED_AT_ONCE = 1 << 22  # weights; the comparison then stays within a processor's cache
_BITS = {2: torch.int16, 4: torch.int32}
_MEMORY = Path("/proc/meminfo")


class HostCopy:
    """The published weights of one version; implements `checksums.Weights`.

    Args:
        shapes: the shape of each published weight, in the order in which they are gathered.
        dtype: the published type.
        pinned: whether the memory is page-locked, so that a GPU copies to it at full speed.

    Attributes:
        version: the version whose weights are complete here; None before the first and while one is taken.

    Raises:
        TrainingError: the machine has too little memory for it.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, *, pinned: bool) -> None:
        self.shapes, self.dtype = dict(shapes), dtype
        self.version: int | None = None
        self._places: dict[str, tuple[int, int]] = {}
        end = 0
        for name, shape in self.shapes.items():
            start, end = end, end + prod(shape) * dtype.itemsize
            self._places[name] = start, end
        self.nbytes = end
        _check_memory(end)
        self._data = torch.empty(end, dtype=torch.uint8)
        self._staging: Tensor | None = None  # receives a bucket from a GPU before it is compared
        self._is_locked = pinned and _lock_pages(self._data)
        self._taking: int | None = None
        self._left = 0
        self._before: int | None = None
        self._changed = self._compared = 0

    def begin(self, version: int) -> None:
        """Start to take a version. The weights held until now are those it is compared with."""
        self._before, self.version, self._taking = self.version, None, version
        self._left = len(self.shapes)
        self._changed = self._compared = 0

    def take(self, bucket: Packed, *, compare: bool, changes: bool = False) -> tuple[Change, ...] | None:
        """Copy a bucket, and compare it with the weights before it.

        Args:
            compare: whether the density is measured. changes: whether the difference of each weight is
                returned, if there was a version before.
        """
        assert self._taking is not None, "no version is being taken"
        names = bucket.header.names
        start, end = self._places[names[0]][0], self._places[names[-1]][1]
        old = self._data[start:end]
        found: list[Change] | None = None
        if self._before is not None and (compare or changes):
            found = [] if changes else None
            new = self._on_host(bucket.data)
            for name in names:
                at, to = (place - start for place in self._places[name])
                indices = self._differences(new[at:to], old[at:to], keep=changes)
                if found is not None:
                    values = new[at:to].view(self.dtype)[indices]
                    found.append(Change(name, _narrow(indices, to - at), values))
            old.copy_(new)
        else:
            old.copy_(bucket.data)
        self._left -= len(names)
        if not self._left:
            self.version, self._taking = self._taking, None
        return None if found is None else tuple(found)

    def read(self, name: str) -> Tensor:
        """Return a weight, without copying it."""
        start, end = self._places[name]
        return self._data[start:end].view(self.dtype).view(self.shapes[name])

    @property
    def density(self) -> float | None:
        """The share of the weights that differ from the version taken before; None if it was not compared."""
        return self._changed / self._compared if self._compared else None

    @property
    def before(self) -> int | None:
        """The version with which the last one taken was compared, None if there was none."""
        return self._before

    def close(self) -> None:
        """Release the memory. The copy is not used any more."""
        if self._is_locked:
            torch.cuda.cudart().cudaHostUnregister(self._data.data_ptr())
            self._is_locked = False
        self.version, self._data, self._staging = None, torch.empty(0, dtype=torch.uint8), None

    def _differences(self, new: Tensor, old: Tensor, *, keep: bool) -> Tensor:
        """Count the differing weights; return their positions if `keep`, else none."""
        bits = _BITS[self.dtype.itemsize]
        ours, theirs = new.view(bits), old.view(bits)
        kept = []
        for at in range(0, len(ours), _COMPARED_AT_ONCE):
            differs = ours[at : at + _COMPARED_AT_ONCE] != theirs[at : at + _COMPARED_AT_ONCE]
            self._changed += int(torch.count_nonzero(differs))
            if keep:
                kept.append(differs.nonzero().view(-1) + at)
        self._compared += len(ours)
        return torch.cat(kept) if kept else torch.empty(0, dtype=torch.int64)

    def _on_host(self, data: Tensor) -> Tensor:
        if data.device.type == "cpu":
            return data
        if self._staging is None or len(self._staging) < len(data):
            self._staging = torch.empty(len(data), dtype=torch.uint8, pin_memory=True)
        return self._staging[: len(data)].copy_(data)


def _narrow(indices: Tensor, nbytes: int) -> Tensor:
    return indices.to(torch.int32) if nbytes < 2**31 else indices


def _check_memory(nbytes: int) -> None:
    try:
        lines = _MEMORY.read_text().splitlines()
    except OSError:  # not Linux
        return
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    if free is not None and nbytes > free:
        raise TrainingError(
            f"the copy of the published weights in host memory needs {nbytes / 1e9:.1f} GB, and "
            f"{free / 1e9:.1f} GB are free; free memory, or use trainer.publish.transport: disk"
        )


def _lock_pages(data: Tensor) -> bool:
    """Page-lock the memory of `data`, and return whether it is. Copies are correct without it, but slower."""
    # torch's own pinned memory is rounded up to a power of two, which doubles a large model
    error = torch.cuda.cudart().cudaHostRegister(data.data_ptr(), data.nbytes, 0)
    if int(error) != 0:
        logger.warning(
            "%.1f GB of host memory cannot be page-locked (CUDA error %d); weights are copied to it slowly",
            data.nbytes / 1e9, int(error),
        )  # fmt: skip
    return int(error) == 0
