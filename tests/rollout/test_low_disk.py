"""While disk space is low no group is submitted, and running groups are finished; then submission resumes."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from areal_agents.rollout.config import DataConfig, RolloutConfig
from areal_agents.rollout.runner import run

AGENT = f"{Path(__file__).parent / 'rollout_agents.py'}:good"
STEPS, LOOKS = 3, 2


class Disk:
    """A disk that is low on space from the first step until its space has been checked LOOKS times."""

    def __init__(self) -> None:
        self.is_low = False
        self.looks = 0

    def shortage(self) -> str | None:
        self.looks += self.is_low
        if self.looks > LOOKS:
            self.is_low = False
        return "the disk is full" if self.is_low else None


async def test_submission_stops_while_disk_space_is_low_and_then_resumes(
    served: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="areal_agents.rollout.groups.submission")
    disk, submitted = Disk(), []
    tasks = served.folder / "tasks.jsonl"
    tasks.write_text("\n".join(json.dumps({"id": f"t{n}", "n": n}) for n in range(9)))

    def seen(step: int) -> None:
        disk.is_low = disk.is_low or step == 1
        submitted.append(sum(served.store.group_counts().values()))

    async with served.trainer(groups=1, steps=STEPS, seen=seen), asyncio.timeout(60):
        await run(
            store=served.store,
            proxy_url=served.url,
            admin_key="admin-key-of-the-tests",
            agent=AGENT,
            data=DataConfig(path=str(tasks)),
            rollout=RolloutConfig(groups=1, group_size=2, max_staleness=0, concurrency=2),
            evaluation=None,
            steps=STEPS,
            shortage=disk.shortage,
        )
    assert disk.looks == LOOKS + 1 and submitted == [1, 2, 3]
    assert served.store.group_counts()["trained"] == STEPS
    said = [r.getMessage() for r in caplog.records if r.name.endswith("submission")]
    assert said == ["the disk is full", "the shortage has ended; groups are submitted again"]
