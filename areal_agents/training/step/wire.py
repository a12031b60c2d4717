"""A micro-batch as it is sent to another rank: NumPy arrays of the narrowest types that hold the values.

Most of a micro-batch are integers below 65,536 or 2³², which PyTorch indexes with as int64. The values that
arrive are the ones that were sent.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from areal_agents.algorithms.packing.microbatches import MicroBatch
from areal_agents.algorithms.packing.model_inputs import ImageRows
from areal_agents.algorithms.packing.token_tree import Segment

Array = npt.NDArray[Any]

TURN_BITS = 32  # a turn id is (sample index << 32) + turn


@dataclass(frozen=True, slots=True, eq=False)
class WireBatch:
    """A micro-batch in compact types.

    Attributes:
        segments: [S, 4]. turns: [N], the turn ids without the sample index.
        arrays: the other tensors by field. images: (pixel_values, grid_thw).
    """

    segments: Array
    turns: Array
    arrays: dict[str, Array]
    images: tuple[Array, Array] | None
    sample_tokens: int


def to_wire(batch: MicroBatch) -> WireBatch:
    """Return the micro-batch of one data rank, before it is shared by the ranks of a context."""
    assert batch.context_group is None, "a process group cannot be sent"
    segments = [(one.start, one.end, one.subtree_end, one.position) for one in batch.segments]
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    turns = values.pop("turn_ids") - (batch.sample_index << TURN_BITS)
    images = batch.images
    return WireBatch(
        segments=np.array(segments, np.int32).reshape(-1, 4),
        turns=narrow(turns),
        arrays={name: narrow(value) for name, value in values.items() if isinstance(value, Tensor)},
        images=None if images is None else (images.pixel_values.numpy(), images.grid_thw.numpy()),
        sample_tokens=batch.sample_tokens,
    )


def from_wire(wire: WireBatch) -> MicroBatch:
    """Return the micro-batch, in the types that the model computes with."""
    arrays: dict[str, Any] = {name: _wide(array) for name, array in wire.arrays.items()}
    images = wire.images
    return MicroBatch(
        **arrays,
        segments=tuple(Segment(*row) for row in wire.segments.tolist()),
        turn_ids=_wide(wire.turns) + (arrays["sample_index"] << TURN_BITS),
        sample_tokens=wire.sample_tokens,
        images=None if images is None else ImageRows(*map(torch.from_numpy, images)),
    )


def narrow(tensor: Tensor) -> Array:
    """Return the values as an array; integers in the narrowest signed type that holds them all."""
    array: Array = tensor.numpy()
    if array.dtype != np.int64 or not array.size:
        return array
    low, high = int(array.min()), int(array.max())
    for kind in (np.int8, np.int16, np.int32):
        if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max:
            return array.astype(kind)
    return array


def _wide(array: Array) -> Tensor:
    """Undo `narrow`."""
    return torch.from_numpy(array.astype(np.int64) if array.dtype.kind == "i" else array)
