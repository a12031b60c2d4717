"""Supports images for Qwen2-VL: features replace the embeddings of image tokens, and positions have three
axes.

Every forward pass goes through the vision tower, with a blank image if a micro-batch has none, because all
ranks must take part in gathering its units and in reducing its gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from areal_agents.algorithms.packing.microbatches import MicroBatch
from areal_agents.algorithms.packing.token_tree import Segment

SUPPORTED = ("qwen2_vl", "qwen2_5_vl")


def sees_images(config: PretrainedConfig) -> bool:
    """Whether the model has a vision tower."""
    return getattr(config, "vision_config", None) is not None


def vision_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The blocks of the vision tower; empty if there is none."""
    return list(model.base_model.visual.blocks) if sees_images(model.config) else []


def vision_inputs(model: PreTrainedModel, batch: MicroBatch) -> dict[str, Any]:
    """Return the decoder's inputs: embeddings [1, T, d] in place of ids, and positions [3, 1, T].

    Raises:
        ValueError: the images do not match the image tokens.
    """
    base: Any = model.base_model
    config = model.config
    merge = config.vision_config.spatial_merge_size
    embedded = model.get_input_embeddings()(batch.input_ids[None])
    blank = batch.images is None
    if batch.images is None:
        width = _patch_width(config.vision_config)
        pixels = torch.zeros(merge * merge, width, device=embedded.device)
        grid = torch.tensor([[1, merge, merge]], device=embedded.device)
    else:
        pixels, grid = batch.images.pixel_values, batch.images.grid_thw
    features = base.get_image_features(pixels, grid, return_dict=True).pooler_output
    flat = torch.cat(list(features)).to(embedded.dtype)
    is_image = batch.input_ids == config.image_token_id
    count = int(is_image.sum())
    if count != (0 if blank else len(flat)):
        raise ValueError(
            f"expected images for {count} image tokens, got images of {0 if blank else len(flat)} tokens"
        )
    embedded = embedded + 0 * flat.sum() if blank else embedded.masked_scatter(is_image[None, :, None], flat)
    grids = [] if blank else grid.tolist()
    positions = rope_positions(is_image.tolist(), batch.segments, grids, merge=merge)
    return {"inputs_embeds": embedded, "position_ids": positions[:, None].to(embedded.device)}


def rope_positions(
    is_image: Sequence[bool], segments: Sequence[Segment], grids: Sequence[Sequence[int]], *, merge: int
) -> Tensor:
    """Rotary positions of rows in a token tree, in time, height and width (Qwen2-VL, arXiv 2409.12191, §2.1).

    Text positions increase by one in all three. An image of t × h × w merged patches uses the indices of its
    patches, starting from the position where it begins; the next token's position is max(h, w) later.

    Args:
        is_image: [T]; segments: of all rows.
        grids: for each image, in the order of rows, its number of patches in time, height and width before
            merging.
        merge: number of patches merged into one token, along height and along width.

    Returns:
        [3, T] int64.
    """
    positions = torch.empty(3, len(is_image), dtype=torch.int64)
    remaining = iter(grids)
    above: list[tuple[int, int]] = []  # the end of a segment's subtree, and the position after the segment
    for segment in segments:
        while above and above[-1][0] <= segment.start:
            above.pop()
        row, position = segment.start, above[-1][1] if above else 0
        while row < segment.end:
            if not is_image[row]:
                positions[:, row] = position
                row, position = row + 1, position + 1
                continue
            time, height, width = next(remaining)
            axes = (torch.arange(time), torch.arange(height // merge), torch.arange(width // merge))
            patches = torch.cartesian_prod(*axes).T
            positions[:, row : row + patches.shape[1]] = position + patches
            row += patches.shape[1]
            position += max(height, width) // merge
        above.append((segment.subtree_end, position))
    return positions


def _patch_width(vision: Any) -> int:
    """Return the number of values of one patch."""
    return int(vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)
