"""The policy's logprobs and gradients from packed micro-batches, and an oracle for both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from training_support import VOCAB, random_group
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from areal_agents.algorithms.packing.microbatches import pack
from areal_agents.core.sample import TrainingSample
from areal_agents.training.model.model import Policy
from areal_agents.training.model.sharding import local_rows

EXPERTS, CHOSEN = 6, 2


def build_moe(path: Path) -> Path:
    """Write a random Qwen3-MoE with a dense block between two blocks with experts."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=3,
        mlp_only_layers=[1],
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        norm_topk_prob=True,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.15,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def build_wide(path: Path) -> Path:
    """Write a random Qwen3 whose rows can be packed in blocks of 64 weights."""
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, initializer_range=0.15,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def set_adapters(policy: Policy) -> None:
    """Set all adapters to random values that do not depend on the number of ranks."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if ".lora_" in name:
                whole = 0.1 * torch.randn(parameter.shape, generator=generator)
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                local.copy_(whole[local_rows(parameter)])


def samples(seed: int = 0, temperature: float = 1.0) -> list[TrainingSample]:
    rng = np.random.default_rng(seed)
    return [s for g in "abc" for s in random_group(rng, group_id=g, temperature=temperature)]


def reference(
    folder: Path, batch: Sequence[TrainingSample], *, change: Callable[[nn.Module], None] = lambda model: None
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the logprobs of the trained tokens of each sample, and the gradient of Σ advantage · logprob.

    They are computed by transformers' eager attention, one unpadded sequence at a time, after `change` was
    applied to the model.
    """
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    change(model)
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
    """Return what `reference` returns, computed by the policy from packed micro-batches."""
    by_sample: dict[int, list[float]] = {i: [] for i in range(len(batch))}
    for micro in pack(batch, **{"token_budget": 4096, **options}):  # type: ignore[arg-type]
        chosen, *_ = policy(micro)
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
