"""Exactly once, whenever a trainer dies: kill -9 between any two writes of a step, and resume.

Whatever the moment, the run ends with the very weights of one that nobody disturbed: no group was lost,
none was trained twice, and none in another order.
"""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import os
import shutil
import signal
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from training_support import put_back, record_groups

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.inference import SGLangEngine
from areal_agents.store import Store
from areal_agents.training import run as trainer
from areal_agents.training.checkpoint import checkpoint
from areal_agents.training.config import TrainerConfig
from areal_agents.training.publish.config import PublishConfig
from areal_agents.training.publish.publisher import Publisher

STEPS, GROUPS = 3, 2

# In step 2: (what is called, whether it dies before or after it, at which call). The first version is
# published before step 1, and the checkpoint of step 1 is there.
POINTS: dict[str, tuple[type | Any, str, str, int]] = {
    "after leasing": (Store, "lease_group_ids", "after", 2),
    "after leasing a group again": (Store, "lease_replays", "after", 2),
    "between the optimizer's step and the weights": (Publisher, "publish", "before", 3),
    "between the weights and their row": (Store, "publish_version", "before", 3),
    "between the row and the swap": (Store, "publish_version", "after", 3),
    "between the swap and the mark": (Store, "mark_trained", "before", 2),
    "between the mark and the checkpoint": (checkpoint.Checkpoints, "save", "before", 2),
    "before the checkpoint has its name": (checkpoint, "sizes_and_sums", "after", 2),
    "between the checkpoint and its row": (Store, "commit_checkpoint", "before", 2),
    "after the checkpoint": (Store, "commit_checkpoint", "after", 2),
}


@dataclass(frozen=True)
class Recorded:
    """Groups in a store, the model they are of, and a running engine."""

    run_dir: Path
    model: Path
    engine_url: str


@dataclass(frozen=True)
class Ended:
    """What a run ended with."""

    weights: dict[str, torch.Tensor]
    trained: list[tuple[str, int, int]]


@pytest.fixture(scope="module")
def recorded(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, running_engine_url: str
) -> Recorded:
    run_dir = tmp_path_factory.mktemp("recorded") / "run"
    asyncio.run(put_back(running_engine_url, model_folder))
    with Store.open(run_dir / "store.db") as store:
        record_groups(store, running_engine_url, ["a", "b", "c", "d", "e", "f"])
    return Recorded(run_dir, model_folder, running_engine_url)


@pytest.fixture(scope="module")
def undisturbed(recorded: Recorded, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    shutil.copytree(recorded.run_dir, run_dir)
    train(run_dir, recorded.model, recorded.engine_url)
    return ended(run_dir)


def train(run_dir: Path, model: Path, engine_url: str) -> None:
    """Begin or resume, and train to the end."""
    with Store.open(run_dir / "store.db") as store:
        trainer.run(
            TrainerConfig(
                steps=STEPS,
                lr=1e-2,
                checkpoint_every=1,
                batch_timeout_s=30,
                threads=1,
                trackers=(),
                async_checkpoints=False,  # so that a death has one outcome
                publish=PublishConfig(verify="off"),
            ),
            AlgorithmConfig(replay="recent", replay_groups=1),
            store=store,
            engines=[SGLangEngine(engine_url, control_timeout_s=30)],
            model_path=model,
            run_dir=run_dir,
            groups=GROUPS,
            max_staleness=STEPS - 1,  # the last step trains at the bound
            stop=threading.Event(),
        )


def train_until_killed(point: str, run_dir: Path, model: Path, engine_url: str) -> None:
    """In a process of its own: train, and die at a point."""
    owner, name, when, calls = POINTS[point]
    setattr(owner, name, dying(getattr(owner, name), when, calls))
    train(run_dir, model, engine_url)


def dying(function: Callable[..., Any], when: str, calls: int) -> Callable[..., Any]:
    """The function, whose n-th call kills the process."""
    seen = 0

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == calls and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*arguments, **named)
        if seen == calls:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return call


def ended(run_dir: Path) -> Ended:
    trained = rows(run_dir, "SELECT group_id, use, step FROM leases WHERE state = 'trained' ORDER BY 1, 2")
    return Ended(load_file(run_dir / "final" / "model.safetensors"), trained)


def rows(run_dir: Path, query: str) -> list[Any]:
    with sqlite3.connect(run_dir / "store.db") as connection:
        return connection.execute(query).fetchall()


@pytest.mark.parametrize("point", POINTS)
def test_a_death_at_any_point_changes_nothing(
    point: str, recorded: Recorded, undisturbed: Ended, run_dir: Path
) -> None:
    shutil.copytree(recorded.run_dir, run_dir)
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["areal_agents.training.run"])
    arguments = (point, run_dir, recorded.model, recorded.engine_url)
    killed = processes.Process(target=train_until_killed, args=arguments)
    killed.start()
    killed.join(120)
    assert killed.exitcode == -signal.SIGKILL
    published = rows(run_dir, "SELECT MAX(version) FROM versions")[0][0]
    train(run_dir, recorded.model, recorded.engine_url)
    end = ended(run_dir)
    assert end.trained == undisturbed.trained
    for name, weight in undisturbed.weights.items():
        assert torch.equal(end.weights[name], weight), name
    versions = rows(run_dir, "SELECT version, step FROM versions ORDER BY rowid")
    assert [version for version, _ in versions] == list(range(len(versions)))
    resumed = next(step for version, step in versions if version == published + 1)
    assert resumed == (2 if point in ("between the checkpoint and its row", "after the checkpoint") else 1)
    assert not list((run_dir / "checkpoints").glob(".*")) and not list((run_dir / "weights").glob(".*"))
