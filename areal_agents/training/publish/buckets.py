"""Packs weights into buckets of bytes. Two buckets exist at a time: one is filled while the other is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from areal_agents.inference.engine import WeightBucket

MB = 1_000_000


@dataclass(frozen=True, slots=True)
class Packed:
    """A bucket: consecutive weights packed into one buffer.

    Attributes:
        header: their names, types and shapes.
        data: [header.nbytes] uint8, the concatenated bytes of the weights. The buffer is overwritten when the
            bucket after the next is filled.
        last: whether this is the last bucket.
        changes: for each weight its difference from the version before; None if it is not known.
        handles: for each rank a handle of its memory with the bucket; empty if they are not needed.
    """

    header: WeightBucket
    data: Tensor
    last: bool
    changes: tuple[Change, ...] | None = None
    handles: tuple[str, ...] = ()

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Views of the bucket's weights."""
        found, start = [], 0
        for name, dtype, shape in zip(*_fields(self.header), strict=True):
            kind = getattr(torch, dtype)
            end = start + prod(shape) * kind.itemsize
            found.append((name, self.data[start:end].view(kind).view(shape)))
            start = end
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """The difference of one weight from the version before.

    Attributes:
        indices: [n] int32 or int64, the positions of the changed values in the flat weight, ascending.
        values: [n] their new values, in the published type.
    """

    name: str
    indices: Tensor
    values: Tensor

    @property
    def nbytes(self) -> int:
        """Size of the indices and values."""
        return self.indices.nbytes + self.values.nbytes


MakeBuffer = Callable[[int, torch.device], Tensor]


def plain_buffer(nbytes: int, device: torch.device) -> Tensor:
    """Return an uninitialised buffer of uint8."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def buffer_bytes(shapes: Mapping[str, tuple[int, ...]], *, dtype: torch.dtype, bucket_bytes: int) -> int:
    """Return the size of each of the two buffers of `packed`."""
    sizes = [prod(shape) * dtype.itemsize for shape in shapes.values()]
    return max(min(bucket_bytes, sum(sizes)), *sizes)


def packed(
    weights: Iterable[tuple[str, Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    dtype: torch.dtype,
    bucket_bytes: int,
    make_buffer: MakeBuffer = plain_buffer,
) -> Iterator[Packed]:
    """Pack `weights`, whose names and shapes are `shapes`, as `dtype`.

    A weight larger than a bucket forms a bucket by itself. The consumer must be done with a bucket when it
    requests the one after the next.

    Args:
        make_buffer: allocates a buffer of a number of bytes on a device.
    """
    nbytes = buffer_bytes(shapes, dtype=dtype, bucket_bytes=bucket_bytes)
    buffers: list[Tensor | None] = [None, None]
    turn, used, left = 0, 0, len(shapes)
    names: list[str] = []

    def bucket(data: Tensor) -> Packed:
        header = WeightBucket(
            tuple(names),
            (str(dtype).removeprefix("torch."),) * len(names),
            tuple(tuple(shapes[name]) for name in names),
        )
        return Packed(header, data, last=left == 0)

    for name, tensor in weights:
        data = tensor.to(dtype).contiguous().view(-1).view(torch.uint8)
        if used and used + len(data) > bucket_bytes:
            yield bucket(_filled(buffers, turn, used))
            turn, used, names = 1 - turn, 0, []
        names.append(name)
        left -= 1
        if buffers[turn] is None:
            buffers[turn] = make_buffer(nbytes, data.device)
        _filled(buffers, turn, used + len(data))[used:].copy_(data)
        used += len(data)
    if used:
        yield bucket(_filled(buffers, turn, used))


def _filled(buffers: list[Tensor | None], turn: int, used: int) -> Tensor:
    buffer = buffers[turn]
    assert buffer is not None
    return buffer[:used]


def _fields(header: WeightBucket) -> tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[int, ...], ...]]:
    return header.names, header.dtypes, header.shapes
