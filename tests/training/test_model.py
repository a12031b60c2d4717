"""The policy's logprobs and gradients against transformers run on each sequence alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from training_support import build_model, make_sample, random_group
from transformers import AutoModelForCausalLM

from areal_agents.algorithms.packing import pack
from areal_agents.core.sample import TrainingSample
from areal_agents.errors import TrainingError
from areal_agents.training.distributed import Ranks
from areal_agents.training.model import Policy, load_policy


def samples(seed: int = 0, temperature: float = 1.0) -> list[TrainingSample]:
    rng = np.random.default_rng(seed)
    return [s for g in "abc" for s in random_group(rng, group_id=g, temperature=temperature)]


def reference(folder: Path, batch: Sequence[TrainingSample]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Logprobs of the trained tokens per sample, and the gradient of Σ advantage · logprob, from
    transformers' own eager attention, one unpadded sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    logprobs = []
    for sample in batch:
        logits = model(torch.from_numpy(sample.token_ids[None].astype(np.int64))).logits[0]
        at = np.flatnonzero(sample.loss_mask)
        scaled = logits[at - 1] / torch.from_numpy(sample.temperatures[at])[:, None]
        targets = torch.from_numpy(sample.token_ids[at].astype(np.int64))
        chosen = scaled.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        (chosen * torch.from_numpy(sample.advantages[at])).sum().backward()
        logprobs.append(chosen.detach())
    return logprobs, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def packed(
    policy: Policy, batch: Sequence[TrainingSample], **options: object
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The same from packed micro-batches."""
    by_sample: dict[int, list[float]] = {i: [] for i in range(len(batch))}
    for micro in pack(batch, **{"token_budget": 4096, **options}):  # type: ignore[arg-type]
        chosen, _ = policy(micro)
        (chosen * micro.advantages).sum().backward()
        for index, value in zip(micro.sample_index.tolist(), chosen.tolist(), strict=True):
            by_sample[index].append(value)
    gradients = {
        name[len("model.") :]: p.grad.full_tensor()
        for name, p in policy.named_parameters()
        if p.grad is not None
    }
    policy.zero_grad()
    return [torch.tensor(values) for values in by_sample.values()], gradients


def assert_same(
    got: tuple[list[Tensor], dict[str, Tensor]], want: tuple[list[Tensor], dict[str, Tensor]]
) -> None:
    for got_logprobs, want_logprobs in zip(got[0], want[0], strict=True):
        torch.testing.assert_close(got_logprobs, want_logprobs, atol=1e-5, rtol=1e-5)
    assert got[1].keys() == want[1].keys()
    for name, gradient in want[1].items():
        error = (got[1][name] - gradient).abs().max() / gradient.abs().max()
        assert error <= 1e-5, (name, float(error))


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_shared_prefixes_give_the_flat_logprobs_and_gradients(
    kind: str, tied: bool, tmp_path: Path, group: Ranks
) -> None:
    folder = build_model(tmp_path, kind, tied=tied)
    batch = samples()
    policy = load_policy(folder, group)
    shared = packed(policy, batch)
    assert_same(shared, reference(folder, batch))
    assert sum(len(m.input_ids) for m in pack(batch, token_budget=4096)) < 0.5 * sum(map(len, batch))


@pytest.mark.parametrize("options", [{"share_prefixes": False}, {"token_budget": 120}, {"token_budget": 250}])
def test_packing_changes_nothing(options: dict, model_folder: Path, group: Ranks) -> None:
    batch = samples()
    assert_same(packed(load_policy(model_folder, group), batch, **options), reference(model_folder, batch))


def test_each_token_is_scored_at_its_own_temperature(model_folder: Path, group: Ranks) -> None:
    batch = [*samples(1, temperature=0.7), *samples(2, temperature=1.3)]
    assert_same(packed(load_policy(model_folder, group), batch), reference(model_folder, batch))


def test_chunks_of_the_head_change_nothing(model_folder: Path, group: Ranks) -> None:
    batch = samples()
    policy = load_policy(model_folder, group)
    policy.chunk_logits = 96 * 7
    assert_same(packed(policy, batch), reference(model_folder, batch))


def test_a_token_that_two_samples_predict_from_one_row(model_folder: Path, group: Ranks) -> None:
    rng = np.random.default_rng(3)
    prompt = rng.integers(2, 96, 80).tolist()
    batch = [
        make_sample([*prompt, token, 5], [80, 81], rng=rng, episode_id=str(token)) for token in (7, 7, 9)
    ]
    assert_same(packed(load_policy(model_folder, group), batch), reference(model_folder, batch))


def test_bfloat16_compute_keeps_float32_masters_and_gradients(model_folder: Path, group: Ranks) -> None:
    batch = samples()
    policy = load_policy(model_folder, group, dtype=torch.bfloat16)
    logprobs, gradients = packed(policy, batch)
    assert {p.dtype for p in policy.parameters()} == {g.dtype for g in gradients.values()} == {torch.float32}
    want_logprobs, want_gradients = reference(model_folder, batch)
    difference = torch.cat(logprobs) - torch.cat(want_logprobs)
    assert 0 < difference.abs().mean() < 0.05
    for name, gradient in want_gradients.items():
        cosine = torch.cosine_similarity(gradients[name].flatten(), gradient.flatten(), dim=0)
        assert cosine > 0.98, (name, float(cosine))


def test_full_state_dict_is_what_was_loaded(tmp_path: Path, group: Ranks) -> None:
    for tied in (True, False):
        folder = build_model(tmp_path / str(tied), tied=tied)
        weights = load_policy(folder, group).full_state_dict()
        original = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        if tied:
            del original["lm_head.weight"]
        assert weights.keys() == original.keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in original.items())


def test_folders_that_cannot_be_trained_are_named(tmp_path: Path, group: Ranks) -> None:
    with pytest.raises(TrainingError, match=str(tmp_path / "nowhere")):
        load_policy(tmp_path / "nowhere", group)
    folder = build_model(tmp_path / "wider")
    config = json.loads((folder / "config.json").read_text())
    changed = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    (folder / "config.json").write_text(json.dumps({**config, **changed}))
    with pytest.raises(TrainingError, match=r"missing weights .*layers\.2"):
        load_policy(folder, group)
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(TrainingError, match=r"(?s)cannot load the model: .*num_hidden_layers"):
        load_policy(folder, group)
    sliding = build_model(tmp_path / "sliding", "qwen2")
    config = json.loads((sliding / "config.json").read_text())
    changed = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention"] * 2}
    (sliding / "config.json").write_text(json.dumps({**config, **changed}))
    with pytest.raises(TrainingError, match="sliding-window attention is not supported"):
        load_policy(sliding, group)
