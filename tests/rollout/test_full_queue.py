"""If a cluster has no room for jobs, no attempt fails, no retry is used up, and the run continues."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from mode_support import slurm_job
from stand_in_slurm import StandInSlurm
from time_limits import TimeLimits

from areal_agents.rollout.agents.jobs import agent as job_agent
from areal_agents.rollout.config import DataConfig, EvalConfig, RolloutConfig
from areal_agents.rollout.runner import run
from areal_agents.rollout.worker_share import WorkerShare

ADMIN_KEY = "admin-key-of-the-tests"
LIMIT_S = 150.0
TASK = {"question": "Do I need an umbrella in Zürich?", "answer": "Take one"}
NOT_STARTED = "within 60 s (agent.job.wait_s)"  # no job was taken, or it did not start


@pytest.mark.parametrize(
    ("split", "worker"),
    [("train", None), ("eval", None), ("eval", WorkerShare(0, 1, "rollout-0", lambda name: True))],
)
async def test_a_full_queue_does_not_end_a_run(
    scripted: Any,
    slurm_programs: StandInSlurm,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    split: str,
    worker: WorkerShare | None,
) -> None:
    """A single failed attempt would use up its episode and end the run."""
    tasks = scripted.folder / "tasks.jsonl"
    tasks.write_text(json.dumps({"id": "umbrella", **TASK}))
    data = DataConfig(path=str(tasks))
    agent = slurm_job(Path(__file__).with_name("mode_program.py"), scripted.folder)
    agent["job"] |= {"wait_s": 60.0, "poll_s": 0.1}
    held = slurm_programs.folder / "held"
    held.touch()
    TimeLimits(monkeypatch, lambda: held.exists() and slurm_programs.states(), module=job_agent)
    async with asyncio.timeout(LIMIT_S), scripted.trainer(groups=1, steps=1):
        running = asyncio.create_task(
            run(
                store=scripted.store,
                proxy_url=scripted.url,
                admin_key=ADMIN_KEY,
                agent=agent,
                data=data,
                rollout=RolloutConfig(
                    groups=1, group_size=2, concurrency=2, retries=0, on_failed="drop", give_up_after=1,
                    give_up_s=0, max_staleness=0,
                ),
                evaluation=EvalConfig(data=data, concurrency=2) if split == "eval" else None,
                steps=1,
                worker=worker,
            )
        )  # fmt: skip
        while len(aborted := scripted.store.episodes(split=split, status="aborted")) < 2:
            assert not running.done(), running.result()
            await asyncio.sleep(0.02)
        held.unlink()
        await running
    assert all(NOT_STARTED in (episode.error or "") for episode in aborted)
    assert not scripted.store.episodes(status="failed") + scripted.store.episodes(status="open")
    assert scripted.store.group_counts()["trained"] == 1 and scripted.store.group_counts()["dropped"] == 0
    if split == "eval":
        scores = [episode.score for episode in scripted.store.episodes(split="eval", status="finished")]
        assert scores == [1.25, 1.25]  # before training and after it
    warned = [record.getMessage() for record in caplog.records if NOT_STARTED in record.getMessage()]
    assert warned and all("has not begun, and is tried again: " in text for text in warned)
