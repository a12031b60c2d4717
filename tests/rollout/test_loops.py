"""A rollout process with real batches: the versions of the trained tokens, and the surplus of groups."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.rollout.config import DataConfig, RolloutConfig
from areal_agents.rollout.runner import run
from areal_agents.training.batches.checks import SampleLimits
from areal_agents.training.batches.leasing import Batch, next_batch
from areal_agents.training.batches.source import wait_until_whole

AGENTS = Path(__file__).parent / "rollout_agents.py"
STEPS = 3


async def train(
    served: Any, agent: str, *, swap_between_batches: bool = False, **rollout: Any
) -> list[Batch]:
    """Run the agent with a trainer that leases batches but learns nothing; return the batches."""
    rows = [{"id": f"t{n}", "folder": str(served.folder / "marks"), "reward": n % 2} for n in range(8)]
    (served.folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (served.folder / "marks").mkdir()
    config = RolloutConfig(**{"groups": 2, "group_size": 2, "concurrency": 16, **rollout})
    batches = []
    stop = threading.Event()

    def steps() -> None:
        served.publish(0)
        for step in range(1, STEPS + 1):
            batch = next_batch(
                served.store, AlgorithmConfig(drop_equal_groups=False), groups=2, step=step, version=step - 1,
                max_staleness=config.max_staleness, limits=SampleLimits(4096, 10**6), timeout_s=60, stop=stop,
            )  # fmt: skip
            if batch is None:
                return
            batches.append(batch)
            if swap_between_batches and step < STEPS:
                wait_until_whole(served.store, groups=2, data_ended=lambda: False, timeout_s=60, stop=stop)
            served.publish(step)
            served.store.mark_trained(batch.group_ids, step=step, version=step)

    trainer = asyncio.create_task(asyncio.to_thread(steps))
    try:
        async with asyncio.timeout(60):
            await run(
                store=served.store, proxy_url=served.url, admin_key="admin-key-of-the-tests",
                agent=f"{AGENTS}:{agent}", data=DataConfig(path=str(served.folder / "tasks.jsonl")),
                rollout=config, evaluation=None, steps=STEPS,
            )  # fmt: skip
    finally:
        stop.set()
        await trainer
    return batches


def ages(batch: Batch, version: int) -> set[int]:
    """Return the staleness values of the trained tokens of a batch."""
    return {version - v for s in batch.samples for v in s.versions[s.loss_mask].tolist()}


async def test_with_max_staleness_0_every_token_is_of_the_version_that_it_trains(served: Any) -> None:
    batches = await train(served, "by_turn", max_staleness=0)
    assert [ages(batch, version) for version, batch in enumerate(batches)] == [{0}] * STEPS
    assert all(b.staleness.masked_tokens == b.stale_groups == 0 for b in batches)
    sampled = [e for e in served.store.episodes() if e.version_min is not None]
    assert len(sampled) >= STEPS * 4 and all(e.version_min == e.version_max for e in sampled)


async def test_one_step_off_trains_on_tokens_of_the_previous_version(served: Any) -> None:
    batches = await train(served, "by_turn", max_staleness=1, swap_between_batches=True)
    assert [ages(batch, version) for version, batch in enumerate(batches)] == [{0}, {1}, {1}]
    trained = [e for e in served.store.episodes(status="finished") if e.version_min is not None]
    assert all(e.version_min == e.version_max for e in trained)


async def test_the_surplus_of_a_complete_group_is_aborted(served: Any) -> None:
    batches = await train(served, "one_of_a_task_hangs", over_sample=1)
    assert len(batches) == STEPS  # though one episode of each group never ends
    for group in (group for batch in batches for group in batch.group_ids):
        episodes = served.store.episodes(group_id=group)
        assert sorted(episode.status for episode in episodes) == ["aborted", "finished", "finished"]
        assert len(served.store.load_groups([group])[0].rollouts) == 2
    assert not served.store.episodes(status="open")
