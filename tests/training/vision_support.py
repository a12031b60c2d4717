"""A tiny Qwen2.5-VL, and samples with images for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from training_support import VOCAB, make_sample
from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig

from areal_agents.core.sample import ImageInput, TrainingSample

START, END, IMAGE, VIDEO = VOCAB - 4, VOCAB - 3, VOCAB - 2, VOCAB - 1
MERGE, PATCH = 2, 3 * 2 * 4 * 4


def build_vision_model(path: Path) -> Path:
    """A random Qwen2.5-VL with two blocks for text and two for images."""
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "initializer_range": 0.15,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]},
        },
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "patch_size": 4,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "out_hidden_size": 32,
            "spatial_merge_size": MERGE,
            "initializer_range": 0.15,
        },
        vision_start_token_id=START,
        vision_end_token_id=END,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def picture(rng: np.random.Generator, height: int, width: int) -> ImageInput:
    """Random patches, not yet placed in a sample."""
    pixels = rng.normal(size=(height * width, PATCH)).astype(np.float32)
    return ImageInput(pixels, (1, height, width), start=0, length=height * width // MERGE**2)


def sample_of(
    rng: np.random.Generator, prompt: Sequence[int], images: Sequence[ImageInput], tail: int, name: str
) -> TrainingSample:
    """The prompt, each image with its marker tokens and the prompt after it, and `tail` trained tokens."""
    tokens, placed = list(prompt), []
    for image in images:
        placed.append(replace(image, start=len(tokens) + 1))
        tokens += [START, *[IMAGE] * image.length, END, *prompt]
    first = len(tokens)
    tokens += rng.integers(2, START, tail).tolist()
    sample = make_sample(tokens, range(first, len(tokens)), rng=rng, episode_id=name)
    return replace(sample, images=tuple(placed))


def samples_with_images() -> list[TrainingSample]:
    """Samples with two images of different sizes, a shared image, another image after the same prompt, and
    none."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(2, START, 40).tolist()
    shared, other = picture(rng, 4, 6), picture(rng, 4, 6)
    return [
        sample_of(rng, prompt[:3], [picture(rng, 6, 2), picture(rng, 4, 4)], 7, "two"),
        sample_of(rng, prompt, [shared], 5, "shared-0"),
        sample_of(rng, prompt, [shared], 9, "shared-1"),
        sample_of(rng, prompt, [shared, picture(rng, 2, 4)], 6, "continued"),
        sample_of(rng, prompt, [other], 4, "other"),
        sample_of(rng, prompt, [], 8, "none"),
    ]
