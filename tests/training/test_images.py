"""A tiny Qwen2.5-VL computes packed samples with images as transformers computes each sample alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from model_support import assert_same, packed
from safetensors.torch import load_file
from torch import Tensor
from training_support import VOCAB, build_model
from transformers import AutoModelForImageTextToText
from vision_support import IMAGE, build_vision_model, samples_with_images

from areal_agents.algorithms.packing.microbatches import pack
from areal_agents.core.sample import TrainingSample
from areal_agents.errors import TrainingError
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.loading import load_weights
from areal_agents.training.model.model import ModelOptions, load_policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2.5-VL."""
    return build_vision_model(tmp_path_factory.mktemp("vision"))


def reference(folder: Path, batch: Sequence[TrainingSample]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the logprobs and the gradient of Σ advantage · logprob, from transformers' eager attention."""
    model = AutoModelForImageTextToText.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    logprobs = []
    for sample in batch:
        ids = torch.from_numpy(sample.token_ids[None].astype(np.int64))
        seen = {}
        if sample.images:
            seen = {
                "pixel_values": torch.from_numpy(np.concatenate([i.pixel_values for i in sample.images])),
                "image_grid_thw": torch.tensor([i.grid_thw for i in sample.images]),
                "mm_token_type_ids": (ids == IMAGE).int(),
            }
        logits = model(ids, **seen).logits[0]
        at = np.flatnonzero(sample.loss_mask)
        targets = torch.from_numpy(sample.token_ids[at].astype(np.int64))
        chosen = logits[at - 1].log_softmax(-1).gather(1, targets[:, None])[:, 0]
        (chosen * torch.from_numpy(sample.advantages[at])).sum().backward()
        logprobs.append(chosen.detach())
    return logprobs, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("options", [{}, {"share_prefixes": False}, {"token_budget": 150}])
def test_packed_images_give_the_same_result_as_separate_samples(
    options: dict, folder: Path, group: Ranks
) -> None:
    assert_same(
        packed(load_policy(folder, group), samples_with_images(), **options),
        reference(folder, samples_with_images()),
    )


def test_equal_images_are_shared_and_different_ones_are_not() -> None:
    (batch,) = pack(samples_with_images(), token_budget=4096)
    assert batch.images is not None
    assert sorted(map(tuple, batch.images.grid_thw.tolist())) == sorted(
        [(1, 4, 6), (1, 4, 6), (1, 2, 4), (1, 6, 2), (1, 4, 4)]
    )
    (flat,) = pack(samples_with_images(), token_budget=4096, share_prefixes=False)
    assert flat.images is not None and len(flat.images.grid_thw) == 7
    # two samples share text, image and text with a third; two others share only the text before the image
    assert len(flat.input_ids) - len(batch.input_ids) == 2 * (40 + 8 + 40) + 2 * 40
    (none,) = pack(samples_with_images()[-1:], token_budget=4096)
    assert none.images is None


def test_a_batch_without_images_differentiates_the_vision_tower_by_zero(folder: Path, group: Ranks) -> None:
    logprobs, gradients = packed(load_policy(folder, group), samples_with_images()[-1:])
    want = reference(folder, samples_with_images()[-1:])
    torch.testing.assert_close(logprobs[0], want[0][0], atol=1e-5, rtol=1e-5)
    vision = {name for name in gradients if ".visual." in name}
    assert vision and not any(gradients[name].any() for name in vision)


def test_weights_keep_the_names_of_the_folder(folder: Path, group: Ranks) -> None:
    original = load_file(folder / "model.safetensors")
    policy = load_policy(folder, group)
    assert load_weights(policy.model, folder) == sum(t.nbytes for t in original.values())
    weights = policy.full_state_dict()
    assert weights.keys() == original.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in original.items())
    assert policy.shape.hidden == 32 and policy.shape.vocab == VOCAB


def test_bfloat16_with_recomputed_blocks_is_near_float32(folder: Path, group: Ranks) -> None:
    options = ModelOptions(dtype=torch.bfloat16, activation_checkpointing="full")
    logprobs, _ = packed(load_policy(folder, group, options=options), samples_with_images())
    want, _ = reference(folder, samples_with_images())
    assert 0 < (torch.cat(logprobs) - torch.cat(want)).abs().mean() < 0.05


def test_images_that_do_not_match_the_sample_or_the_model_are_refused(
    folder: Path, group: Ranks, tmp_path: Path
) -> None:
    policy = load_policy(folder, group)
    first = samples_with_images()[1]
    with pytest.raises(ValueError, match="expected images for 6 image tokens, got images of 0 tokens"):
        packed(policy, [replace(first, images=())])
    text = load_policy(build_model(tmp_path / "text"), group)
    with pytest.raises(ValueError, match="takes no images"):
        packed(text, [first])
    config = (folder / "config.json").read_text().replace('"qwen2_5_vl"', '"qwen3_vl"')
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(TrainingError, match="qwen3_vl takes images; of such models only"):
        load_policy(tmp_path, group)


def test_a_vision_model_is_refused_where_ranks_share_sequences(folder: Path, group: Ranks) -> None:
    with pytest.raises(TrainingError, match="context_parallel does not support vision models"):
        load_policy(folder, replace(group, context_count=2))
