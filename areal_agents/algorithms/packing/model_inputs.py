"""The inputs of a model besides token ids, for the rows of a micro-batch: images, and recorded routing.

Tokens of images are merged only if the images are equal, because their ids alone do not distinguish them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from areal_agents.core.sample import TrainingSample

Rows = npt.NDArray[np.int64]

_FIRST_IMAGE_KEY = 2**31  # above every token id


@dataclass(frozen=True, slots=True, eq=False)
class ImageRows:
    """The images of a micro-batch, in the order of their rows. An image that several samples share is
    included once.

    Attributes:
        pixel_values: [P, D] float32, the patches of all images.
        grid_thw: [I, 3] int64, number of patches of each image in time, height and width.
    """

    pixel_values: Tensor
    grid_thw: Tensor

    def to(self, device: torch.device | str) -> ImageRows:
        """The same on `device`."""
        return ImageRows(self.pixel_values.to(device), self.grid_thw.to(device))


def merge_keys(samples: Sequence[TrainingSample], lengths: Sequence[int]) -> list[npt.NDArray] | None:
    """Per sample [L], the keys that distinguish its first `lengths[i]` tokens; None if the token ids
    distinguish them."""
    if not any(sample.images for sample in samples):
        return None
    seen: dict[bytes, int] = {}
    keys = []
    for sample, length in zip(samples, lengths, strict=True):
        key = sample.token_ids[:length].astype(np.int64)
        for image in sample.images:
            digest = hashlib.blake2b(np.ascontiguousarray(image.pixel_values).tobytes())
            digest.update(repr(image.grid_thw).encode())
            number = seen.setdefault(digest.digest(), len(seen))
            key[image.start : image.start + image.length] = _FIRST_IMAGE_KEY + number
        keys.append(key)
    return keys


def image_rows(samples: Sequence[TrainingSample], rows: Sequence[Rows]) -> ImageRows | None:
    """The images that the samples show to the model; None if there are none.

    Args:
        rows: per sample, the row of each token that the model reads; an image after these tokens is left out.
    """
    found = {
        int(at[image.start]): image
        for sample, at in zip(samples, rows, strict=True)
        for image in sample.images
        if image.start < len(at)
    }
    if not found:
        return None
    images = [found[row] for row in sorted(found)]
    return ImageRows(
        torch.from_numpy(np.concatenate([image.pixel_values for image in images])),
        torch.tensor([image.grid_thw for image in images]),
    )


def routed_rows(samples: Sequence[TrainingSample], rows: Sequence[Rows], count: int) -> Tensor | None:
    """The experts that the engine chose [T, layers, k] int64, -1 if unknown; None if no sample has any.

    If samples share a row, the first sample that has a choice for the row determines it.

    Raises:
        ValueError: the choices of the samples differ in shape.
    """
    shapes = {s.routed_experts.shape[1:] for s in samples if s.routed_experts is not None}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise ValueError(
            f"the recorded routing of a batch must have one shape [layers, k], got {sorted(shapes)}"
        )
    chosen = np.full((count, *shapes.pop()), -1, np.int64)
    for sample, at in zip(reversed(samples), reversed(rows), strict=True):
        if sample.routed_experts is not None:
            recorded = sample.routed_experts[: len(at)]
            chosen[at] = np.where(recorded >= 0, recorded, chosen[at])
    return torch.from_numpy(chosen)
