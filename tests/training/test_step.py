"""Training on one batch: gradients depend only on the samples, and steps may be skipped or stopped."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from presets_support import largest_difference
from torch.distributed.tensor import DTensor
from training_support import random_group, training_data

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.packing.microbatches import pack
from areal_agents.core.sample import TrainingSample
from areal_agents.training.config import Reshard, TrainerConfig
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.model import ModelOptions, Policy, load_policy
from areal_agents.training.step.optimizer import make_optimizer
from areal_agents.training.step.step import StepOptions, StepResult, Stopped, train_batch

ALGORITHM = AlgorithmConfig(clip_high=0.28)
OPTIONS = StepOptions(microbatch_tokens=4096, share_prefixes=True, grad_clip=1e9)


def samples(groups: str = "abcd", seed: int = 0) -> list[TrainingSample]:
    rng = np.random.default_rng(seed)
    return [s for g in groups for s in random_group(rng, group_id=g)]


def on_policy(policy: Policy, batch: list[TrainingSample]) -> list[TrainingSample]:
    """The samples with the policy's own logprobs as behavior logprobs."""
    out = [np.zeros(len(s), np.float32) for s in batch]
    with torch.no_grad():
        for micro in pack(batch, token_budget=10**6):
            logprobs, *_ = policy(micro)
            positions = micro.position_ids[micro.predictor_rows] + 1
            rows = zip(micro.sample_index.tolist(), positions.tolist(), logprobs.tolist(), strict=True)
            for index, position, value in rows:
                out[index][position] = value
    return [replace(s, behavior_logprobs=logprobs) for s, logprobs in zip(batch, out, strict=True)]


def step(
    folder: Path,
    group: Ranks,
    batch: list[TrainingSample],
    *,
    lr: float = 0.0,
    seed: int = 0,
    minibatches: int = 1,
    **options: object,
) -> tuple[StepResult, dict[str, torch.Tensor]]:
    """Train a new policy by SGD; return the result and the weights. lr = 1 subtracts the gradient itself."""
    policy = load_policy(folder, group)
    optimizer = torch.optim.SGD(policy.parameters(), lr=lr)
    result = train_batch(
        policy,
        optimizer,
        training_data(batch),
        several(minibatches),
        replace(OPTIONS, **options),
        ranks=group,
        version=0,
        seed=seed,
    )
    return result, policy.full_state_dict()


def several(minibatches: int) -> AlgorithmConfig:
    return ALGORITHM.model_copy(update={"minibatches": minibatches})


@pytest.mark.parametrize(
    "options",
    [
        {"microbatch_tokens": 120},
        {"microbatch_tokens": 333},
        {"share_prefixes": False},
        {"microbatch_tokens": 10**6},
    ],
)
def test_the_gradient_does_not_depend_on_the_partition(
    options: dict, model_folder: Path, group: Ranks
) -> None:
    whole, whole_weights = step(model_folder, group, samples(), lr=1.0)
    cut, cut_weights = step(model_folder, group, samples(), lr=1.0, **options)
    before = load_policy(model_folder, group).full_state_dict()
    moved = largest_difference(whole_weights, before)
    assert moved > 1e-3
    assert largest_difference(whole_weights, cut_weights) <= 1e-5 * moved + 1e-7
    assert cut.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)
    for name, value in whole.statistics.as_dict().items():
        assert cut.statistics.as_dict()[name] == pytest.approx(value, rel=1e-4, abs=1e-4), name


