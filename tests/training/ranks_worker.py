"""What each of two ranks does in test_ranks: run by torch.multiprocessing, so importable by name."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from training_support import random_group

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.core.sample import TrainingSample
from areal_agents.inference import SGLangEngine
from areal_agents.store import Store
from areal_agents.training.checkpoint import Progress, save_checkpoint
from areal_agents.training.config import TrainerConfig
from areal_agents.training.distributed import Ranks, ranks
from areal_agents.training.model import load_policy
from areal_agents.training.optimizer import make_optimizer
from areal_agents.training.step import StepOptions, Stopped, train_batch
from areal_agents.training.trainer import run

OPTIONS = StepOptions(0.2, 0.28, 5.0, 2, 150, True, 1.0)


def samples() -> list[TrainingSample]:
    rng = np.random.default_rng(0)
    return [s for g in "abc" for s in random_group(rng, group_id=g)]


def train(folder: Path, group: Ranks) -> tuple[dict, dict[str, torch.Tensor]]:
    """Three AdamW steps of two minibatches; statistics of the last, and the weights."""
    policy = load_policy(folder, group)
    optimizer = make_optimizer(policy, TrainerConfig(lr=1e-2))
    for seed in range(3):
        result = train_batch(policy, optimizer, samples(), OPTIONS, ranks=group, version=0, seed=seed)
    # one sample: the other rank has nothing of its own, and takes part all the same
    alone = replace(OPTIONS, minibatches=1)
    train_batch(policy, optimizer, samples()[:1], alone, ranks=group, version=0, seed=3)
    return {**result.statistics.as_dict(), "grad_norm": result.grad_norm}, policy.full_state_dict()


def main(rank: int, port: int, model: str, out: str, engine_url: str) -> None:
    """Train like one rank, save a checkpoint, stop together, and run the whole loop."""
    torch.set_num_threads(1)
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": 2,
        "RANK": rank,
        "LOCAL_RANK": rank,
    }
    os.environ.update({name: str(value) for name, value in environment.items()})
    folder = Path(out)
    with ranks("cpu") as group:
        statistics, weights = train(Path(model), group)
        policy = load_policy(Path(model), group)
        optimizer = make_optimizer(policy, TrainerConfig(lr=1e-2))
        train_batch(policy, optimizer, samples(), OPTIONS, ranks=group, version=0, seed=0)
        save_checkpoint(folder / "checkpoints", policy, optimizer, Progress(1, 1), group, keep=2)
        after_one = policy.full_state_dict()
        try:
            train_batch(
                policy, optimizer, samples(), OPTIONS, ranks=group, version=0, seed=0,
                stopping=lambda: rank == 1,  # one rank's signal stops both
            )  # fmt: skip
            stopped = False
        except Stopped:
            stopped = True
        store = Store.open(folder / "run" / "store.db") if rank == 0 else None
        result = run(
            TrainerConfig(steps=2, lr=1e-2, batch_timeout_s=20, device="cpu"),
            AlgorithmConfig(),
            store=store,
            engine=SGLangEngine(engine_url) if rank == 0 else None,
            model_path=model,
            run_dir=folder / "run",
            groups=2,
            max_staleness=8,
            stop=threading.Event(),
        )
        if store is not None:
            store.close()
        torch.save(
            (statistics, weights, after_one, stopped, (result.step, result.version)), folder / f"{rank}.pt"
        )
