"""Replicas that a trainer paused or left out of a swap, also before its death: who loads and resumes them."""

from __future__ import annotations

import asyncio

import pytest
from pool_support import Rows, pool_of, prompt_of
from test_pool import FORTY, load, servers_of, serving, states, until

from areal_agents.inference import SGLangEngine


async def test_the_pool_finishes_a_swap_that_a_dead_trainer_left_unfinished() -> None:
    """The trainer died after it wrote the row and paused the replicas, which nothing else would resume."""
    with servers_of(2) as servers:
        rows = Rows()
        rows.publish(0)
        async with serving(servers, rows) as pool:
            await pool.model_info()
            await asyncio.gather(*(replica.engine.pause("retract") for replica in pool.replicas))
            rows.publish(1)
            call = asyncio.create_task(pool.generate("r", prompt_of(1), FORTY))
            await asyncio.sleep(0.3)  # six health checks
            assert states(pool) == ["serving"] * 2 and pool.counts.catch_ups == 0
            rows.trainer_lives = False
            assert set((await call).versions) == {1}
            await until(lambda: states(pool) == ["serving"] * 2 and pool.counts.catch_ups == 2)


async def test_a_replica_left_out_of_a_swap_serves_until_the_next_version_and_then_loads_it() -> None:
    with servers_of(2) as servers:
        rows = Rows()
        rows.publish(0)
        async with serving(servers, rows) as pool:
            await pool.model_info()
            for version in (1, 2):
                rows.publish(version)
                await pool.replicas[1].engine.update_weights_from_disk(f"/weights/v{version}", version)
                await until(lambda: pool.replicas[1].version == rows.current.version)
                if version == 1:
                    await asyncio.sleep(0.2)  # four health checks
                    assert states(pool) == ["serving"] * 2 and pool.counts.catch_ups == 0
            await until(lambda: [replica.version for replica in pool.replicas] == [2, 2])
            await until(lambda: pool.counts.catch_ups == 1)


@pytest.mark.parametrize("served", [3, 2], ids=["of the current version", "late"])
async def test_a_replica_that_was_found_paused_is_resumed_once_no_trainer_runs(served: int) -> None:
    """A running trainer may be swapping weights, and resumes the engines that it paused itself."""
    with servers_of(1) as servers:
        rows = Rows()
        rows.publish(3)
        await load(servers[0].url, served)
        async with SGLangEngine(servers[0].url) as engine:
            await engine.pause("retract")
        pool = pool_of(servers, rows)
        pool.start()
        try:
            await until(lambda: states(pool) == ["serving"])
            call = asyncio.create_task(pool.generate("r", prompt_of(1), FORTY))
            await asyncio.sleep(0.2)  # four health checks
            assert pool.replicas[0].running == 1 and not call.done()
            rows.trainer_lives = False
            assert set((await call).versions) == {3}
        finally:
            await pool.aclose()


async def test_an_engine_is_not_resumed_if_no_version_was_published() -> None:
    """Another run may train with these engines, beside a proxy whose own store has no version."""
    with servers_of(1) as servers:
        rows = Rows()
        rows.trainer_lives = False
        async with serving(servers, rows) as pool:
            await pool.replicas[0].engine.pause("retract")
            call = asyncio.create_task(pool.generate("r", prompt_of(1), FORTY))
            await asyncio.sleep(0.2)
            assert not call.done()
            await pool.replicas[0].engine.resume()
            assert len(await call) == 40
