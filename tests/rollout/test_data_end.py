"""A run whose data ends before the last batch is complete ends at once, in every loop."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.errors import DataError
from areal_agents.rollout.config import DataConfig, RolloutConfig
from areal_agents.rollout.data import load_tasks
from areal_agents.rollout.runner import end_of_data, run
from areal_agents.training.batches.checks import SampleLimits
from areal_agents.training.batches.leasing import next_batch
from areal_agents.training.batches.source import wait_until_whole

AGENTS = Path(__file__).parent / "rollout_agents.py"
GROUPS, STEPS = 2, 2


def exact_data(folder: Path) -> DataConfig:
    """Write as many tasks as the run needs, of which the last one always fails."""
    data = DataConfig(path=str(folder / "tasks.jsonl"), epochs=1)

    def write(bad: str | None) -> None:
        rows = [{"id": f"t{n}", "n": n % 2, "bad": f"t{n}" == bad} for n in range(GROUPS * STEPS)]
        Path(data.path).write_text("\n".join(map(json.dumps, rows)))

    write(None)
    write(load_tasks(data).epoch(0)[-1].id)
    return data


@pytest.mark.parametrize(
    ("max_staleness", "swap_between_batches"),
    [pytest.param(0, False, id="sync"), pytest.param(1, True, id="one_step_off")],
)
async def test_a_dropped_group_of_the_last_batch_ends_the_run_at_once(
    served: Any, max_staleness: int, swap_between_batches: bool
) -> None:
    data, stop = exact_data(served.folder), threading.Event()
    config = RolloutConfig(
        groups=GROUPS,
        group_size=2,
        max_staleness=max_staleness,
        retries=0,
        on_failed="drop",
        concurrency=64,
    )

    def train() -> None:
        served.publish(0)
        for step in range(1, STEPS + 1):
            batch = next_batch(
                served.store, AlgorithmConfig(drop_equal_groups=False), groups=GROUPS, step=step,
                version=step - 1, max_staleness=max_staleness, limits=SampleLimits(4096, 10**6),
                timeout_s=200, stop=stop,
            )  # fmt: skip
            if batch is None:
                return
            if swap_between_batches:
                wait_until_whole(
                    served.store, groups=GROUPS, data_ended=end_of_data(data, served.store), timeout_s=200,
                    stop=stop,
                )  # fmt: skip
            served.publish(step)
            served.store.mark_trained(batch.group_ids, step=step, version=step)

    trainer = asyncio.create_task(asyncio.to_thread(train))
    try:
        with pytest.raises(DataError, match="2 groups were trained and 1 dropped, and the 1 left are too"):
            async with asyncio.timeout(60):  # far below the timeout of the trainer
                await run(
                    store=served.store, proxy_url=served.url, admin_key="admin-key-of-the-tests",
                    agent=f"{AGENTS}:fails_on_bad_tasks", data=data, rollout=config, evaluation=None,
                    steps=STEPS,
                )  # fmt: skip
        counts = served.store.group_counts()
        assert counts == {"pending": 0, "complete": 1, "leased": 0, "trained": 2, "dropped": 1}
        assert served.store.latest_version().step == 1
    finally:
        stop.set()
        await trainer
