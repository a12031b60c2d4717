"""After kill -9 of a trainer and a resume, no group was trained twice and no version number used twice."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import torch
import trainer_worker
from safetensors.torch import load_file
from store_queries import latest_checkpoint
from training_support import record_groups

import areal_agents
from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.inference import SGLangEngine
from areal_agents.store import Store
from areal_agents.training.checkpoint.checkpoint import load_checkpoint
from areal_agents.training.config import TrainerConfig
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.model import load_policy
from areal_agents.training.run import RunResult, run
from areal_agents.training.step.optimizer import make_optimizer


def rows(run_dir: Path, query: str) -> list[tuple]:
    with sqlite3.connect(run_dir / "store.db") as connection:
        return connection.execute(query).fetchall()


def kill_after_version(version: int, store: Store, run_dir: Path, model: Path, engine_url: str) -> None:
    """Start a trainer, and kill it as soon as the store has a version and a checkpoint."""
    packages = f"{Path(areal_agents.__path__[0]).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, trainer_worker.__file__, str(run_dir), str(model), engine_url, "5"]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": packages}) as trainer:
        try:
            deadline = time.monotonic() + 120
            while store.max_version() < version or latest_checkpoint(store) is None:
                assert trainer.poll() is None, "the trainer ended by itself"
                assert time.monotonic() < deadline
                store.wait(store.cursor(), 0.05)
        finally:
            trainer.send_signal(signal.SIGKILL)


def test_a_killed_trainer_resumes_from_its_checkpoint(
    store: Store, engine_url: str, model_folder: Path, run_dir: Path, group: Ranks
) -> None:
    record_groups(store, engine_url, ["a", "b", "c", "d", "e", "f"])
    kill_after_version(3, store, run_dir, model_folder, engine_url)

    async def leave_paused() -> None:  # as if the trainer died between pause and resume
        async with SGLangEngine(engine_url) as engine:
            await engine.pause("retract")

    asyncio.run(leave_paused())
    lost = store.max_version()
    (checkpoint,) = (run_dir / "checkpoints").glob("step-*")
    assert checkpoint.name == "step-2"
    policy = load_policy(model_folder, group)
    load_checkpoint(checkpoint, {"policy": (policy, make_optimizer(policy, TrainerConfig()))}, group)
    checkpointed = policy.full_state_dict()

    def finish(steps: int) -> RunResult:
        return run(
            TrainerConfig(steps=steps, lr=1e-2, checkpoint_every=2, batch_timeout_s=20),
            AlgorithmConfig(),
            store=store,
            engines=[SGLangEngine(engine_url, control_timeout_s=20)],
            model_path=model_folder,
            run_dir=run_dir,
            groups=2,
            max_staleness=20,
            stop=threading.Event(),
        )

    assert finish(2) == RunResult(2, lost + 1, finished=True)  # only publishes the checkpoint again
    published = load_file(run_dir / "weights" / f"v{lost + 1}" / "model.safetensors")
    assert all(torch.equal(published[name], checkpointed[name]) for name in published)
    record_groups(store, engine_url, ["g", "h", "i", "j"])  # the engine runs again, with the new version
    assert finish(5) == RunResult(5, lost + 5, finished=True)

    trained = rows(run_dir, "select group_id, step, version from leases where state = 'trained'")
    assert Counter(step for _, step, _ in trained) == {step: 2 for step in range(1, 6)}
    assert len({group_id for group_id, *_ in trained}) == 10
    # steps 1 and 2 keep the versions under which they were published, and the others were trained again
    assert {(step, version) for _, step, version in trained} == {
        (1, 1), (2, 2), (3, lost + 3), (4, lost + 4), (5, lost + 5),
    }  # fmt: skip
    versions = [version for (version,) in rows(run_dir, "select version from versions order by published_at")]
    assert versions == list(range(lost + 6))
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
