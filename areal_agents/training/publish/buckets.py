"""Packs weights into buckets of bytes. Two buckets exist at a time: one is filled while the other is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


def plain_buffer(nbytes: int, device: torch.device) -> Tensor:
    """Return an uninitialised buffer of uint8."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def make_buffers(
    shapes: Mapping[str, tuple[int, ...]],
    *,
    dtype: torch.dtype,
    bucket_bytes: int,
    device: torch.device,
    make: Callable[[int, torch.device], Tensor] = plain_buffer,
) -> list[Tensor]:
    """Return the buffers of `packed`: two, or one if all weights are in one bucket."""
    sizes = [prod(shape) * dtype.itemsize for shape in shapes.values()]
    nbytes = max(min(bucket_bytes, sum(sizes)), *sizes)
    return [make(nbytes, device) for _ in range(1 if sum(sizes) <= nbytes else 2)]


def packed(
    weights: Iterable[tuple[str, Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    dtype: torch.dtype,
    bucket_bytes: int,
    buffers: Sequence[Tensor],
) -> Iterator[Packed]:
    """Pack `weights`, whose names and shapes are `shapes`, as `dtype`.

    A weight larger than a bucket forms a bucket by itself. The consumer must be done with a bucket when it
    requests the one after the next.

    A weight that cannot be packed raises its error where its bucket would be yielded. Until then weights are
    taken as usual: taking one is collective, and the other ranks of a trainer take as many.

    Args:
        buffers: those of `make_buffers`, with the same shapes, type and size of a bucket.
    """
    turn, used, left = 0, 0, len(shapes)
    names: list[str] = []
    failure: Exception | None = None

    def bucket() -> Packed:
        if failure is not None:
            raise failure
        header = WeightBucket(
            tuple(names),
            (str(dtype).removeprefix("torch."),) * len(names),
            tuple(tuple(shapes[name]) for name in names),
        )
        return Packed(header, buffers[turn][:used], last=left == 0)

    for name, tensor in weights:
        nbytes = prod(shapes[name]) * dtype.itemsize
        if used and used + nbytes > bucket_bytes:
            yield bucket()
            turn, used, names = 1 - turn, 0, []
        names.append(name)
        left -= 1
        try:
            data = tensor.to(dtype).contiguous().view(-1).view(torch.uint8)
            buffers[turn][used : used + nbytes].copy_(data)
        except Exception as error:
            failure = failure or error
        used += nbytes
    if used:
        yield bucket()


def _fields(header: WeightBucket) -> tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[int, ...], ...]]:
    return header.names, header.dtypes, header.shapes
