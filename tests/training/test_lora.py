"""Adapters: peft reads the published files and computes the same gradients, and nothing else is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_support import assert_same, build_moe, packed, reference, samples
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from training_support import build_model
from transformers import AutoModelForCausalLM
from vision_support import build_vision_model, samples_with_images

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.packing.microbatches import pack
from areal_agents.errors import TrainingError
from areal_agents.training.config import TrainerConfig
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.lora import LoraOptions, write_adapter
from areal_agents.training.model.model import ModelOptions, Policy, load_policy
from areal_agents.training.model.reference import BaseOfAdapter
from areal_agents.training.model.run_models import Models, load_models, load_reference
from areal_agents.training.step.optimizer import make_optimizer
from areal_agents.training.step.proximal_pass import release

LORA = LoraOptions(rank=3, alpha=5)


def adapted(folder: Path, group: Ranks, lora: LoraOptions = LORA) -> Policy:
    """A policy whose adapters no longer have their initial values."""
    policy = load_policy(folder, group, options=ModelOptions(lora=lora))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if ".lora_B." in name:
                parameter.to_local().normal_(0, 0.1, generator=generator)
    return policy


def peft_gradients(folder: Path, adapter: Path) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Logprobs per sample and the adapter's gradient, from peft around transformers."""
    base = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(adapter), is_trainable=True).eval()
    logprobs = []
    for sample in samples():
        logits = model(torch.from_numpy(sample.token_ids[None].astype(np.int64))).logits[0]
        at = np.flatnonzero(sample.loss_mask)
        targets = torch.from_numpy(sample.token_ids[at].astype(np.int64))
        chosen = logits[at - 1].log_softmax(-1).gather(1, targets[:, None])[:, 0]
        (chosen * torch.from_numpy(sample.advantages[at])).sum().backward()
        logprobs.append(chosen.detach())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logprobs, {name.removeprefix("base_model.model."): g for name, g in gradients.items()}


def test_a_new_adapter_changes_nothing(model_folder: Path, group: Ranks) -> None:
    policy = load_policy(model_folder, group, options=ModelOptions(lora=LORA))
    got, want = packed(policy, samples())[0], reference(model_folder, samples())[0]
    for logprobs, expected in zip(got, want, strict=True):
        torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    original = load_file(model_folder / "model.safetensors")
    weights = policy.full_state_dict()
    assert weights.keys() == original.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in original.items())
    a = [t for name, t in (policy.adapter_state_dict() or {}).items() if "lora_A" in name]
    assert all(0.5 < float(t.abs().max()) * t.shape[1] ** 0.5 <= 1 for t in a)


@pytest.mark.parametrize("tied", [True, False])
def test_logprobs_and_gradients_are_those_of_peft(tied: bool, tmp_path: Path, group: Ranks) -> None:
    folder = build_model(tmp_path / "model", tied=tied)
    policy = adapted(folder, group)
    weights = policy.adapter_state_dict()
    assert weights is not None
    write_adapter(weights, tmp_path / "adapter", LORA, base=str(folder))
    assert sorted(p.name for p in (tmp_path / "adapter").iterdir() if p.suffix != ".md") == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert_same(packed(policy, samples()), peft_gradients(folder, tmp_path / "adapter"))

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).merge_and_unload().state_dict()
    for name, tensor in policy.full_state_dict().items():
        torch.testing.assert_close(tensor, merged[name], atol=1e-6, rtol=1e-5)


def test_only_the_adapters_of_the_targets_are_trained(model_folder: Path, group: Ranks) -> None:
    for targets, count in ((LORA.targets, 7), (("q_proj", "v_proj"), 2), (r".*layers\.1.*_proj", 3.5)):
        policy = load_policy(model_folder, group, options=ModelOptions(lora=LoraOptions(targets=targets)))
        trained = [name for name, p in policy.named_parameters() if p.requires_grad]
        assert len(trained) == 2 * 2 * count and all(".lora_" in name for name in trained)
        optimizer = make_optimizer(policy, TrainerConfig(lr=1e-2))
        assert sum(len(g["params"]) for g in optimizer.param_groups) == len(trained)
    assert load_policy(model_folder, group).adapter_state_dict() is None


