"""Exactly-once training: the trainer is killed by SIGKILL between any two writes of a step, and resumed.

Wherever it was killed, the run ends with exactly the weights of an undisturbed run: no group is lost, none
is trained twice, and they are trained in the same order.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
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
from storage_support import Site
from training_support import put_back, record_groups

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.inference import SGLangEngine
from areal_agents.object_storage.location import Location
from areal_agents.store import Store
from areal_agents.training import run as trainer
from areal_agents.training.checkpoint import checkpoint
from areal_agents.training.config import TrainerConfig
from areal_agents.training.model import folder
from areal_agents.training.publish.config import PublishConfig
from areal_agents.training.publish.direct_folders import DirectFolders
from areal_agents.training.publish.publisher import Publisher
from areal_agents.training.records import writer
from areal_agents.training.records.files import read_records

STEPS, GROUPS = 3, 2

# Points in step 2: (the owner of a function, its name, whether the process is killed before or after a call,
# and at which call). The first version is published before step 1, and the checkpoint of step 1 exists.
POINTS: dict[str, tuple[type | Any, str, str, int]] = {
    "after leasing": (Store, "lease_group_ids", "after", 2),
    "after leasing a group again": (Store, "lease_replays", "after", 2),
    "between the optimizer's step and the weights": (Publisher, "publish", "before", 3),
    "between the weights and their row": (Store, "publish_version", "before", 3),
    "between the row and the swap": (Store, "publish_version", "after", 3),
    "between the swap and the mark": (Store, "mark_trained", "before", 2),
    "before the tokens are written": (writer, "write_rows", "before", 2),
    "between the mark and the checkpoint": (checkpoint.Checkpoints, "save", "before", 2),
    "before the checkpoint has its name": (checkpoint, "sizes_and_sums", "after", 2),
    "between the checkpoint and its row": (Store, "commit_checkpoint", "before", 2),
    "after the checkpoint": (Store, "commit_checkpoint", "after", 2),
}


# The same with a transport that first sends the weights, and then writes the folder of the third version.
DIRECT_POINTS: dict[str, tuple[type | Any, str, str, int]] = {
    "between the row and the weights": (Store, "publish_version", "after", 3),
    "between the weights and the swap": (SGLangEngine, "end_weight_update", "before", 3),
    "between the swap and going on": (SGLangEngine, "end_weight_update", "after", 3),
    "between the swap and the folder": (DirectFolders, "start", "before", 3),
    "between the folder and the mark": (DirectFolders, "start", "after", 3),
    "before the folder has its name": (folder.ModelFolder, "finish", "before", 3),
    "between the folder and its row": (Store, "mark_folder_written", "before", 3),
}
# The same with an object storage, from which the engine fetches versions by itself.
STORAGE_POINTS: dict[str, tuple[type | Any, str, str, int]] = {
    "between the weights and the manifest": (Location, "write", "before", 3),
    "between the manifest and the row": (Store, "publish_version", "before", 3),
    "between the row and the engine": (Store, "publish_version", "after", 3),
}
BEHIND = (
    "before the folder has its name",
    "between the folder and its row",
    "between the folder and the mark",
)


@dataclass(frozen=True)
class Recorded:
    """A run folder whose store has groups, the model that sampled them, and a running engine."""

    run_dir: Path
    model: Path
    engine_url: str


@dataclass(frozen=True)
class Ended:
    """The results of a run."""

    weights: dict[str, torch.Tensor]
    trained: list[tuple[str, int, int]]
    tokens: list[dict[str, Any]]  # the records of all steps, without the versions


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


def train(run_dir: Path, model: Path, engine_url: str, transport: str = "disk") -> None:
    """Start or resume a run, and train until it ends."""
    location = f"file://{run_dir.parent}/bucket" if transport == "object_storage" else ""
    with Store.open(run_dir / "store.db") as store:
        trainer.run(
            TrainerConfig(
                steps=STEPS,
                lr=1e-2,
                checkpoint_every=1,
                batch_timeout_s=30,
                threads=1,
                trackers=(),
                async_checkpoints=False,  # so that a kill has only one outcome
                publish=PublishConfig(verify="off", transport=transport, location=location),
            ),
            AlgorithmConfig(replay="recent", replay_groups=1),
            store=store,
            engines=[] if location else [SGLangEngine(engine_url, control_timeout_s=30)],
            engines_elsewhere=1 if location else 0,
            model_path=model,
            run_dir=run_dir,
            groups=GROUPS,
            max_staleness=STEPS - 1,  # the last step trains at the staleness bound
            stop=threading.Event(),
        )


def train_until_killed(point: str, run_dir: Path, model: Path, engine_url: str, transport: str) -> None:
    """Train in a separate process that is killed at a point."""
    points = {"disk": POINTS, "object_storage": STORAGE_POINTS}.get(transport, DIRECT_POINTS)
    owner, name, when, calls = points[point]
    call = getattr(owner, name)
    dies = dying_coroutine if inspect.iscoroutinefunction(call) else dying
    setattr(owner, name, dies(call, when, calls))
    train(run_dir, model, engine_url, transport)


def dying(function: Callable[..., Any], when: str, calls: int) -> Callable[..., Any]:
    """Return the function, wrapped to kill the process before or after call number `calls`."""
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


def dying_coroutine(function: Callable[..., Any], when: str, calls: int) -> Callable[..., Any]:
    """Return the same as `dying` for a coroutine function."""
    seen = 0

    async def call(*arguments: Any, **named: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == calls and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = await function(*arguments, **named)
        if seen == calls:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return call


def kill_in_training(
    point: str, run_dir: Path, model: Path, engine_url: str, transport: str = "disk"
) -> None:
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["areal_agents.training.run"])
    arguments = (point, run_dir, model, engine_url, transport)
    killed = processes.Process(target=train_until_killed, args=arguments)
    killed.start()
    try:
        killed.join(120)
        assert killed.exitcode == -signal.SIGKILL
    finally:
        killed.kill()
        killed.join()


def ended(run_dir: Path) -> Ended:
    trained = rows(run_dir, "SELECT group_id, use, step FROM leases WHERE state = 'trained' ORDER BY 1, 2")
    tokens = [{**record.as_dict(), "version": None} for record in read_records(run_dir)]
    return Ended(load_file(run_dir / "final" / "model.safetensors"), trained, tokens)


def rows(run_dir: Path, query: str) -> list[Any]:
    with sqlite3.connect(run_dir / "store.db") as connection:
        return connection.execute(query).fetchall()


def resume(run_dir: Path, recorded: Recorded, undisturbed: Ended, transport: str = "disk") -> int:
    """Train until the run ends, compare it with the undisturbed run, and return the step it resumed from."""
    published = rows(run_dir, "SELECT MAX(version) FROM versions")[0][0]
    train(run_dir, recorded.model, recorded.engine_url, transport)
    end = ended(run_dir)
    assert end.trained == undisturbed.trained
    assert end.tokens == undisturbed.tokens and {row["step"] for row in end.tokens} == set(
        range(1, STEPS + 1)
    )
    for name, weight in undisturbed.weights.items():
        assert torch.equal(end.weights[name], weight), name
    versions = rows(run_dir, "SELECT version, step FROM versions ORDER BY rowid")
    assert [version for version, _ in versions] == list(range(len(versions)))
    return int(next(step for version, step in versions if version == published + 1))


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_any_point_does_not_change_the_result(
    point: str, recorded: Recorded, undisturbed: Ended, run_dir: Path
) -> None:
    shutil.copytree(recorded.run_dir, run_dir)
    kill_in_training(point, run_dir, recorded.model, recorded.engine_url)
    resumed = resume(run_dir, recorded, undisturbed)
    assert resumed == (2 if point in ("between the checkpoint and its row", "after the checkpoint") else 1)
    assert not list((run_dir / "checkpoints").glob(".*")) and not list((run_dir / "weights").glob(".*"))


@pytest.mark.parametrize("point", DIRECT_POINTS)
def test_a_kill_does_not_change_the_result_if_weights_are_sent_before_the_folder(
    point: str, recorded: Recorded, undisturbed: Ended, run_dir: Path
) -> None:
    shutil.copytree(recorded.run_dir, run_dir)
    kill_in_training(point, run_dir, recorded.model, recorded.engine_url, "tensor")
    served = asyncio.run(served_version(recorded.engine_url))
    ((version, path, pending),) = rows(
        run_dir, "SELECT version, path, folder_pending FROM versions ORDER BY version DESC LIMIT 1"
    )
    assert served <= version == 2  # the version is recorded before any engine has the weights
    assert pending or Path(path, "model.safetensors").is_file()
    resumed = resume(run_dir, recorded, undisturbed, "tensor")
    assert resumed == 1 or point in BEHIND  # the step may reach its checkpoint while the folder is written
    assert not list((run_dir / "weights").glob(".*"))
    ((path, pending),) = rows(
        run_dir, "SELECT path, folder_pending FROM versions ORDER BY version DESC LIMIT 1"
    )
    assert pending is None
    last = load_file(Path(path, "model.safetensors"))
    assert all(torch.equal(last[name], weight) for name, weight in undisturbed.weights.items())


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(point, marks=() if point == "between the manifest and the row" else pytest.mark.slow)
        for point in STORAGE_POINTS
    ],
)
def test_a_kill_does_not_change_the_result_with_an_object_storage(
    point: str, recorded: Recorded, undisturbed: Ended, run_dir: Path
) -> None:
    shutil.copytree(recorded.run_dir, run_dir)
    with Store.open(run_dir / "store.db") as store:
        site = Site(run_dir.parent, store, recorded.model)
        with site.fetcher(recorded.engine_url):
            kill_in_training(point, run_dir, recorded.model, recorded.engine_url, "object_storage")
            published = store.max_version()
            assert published == (2 if point == "between the row and the engine" else 1)
            assert site.stored(2).is_dir()
            assert resume(run_dir, recorded, undisturbed, "object_storage") == 1
            last = store.max_version()
            assert site.wait(lambda weights: weights.version == last)
        newest = site.stored(last)
        assert newest.name == max(path.name for path in newest.parent.iterdir())
    assert not list((run_dir / "weights").glob(".*")) and not list(site.engine_folder.glob(".*"))
    served = load_file(site.engine_folder / f"v{last}" / "model.safetensors")
    assert all(torch.equal(served[name], weight) for name, weight in undisturbed.weights.items())


async def served_version(engine_url: str) -> int:
    async with SGLangEngine(engine_url) as engine:
        return (await engine.model_info()).version
