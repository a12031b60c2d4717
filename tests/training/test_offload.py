"""With weights, gradients and optimizer state in host memory, training is the same, and nothing stays on the
device between steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from checkpoint_worker import train_recorded
from fake_ranks_worker import unsharded_gradient
from safetensors.torch import load_file
from stored_support import put_group
from training_support import episode_groups, random_group

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.packing.microbatches import pack
from areal_agents.algorithms.samples import build_training_data
from areal_agents.store import Store
from areal_agents.training.checkpoint.checkpoint import Checkpoints, TrainingProgress, load_checkpoint
from areal_agents.training.config import Offload, TrainerConfig
from areal_agents.training.distributed import Ranks
from areal_agents.training.loop import TrainingLoop
from areal_agents.training.model.run_models import Models, load_models
from areal_agents.training.publish.publisher import Publisher
from areal_agents.training.step.learner import Learner
from areal_agents.training.step.step import StepOptions, Stopped, train_batch

ROOT = Path(__file__).parents[2]
PPO = AlgorithmConfig.model_validate("ppo")


def load(folder: Path, group: Ranks, offload: Offload, *, parked: bool = False) -> Models:
    config = TrainerConfig(
        lr=1e-2, critic_lr=1e-2, weight_decay=0.1, offload=offload, dtype="float32",
        activation_checkpointing="off",
    )  # fmt: skip
    return load_models(config, PPO, folder, group, parked=parked)


def step(
    models: Models,
    group: Ranks,
    offload: Offload,
    *seeds: int,
    tokens: int = 150,
    stopping: Callable[[], bool] = lambda: False,
) -> list[float]:
    """Train on one batch for each seed; return the norms of the gradients."""
    options = StepOptions(tokens, share_prefixes=True, grad_clip=1.0, gradients_on_host=offload == "all")
    norms = []
    for seed in seeds:
        data = build_training_data(episode_groups(np.random.default_rng(seed), "ab"), PPO)
        result = train_batch(
            models.policy, models.optimizer, data, PPO, options,
            ranks=group, version=0, seed=seed, critic=models.critic, reference=models.reference,
            stopping=stopping,
        )  # fmt: skip
        norms.append(result.grad_norm)
    return norms


def weights(models: Models) -> dict[str, torch.Tensor]:
    assert models.critic is not None
    critic = {f"critic {name}": p.full_tensor() for name, p in models.critic.critic.named_parameters()}  # type: ignore[attr-defined]
    return {**models.policy.full_state_dict(), **critic}


def has_gradient(models: Models) -> bool:
    return (
        any(p.grad is not None for p in models.policy.parameters()) or unsharded_gradient(models.policy) > 0
    )


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    """Wrong moments change weights by about the learning rate, 1e-2; rounding by up to 3e-5."""
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, atol=2e-4, rtol=1e-5, msg=name)


@pytest.mark.parametrize(("saved", "resumed"), [("none", "all"), ("all", "none"), ("all", "optimizer")])
def test_policy_and_critic_train_alike_with_any_offload_before_and_after_a_checkpoint(
    model_folder: Path, tmp_path: Path, group: Ranks, saved: Offload, resumed: Offload
) -> None:
    straight, before = load(model_folder, group, "none"), load(model_folder, group, saved)
    want = step(straight, group, "none", 0, 1, 2)
    norms = step(before, group, saved, 0, 1)
    path = Checkpoints(tmp_path, group, wait=True).save(before.parts, TrainingProgress(2, 2))
    after = load(model_folder, group, resumed)
    assert load_checkpoint(path, after.parts, group) == TrainingProgress(2, 2)
    norms += step(after, group, resumed, 2)
    assert norms == pytest.approx(want, rel=1e-5)
    assert_close(weights(after), weights(straight))


def test_no_gradient_waits_on_the_device_for_the_last_micro_batch(model_folder: Path, group: Ranks) -> None:
    """Otherwise, a single rank keeps the whole gradient on the device until the last micro-batch."""
    held = {}
    for offload in ("none", "all"):
        models = load(model_folder, group, cast(Offload, offload))
        learner = Learner(models.policy, models.optimizer, group.shards, on_host=offload == "all")
        samples = random_group(np.random.default_rng(0), group_id="g")
        for micro in pack(samples, token_budget=150)[:2]:
            learner.backward(models.policy(micro).logprobs.sum(), last=False)
            held[offload] = unsharded_gradient(models.policy)
    assert held["none"] > 0
    assert held["all"] == 0


@pytest.mark.parametrize("offload", ["none", "optimizer", "all"])
def test_a_step_after_a_stop_between_micro_batches_begins_without_a_gradient(
    offload: Offload, model_folder: Path, group: Ranks
) -> None:
    straight, stopped = (load(model_folder, group, offload) for _ in range(2))
    asked: list[bool] = []

    def watch() -> bool:
        asked.append(has_gradient(straight))
        return False

    want = step(straight, group, offload, 0, tokens=70, stopping=watch)
    assert asked[-1]  # before the last micro-batch of the first minibatch
    answers = iter([False] * (len(asked) - 1) + [True])
    with pytest.raises(Stopped):
        step(stopped, group, offload, 0, tokens=70, stopping=lambda: next(answers))
    assert not has_gradient(stopped)
    assert step(stopped, group, offload, 0, tokens=70) == want
    assert_close(weights(stopped), weights(straight))


def test_a_run_can_be_resumed_with_another_offload(model_folder: Path, tmp_path: Path) -> None:
    with Store.open(tmp_path / "recorded.db") as recorded:
        for index in range(6):
            put_group(recorded, f"g{index}", [0, 1], prompt=6 + index)
    finals = []
    for name, values in (("moved", ("all", "none")), ("stayed", ("none", "none"))):
        for steps, offload in enumerate(values, 1):
            result = train_recorded(
                model_folder, tmp_path / name, tmp_path / "recorded.db", steps=steps, offload=offload
            )
        assert result.step == 2
        finals.append(load_file(tmp_path / name / "final" / "model.safetensors"))
    assert_close(finals[0], finals[1])


@pytest.mark.skipif(sys.platform != "linux", reason="finds torch's library by its name")
def test_parked_models_leave_nothing_on_a_fake_gpu(model_folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("parking_worker.py")), str(model_folder)],
        capture_output=True, text=True, timeout=280, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    host = {"weights": ["cpu"], "gathered": ["cpu"], "moments": ["cpu"]}
    device = {"weights": ["cuda"], "gathered": ["cuda"], "moments": ["cuda"]}
    for offload, found in json.loads(done.stdout):
        places, same, calls, (pinned, allocated), (trained, frozen) = found
        # with `optimizer` the step itself moves the moments to the device and back
        own = offload == "optimizer"
        fetched = {**device, "moments": ["cpu"]} if own else device
        assert places == [{**host, "moments": []}, fetched, host, fetched, host]
        assert same  # the optimizer's parameters are still the model's
        assert calls == [*(["synchronize"] if own else []), "synchronize", "empty_cache"] * 2
        assert pinned
        assert allocated == 3 * trained + frozen  # weights and moments have one buffer each, used twice


@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_models_parked_on_a_cpu_train_alike_and_are_saved_and_resumed(
    offload: Offload, model_folder: Path, tmp_path: Path, group: Ranks
) -> None:
    straight = load(model_folder, group, "none")
    parked = load(model_folder, group, offload, parked=True)
    parking = parked.parking(torch.device("cpu"))
    step(straight, group, "none", 0, 1)
    for seed in (0, 1):
        parking.fetch()
        step(parked, group, "none", seed)
        parking.park()
    assert all(torch.equal(tensor, weights(straight)[name]) for name, tensor in weights(parked).items())
    path = Checkpoints(tmp_path, group, wait=True).save(parked.parts, TrainingProgress(2, 2))
    again = load(model_folder, group, offload, parked=True)
    load_checkpoint(path, again.parts, group)
    parking = again.parking(torch.device("cpu"))
    parking.fetch()
    step(again, group, "none", 2)
    step(straight, group, "none", 2)
    assert_close(weights(again), weights(straight))


@pytest.mark.parametrize("fails", [False, True])
def test_models_are_fetched_when_engines_sleep_and_parked_before_they_wake(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    events: list[str] = []

    @contextmanager
    def asleep(kinds: Any, **together: Any) -> Iterator[None]:
        events.append("asleep")
        try:
            yield
        finally:
            events.append("awake")

    loop = object.__new__(TrainingLoop)
    loop.publisher = object.__new__(Publisher)
    monkeypatch.setattr(loop.publisher, "engines_asleep", asleep)
    loop.released = ("kv_cache",)
    loop.ranks = cast(Any, SimpleNamespace(device=torch.device("cpu")))
    loop.parking = cast(
        Any, SimpleNamespace(fetch=lambda: events.append("fetch"), park=lambda: events.append("park"))
    )
    with pytest.raises(Stopped) if fails else nullcontext(), loop._engines_asleep():
        events.append("step")
        if fails:
            raise Stopped
    assert events == ["asleep", "fetch", "step", "park", "awake"]


def test_settings_that_offload_cannot_be_combined_with_are_refused() -> None:
    with pytest.raises(ValueError, match="offload: all keeps one block at a time on a GPU"):
        TrainerConfig(offload="all", reshard="step")
    with pytest.raises(ValueError, match="offload: all takes the optimizer's step on the CPU"):
        TrainerConfig(offload="all", optimizer="muon")
