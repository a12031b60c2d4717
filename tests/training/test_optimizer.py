"""Learning-rate schedules, Muon's step by its definition, and optimizer state in host memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from areal_agents.training.config import TrainerConfig
from areal_agents.training.step.learner import rate_factor, set_learning_rate
from areal_agents.training.step.optimizer import (
    JointOptimizer,
    empty_state,
    load_optimizer_state,
    make_optimizer,
    optimizer_state,
)


def rates(**options: Any) -> list[float]:
    config = TrainerConfig(steps=6, **options)
    return [rate_factor(step, config) for step in range(6)]


def test_schedules_by_hand() -> None:
    assert rates() == [1.0] * 6
    assert rates(warmup_steps=2) == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert rates(schedule="linear") == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.0])
    assert rates(schedule="linear", warmup_steps=2, min_lr_ratio=0.1) == pytest.approx(
        [0.5, 1.0, 1.0, 0.7, 0.4, 0.1]
    )
    cosine = rates(schedule="cosine", warmup_steps=1)
    assert cosine == pytest.approx([1.0, 1.0, 0.853553, 0.5, 0.146447, 0.0], abs=1e-6)


def test_a_warmup_as_long_as_the_run_is_only_warmup() -> None:
    assert rates(schedule="linear", warmup_steps=6) == pytest.approx([n / 6 for n in range(1, 7)])


def test_weight_decay_is_for_matrices_only_and_the_learning_rate_for_all() -> None:
    optimizer = make_optimizer(nn.Linear(3, 2), TrainerConfig(lr=0.1, weight_decay=0.01))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


class Tiny(nn.Module):
    """A model with the parameter names of a decoder: an embedding, two blocks, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.LayerNorm(4)
        self.lm_head = nn.Linear(4, 8, bias=False)

    def step(self, optimizer: torch.optim.Optimizer, count: int) -> dict[str, torch.Tensor]:
        """Train for `count` steps; return a copy of the weights."""
        ids = torch.arange(8, device=self.lm_head.weight.device)
        for _ in range(count):
            x = self.embed_tokens(ids)
            for layer in self.layers:
                x = x + torch.tanh(layer(x))
            nn.functional.cross_entropy(self.lm_head(self.norm(x)), ids).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: p.detach().clone() for name, p in self.named_parameters()}


def test_muon_optimizes_only_the_matrices_of_the_blocks() -> None:
    model = Tiny()
    optimizer = make_optimizer(model, TrainerConfig(optimizer="muon", lr=0.01))
    model.step(optimizer, 1)
    moments: dict[str, set[str]] = {}
    for key in optimizer_state(model, optimizer):
        moments.setdefault(key.split("/")[0], set()).add(key.split("/")[1])
    blocks = {name for name, kinds in moments.items() if kinds == {"momentum_buffer"}}
    assert blocks == {"layers.0.weight", "layers.1.weight"}
    assert moments["embed_tokens.weight"] == {"step", "exp_avg", "exp_avg_sq"}
    assert moments.keys() == dict(model.named_parameters()).keys()


def test_muons_step_is_nearly_orthogonal_and_has_adamws_size() -> None:
    """The step is U·Vᵀ of the gradient's singular vectors times lr · 0.2 · √max(rows, columns). It is not
    exact: the five Newton–Schulz iterations leave singular values between about 0.7 and 1.2."""
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(6, 3, bias=False)])})
    (weight,) = model.parameters()
    optimizer = make_optimizer(model, TrainerConfig(optimizer="muon", lr=0.5))
    before = weight.detach().clone()
    torch.manual_seed(1)
    weight.grad = torch.randn(3, 6)
    u, _, v = torch.linalg.svd(weight.grad.double(), full_matrices=False)
    optimizer.step()
    update = (before - weight.detach()).double() / (0.5 * 0.2 * math.sqrt(6))
    singular = torch.linalg.svdvals(update)
    assert singular.min() > 0.6 and singular.max() < 1.3
    assert float((update * (u @ v)).sum() / (update.norm() * (u @ v).norm())) > 0.97


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_offloaded_state_changes_no_weight_and_is_stepped_block_by_block(name: Any) -> None:
    here, away = Tiny(), Tiny()
    config = TrainerConfig(optimizer=name, lr=0.01, weight_decay=0.1)
    there = make_optimizer(away, config.model_copy(update={"offload": "optimizer"}))
    want, got = here.step(make_optimizer(here, config), 3), away.step(there, 3)
    assert all(torch.equal(got[key], want[key]) for key in want)
    assert isinstance(there, JointOptimizer)
    assert {v.device.type for v in optimizer_state(away, there).values()} == {"cpu"}
    assert len(there.state) == len(list(away.parameters()))
    assert len(there.parts) >= 3  # two blocks and the rest: one of them is on the device at a time
    set_learning_rate(there, 0.0)
    before = {key: value.clone() for key, value in got.items()}
    after = away.step(there, 1)
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_the_step_on_a_gpu_is_fused_even_if_the_weights_are_in_host_memory_before_it() -> None:
    for device, fused in (("cuda", True), ("cpu", None)):
        parked = make_optimizer(Tiny(), TrainerConfig(), device=torch.device(device))
        assert [group["fused"] for group in parked.param_groups] == [fused, fused]


def test_the_fused_step_of_a_resumed_run_finds_its_counters_on_the_device() -> None:
    """A meta tensor takes the place of one on a GPU."""
    with torch.device("meta"):
        module = nn.Linear(4, 3, bias=False)
    optimizer = make_optimizer(module, TrainerConfig(), device=torch.device("cuda"))
    shapes = {"weight/step": (), "weight/exp_avg": (3, 4), "weight/exp_avg_sq": (3, 4)}
    load_optimizer_state(module, optimizer, empty_state(module, optimizer, shapes))
    assert optimizer_state(module, optimizer)["weight/step"].device.type == "cpu"
    module.weight.grad = torch.empty_like(module.weight)
    optimizer.step()
    assert optimizer_state(module, optimizer)["weight/step"].device == module.weight.device


@pytest.mark.gpu
def test_a_resumed_step_on_a_gpu_equals_that_of_an_uninterrupted_run() -> None:
    straight, resumed = Tiny().cuda(), Tiny().cuda()
    config = TrainerConfig(lr=0.01)
    want = straight.step(make_optimizer(straight, config), 2)
    first = make_optimizer(resumed, config)
    resumed.step(first, 1)
    saved = {key: value.cpu() for key, value in optimizer_state(resumed, first).items()}
    second = make_optimizer(resumed, config)
    loaded = empty_state(resumed, second, {key: value.shape for key, value in saved.items()})
    for key, value in saved.items():
        loaded[key].copy_(value)
    load_optimizer_state(resumed, second, loaded)
    got = resumed.step(second, 1)
    assert all(torch.equal(got[key], want[key]) for key in want)
