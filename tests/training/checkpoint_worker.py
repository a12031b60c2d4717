"""The program of the two ranks in test_checkpoint_ranks, which spawned processes import by name."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from training_support import random_group, training_data

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.errors import TrainingError
from areal_agents.store import Store
from areal_agents.training.batches.recorded import RecordedGroups
from areal_agents.training.checkpoint.checkpoint import Checkpoints, Parts, TrainingProgress, load_checkpoint
from areal_agents.training.config import TrainerConfig
from areal_agents.training.distributed import Ranks, ranks
from areal_agents.training.model.critic import load_critic
from areal_agents.training.model.model import load_policy
from areal_agents.training.run import RunResult, run
from areal_agents.training.step.optimizer import make_optimizer, optimizer_state
from areal_agents.training.step.step import StepOptions, train_batch

OPTIONS = StepOptions(microbatch_tokens=150, share_prefixes=True, grad_clip=1.0)


def build(folder: Path, group: Ranks) -> Parts:
    """Return a policy with Muon, whose state is offloaded between steps, and a critic with AdamW."""
    config = TrainerConfig(lr=1e-2, optimizer="muon", offload="optimizer")
    policy, critic = load_policy(folder, group), load_critic(folder, group)
    plain = TrainerConfig(lr=1e-2)
    return {
        "policy": (policy, make_optimizer(policy, config)),
        "critic": (critic, make_optimizer(critic, plain)),
    }


def step(parts: Parts, group: Ranks, seed: int) -> None:
    """Take a step of the policy on samples, and a step of the critic with an arbitrary gradient."""
    policy, optimizer = parts["policy"]
    samples = random_group(np.random.default_rng(seed), group_id=str(seed))
    data = training_data(samples) if group.is_first else None
    train_batch(policy, optimizer, data, AlgorithmConfig(), OPTIONS, ranks=group, version=0, seed=seed)  # type: ignore[arg-type]
    critic, optimizer = parts["critic"]
    for parameter in critic.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    optimizer.zero_grad()


def whole(parts: Parts) -> dict[str, Tensor]:
    """Return all weights and moments of the parts, unsharded. Collective."""
    out: dict[str, Any] = {}
    for name, (module, optimizer) in parts.items():
        out |= {f"{name} {key}": value for key, value in module.state_dict().items()}
        out |= {f"{name} {key}": value for key, value in optimizer_state(module, optimizer).items()}
    return {key: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for key, v in out.items()}


def train_recorded(
    model: Path, run_dir: Path, recorded: Path, *, steps: int, first: bool = True, **settings: Any
) -> RunResult:
    """Train by SFT up to step `steps`, from the run's last checkpoint if there is one."""
    trainer = {"lr": 1e-2, "checkpoint_every": 1, "device": "cpu", "microbatch_tokens": 128, **settings}
    own = Store.open(run_dir / "store.db") if first else None
    source = Store.open(recorded) if first else None
    try:
        return run(
            TrainerConfig.model_validate({"steps": steps, **trainer}),
            AlgorithmConfig.model_validate("sft"),
            store=own,
            engines=[],
            model_path=model,
            run_dir=run_dir,
            groups=2,
            max_staleness=0,
            stop=threading.Event(),
            recorded=RecordedGroups.read(source, seed=0) if source is not None else None,
        )
    finally:
        for store in (own, source):
            if store is not None:
                store.close()


def main(rank: int, port: int, model: Path, out: Path) -> None:
    """Load a checkpoint of one rank, continue and save; load a damaged shard; take a second step of a run."""
    torch.set_num_threads(1)
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": 2,
        "RANK": rank,
        "LOCAL_RANK": rank,
    }
    os.environ.update({name: str(value) for name, value in environment.items()})
    with ranks("cpu") as group:
        parts = build(model, group)
        progress = load_checkpoint(out / "one" / "step-1", parts, group)
        loaded = whole(parts)
        step(parts, group, 1)
        stepped = whole(parts)
        checkpoints = Checkpoints(out / "two", group)
        checkpoints.save(parts, TrainingProgress(2, 2))
        step(parts, group, 2)  # while the checkpoint is being written
        checkpoints.finish()
        checkpoints.close()
        try:
            load_checkpoint(out / "damaged" / "step-1", parts, group)
            error = ""
        except TrainingError as caught:
            error = str(caught)
        result = train_recorded(model, out / "run", out / "recorded.db", steps=2, first=rank == 0)
        torch.save((progress, loaded, stepped, error, result.step), out / f"{rank}.pt")