def test_experts_and_the_vision_tower_have_no_adapters(tmp_path: Path, group: Ranks) -> None:
    folders = build_moe(tmp_path / "experts"), build_vision_model(tmp_path / "vision")
    batches = samples(), samples_with_images()
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    for folder, batch, want in zip(
        folders, batches, (attention, {*attention, "gate_proj", "up_proj", "down_proj"}), strict=True
    ):
        policy = adapted(folder, group)
        _, gradients = packed(policy, batch)
        assert {name.split(".")[-4] for name in gradients} == want
        assert not any("visual" in name or "experts" in name for name in gradients)
        original = load_file(folder / "model.safetensors")
        weights = policy.full_state_dict()
        changed = {n.split(".")[-2] for n, t in original.items() if not torch.equal(weights[n], t)}
        assert weights.keys() == original.keys() and changed == want
    with pytest.raises(TrainingError, match="Qwen3MoeExperts, expected a linear layer"):
        lora = LoraOptions(targets=("gate_proj", "up_proj", "down_proj"))
        load_policy(folders[0], group, options=ModelOptions(lora=lora))


def test_unusable_targets_are_refused(model_folder: Path, group: Ranks) -> None:
    for targets, message in (
        (("nowhere",), "nowhere"),
        (("embed_tokens",), "expected a linear layer"),
        (("q_proj", "lm_head"), "the head cannot have an adapter"),
    ):
        with pytest.raises(TrainingError, match=rf"trainer\.lora\.targets: .*{message}"):
            load_policy(model_folder, group, options=ModelOptions(lora=LoraOptions(targets=targets)))
    with pytest.raises(ValueError, match="rank of at least 1, got 0"):
        LoraOptions(rank=0)


def test_the_reference_of_an_adapter_is_the_policy_with_the_adapter_off(
    model_folder: Path, group: Ranks
) -> None:
    policy = adapted(model_folder, group)
    (batch,) = pack(samples(), token_budget=4096)
    trained = [p.requires_grad for p in policy.parameters()]
    with torch.no_grad():
        with_adapter = policy(batch).logprobs.clone()
        off = BaseOfAdapter(policy)(batch)
        release(BaseOfAdapter(policy))
        apart = load_reference(model_folder, group)(batch)
        again = policy(batch).logprobs
    assert torch.equal(off.logprobs, apart.logprobs)
    assert torch.equal(off.entropies, apart.entropies)
    assert not torch.allclose(with_adapter, off.logprobs, atol=1e-2)
    assert torch.equal(again, with_adapter)
    assert [p.requires_grad for p in policy.parameters()] == trained


def test_a_run_that_trains_an_adapter_loads_no_separate_reference(model_folder: Path, group: Ranks) -> None:
    algorithm = AlgorithmConfig.model_validate({"kl_in": {"kind": "loss", "kl_coefficient": 0.1}})

    def load(**settings: Any) -> Models:
        config = TrainerConfig(dtype="bfloat16", activation_checkpointing="off", **settings)
        return load_models(config, algorithm, model_folder, group)

    adapter = load(lora={"rank": 3})
    assert isinstance(adapter.reference, BaseOfAdapter) and adapter.reference.policy is adapter.policy
    frozen = {p.dtype for p in adapter.policy.parameters() if not p.requires_grad}
    assert frozen == {torch.bfloat16}
    whole = load()
    assert isinstance(whole.reference, Policy)
    assert {p.dtype for p in whole.reference.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in whole.policy.parameters()} == {torch.float32}


def test_frozen_weights_have_the_compute_type_and_give_the_same_results(
    model_folder: Path, group: Ranks
) -> None:
    lora = LoraOptions(rank=3)
    (batch,) = pack(samples(), token_budget=4096)
    policy = load_policy(model_folder, group, options=ModelOptions(dtype=torch.bfloat16, lora=lora))
    types = {p.dtype for p in policy.parameters() if not p.requires_grad}
    assert types == {torch.bfloat16}
    assert {p.dtype for p in policy.parameters() if p.requires_grad} == {torch.float32}
    masters = load_policy(model_folder, group, options=ModelOptions(dtype=torch.bfloat16))
    with torch.no_grad():  # B is zero, so the adapter adds nothing
        assert torch.equal(policy(batch).logprobs, masters(batch).logprobs)
    frozen = load_reference(model_folder, group, options=ModelOptions(dtype=torch.bfloat16))
    assert {p.dtype for p in frozen.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        assert torch.equal(frozen(batch).logprobs, masters(batch).logprobs)
    whole = policy.full_state_dict()
    assert {tensor.dtype for tensor in whole.values()} == {torch.float32}
    for name, weight in masters.full_state_dict().items():
        assert torch.equal(whole[name], weight.bfloat16().float()), name