@pytest.mark.parametrize("minibatches", [1, 2])
def test_weights_that_stay_gathered_give_the_same_step_with_fewer_gathers(
    minibatches: int, model_folder: Path, group: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsdp = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param").FSDPParam
    gather, gathers = fsdp.to_unsharded, 0

    def counted(parameter: Any) -> Any:
        nonlocal gathers
        gathers += 1
        return gather(parameter)

    monkeypatch.setattr(fsdp, "to_unsharded", counted)
    found = {}
    both: tuple[Reshard, ...] = ("block", "step")
    for reshard in both:
        policy = load_policy(model_folder, group, options=ModelOptions(reshard=reshard))
        optimizer, gathers = torch.optim.SGD(policy.parameters(), lr=1.0), 0
        options = replace(OPTIONS, microbatch_tokens=120, reshard=reshard)
        result = train_batch(
            policy, optimizer, training_data(samples("ab")), several(minibatches), options,
            ranks=group, version=0, seed=0,
        )  # fmt: skip
        assert all(isinstance(parameter, DTensor) for parameter in policy.parameters())
        found[reshard] = gathers, policy.full_state_dict()
    (often, by_block), (seldom, by_step) = found["block"], found["step"]
    assert largest_difference(by_block, by_step) == 0
    weights = len(list(policy.parameters()))
    assert seldom == weights * minibatches  # the proximal pass shares the gathers of the first step
    assert often > 1.5 * weights * result.microbatches > seldom  # all weights except the root's, twice


@pytest.mark.parametrize("ask", [1, 100])
def test_nothing_stays_gathered_after_a_stop(ask: int, model_folder: Path, group: Ranks) -> None:
    """The stop comes in the proximal pass, or never."""
    policy, _ = stopped_at(ask, model_folder, group, reshard="step")
    assert all(isinstance(parameter, DTensor) for parameter in policy.parameters())


def test_on_policy_the_ratio_is_one_and_the_kl_zero(model_folder: Path, group: Ranks) -> None:
    policy = load_policy(model_folder, group)
    batch = on_policy(policy, samples())
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    for minibatches in (1, 2):
        result = train_batch(
            policy, optimizer, training_data(batch), several(minibatches), OPTIONS,
            ranks=group, version=0, seed=0,
        )  # fmt: skip
        values = result.statistics.as_dict()
        assert values["tokens"] == values["on_policy_tokens"] == sum(int(s.loss_mask.sum()) for s in batch)
        assert values["abs_diff_max"] < 1e-5
        assert values["weight"] == pytest.approx(values["tokens"], rel=1e-5)
        assert values["kl_k3"] == pytest.approx(0, abs=1e-6)
        assert values["clipped_low"] == values["clipped_high"] == 0
        mean_advantage = sum(float(s.advantages.sum()) for s in batch) / values["tokens"]
        assert values["loss"] / values["tokens"] == pytest.approx(-mean_advantage, abs=1e-4)


def test_one_minibatch_never_clips_and_several_do(model_folder: Path, group: Ranks) -> None:
    one, _ = step(model_folder, group, samples(), lr=3.0)
    values = one.statistics.as_dict()
    assert values["clipped_low"] + values["clipped_high"] == 0
    several, _ = step(model_folder, group, samples(), lr=3.0, minibatches=4)
    values = several.statistics.as_dict()
    assert values["clipped_low"] + values["clipped_high"] > 0
    # proximal logprobs precede the first step, so their difference from the behavior logprobs is the same
    assert values["abs_diff"] == pytest.approx(one.statistics.as_dict()["abs_diff"], rel=1e-4)


def test_naive_ppo_clips_the_ratio_to_the_behavior_policy(model_folder: Path, group: Ranks) -> None:
    """The ratio is relative to the behavior policy, so it differs from 1 and is clipped before any step."""
    policy = load_policy(model_folder, group)
    algorithm = AlgorithmConfig(clip_high=0.28, proximal="behavior", minibatches=2)
    result = train_batch(
        policy, torch.optim.SGD(policy.parameters(), lr=0.0), training_data(samples()), algorithm, OPTIONS,
        ranks=group, version=0, seed=0,
    )  # fmt: skip
    values = result.statistics.as_dict()
    assert values["weight"] == pytest.approx(values["tokens"])
    assert values["clipped_low"] + values["clipped_high"] > 0
    assert "proximal" not in result.seconds
    decoupled, _ = step(model_folder, group, samples(), minibatches=2)
    assert decoupled.statistics.as_dict()["clipped_low"] == 0 and "proximal" in decoupled.seconds


def test_each_minibatch_is_a_step_on_its_own_tokens(model_folder: Path, group: Ranks) -> None:
    """Two minibatches at learning rate 0 have the gradients of their halves, not halves of the whole."""
    result, _ = step(model_folder, group, samples("ab"), minibatches=2)
    alone = [
        step(model_folder, group, [s for s in samples("ab") if s.group_id == g])[0].grad_norm for g in "ab"
    ]
    assert result.grad_norm == pytest.approx(sum(alone) / 2, rel=1e-5)


@pytest.mark.parametrize("coefficient", [1e36, 1e39])
def test_a_gradient_that_is_not_finite_skips_the_step_and_is_counted(
    coefficient: float, model_folder: Path, group: Ranks
) -> None:
    """Only the norm of the gradients is not finite, or the gradients themselves are not."""
    overflowing = AlgorithmConfig(entropy_coefficient=coefficient)
    policy = load_policy(model_folder, group)
    optimizer = make_optimizer(policy, TrainerConfig(lr=0.1))
    before = policy.full_state_dict()
    data = training_data(samples())
    bad = train_batch(
        policy, optimizer, data, overflowing, OPTIONS, ranks=group, version=0, seed=0
    )  # fmt: skip
    assert bad.skipped_steps == 1 and np.isnan(bad.grad_norm)
    assert largest_difference(policy.full_state_dict(), before) == 0
    assert all(p.grad is None for p in policy.parameters())
    good = train_batch(policy, optimizer, data, ALGORITHM, OPTIONS, ranks=group, version=0, seed=0)
    assert good.skipped_steps == 0 and largest_difference(policy.full_state_dict(), before) > 0


def test_the_gradient_is_clipped_to_the_maximum_norm(model_folder: Path, group: Ranks) -> None:
    free, free_weights = step(model_folder, group, samples(), lr=1.0)
    clipped, clipped_weights = step(model_folder, group, samples(), lr=1.0, grad_clip=free.grad_norm / 4)
    before = load_policy(model_folder, group).full_state_dict()
    assert clipped.grad_norm == pytest.approx(free.grad_norm)
    for name in before:
        quarter = (free_weights[name] - before[name]) / 4
        torch.testing.assert_close(clipped_weights[name] - before[name], quarter, atol=1e-6, rtol=1e-3)


def stopped_at(
    ask: int, model_folder: Path, group: Ranks, *, reshard: Reshard = "block"
) -> tuple[Policy, bool]:
    """Train two minibatches by SGD, with a stop requested from check number `ask` on. Return the policy and
    whether the stop ended the training."""
    policy = load_policy(model_folder, group, options=ModelOptions(reshard=reshard))
    asked = iter(range(100))
    try:
        train_batch(
            policy,
            torch.optim.SGD(policy.parameters(), lr=1.0),
            training_data(samples()),
            several(2),
            replace(OPTIONS, microbatch_tokens=130, reshard=reshard),
            ranks=group,
            version=0,
            seed=0,
            stopping=lambda: next(asked) >= ask,
        )
    except Stopped:
        return policy, True
    return policy, False


def test_a_stop_ends_between_micro_batches_before_the_first_step(model_folder: Path, group: Ranks) -> None:
    """A stop may come in the proximal pass or at a micro-batch; after its first step a batch is completed."""
    whole, _ = step(model_folder, group, samples(), minibatches=2, microbatch_tokens=130)
    before = load_policy(model_folder, group).full_state_dict()
    for ask in (0, 1, whole.microbatches):
        policy, ended = stopped_at(ask, model_folder, group)
        assert ended and all(isinstance(parameter, DTensor) for parameter in policy.parameters())
        assert largest_difference(policy.full_state_dict(), before) == 0
    finished, ended = stopped_at(1000, model_folder, group)
    assert not ended
    first_step = whole.microbatches + whole.microbatches // 2 + 1  # certainly in the second minibatch
    policy, ended = stopped_at(first_step, model_folder, group)
    assert not ended
    assert largest_difference(policy.full_state_dict(), finished.full_state_dict()) == 0


def test_the_cost_of_a_step_is_reported(model_folder: Path, group: Ranks) -> None:
    result, _ = step(model_folder, group, samples("a"), microbatch_tokens=200)
    assert result.sample_tokens - result.model_tokens >= 3 * 70
    assert result.microbatches == 1 and result.packing_fill == result.model_tokens / 200
    assert result.rank_tokens == (result.model_tokens,) and result.rank_imbalance == 0
    assert result.seconds.keys() == {"pack", "credit", "gradient", "optimizer"}
    assert all(seconds > 0 for seconds in result.seconds.values())
    several_steps, _ = step(model_folder, group, samples("a"), minibatches=2)
    assert "proximal" in several_steps.seconds
    # with one minibatch, a step costs 3 forward passes; a proximal pass would be one more
    alone, _ = step(model_folder, group, samples("a")[:1])
    (only,) = pack(samples("a")[:1], token_budget=4096)
    assert alone.flops == 3 * only.forward_flops(load_policy(model_folder, group).shape)


def test_a_batch_without_samples_is_an_error(model_folder: Path, group: Ranks) -> None:
    with pytest.raises(ValueError, match="expected at least one sample"):
        step(model_folder, group, [])
