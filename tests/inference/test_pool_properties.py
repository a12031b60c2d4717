"""No token is lost, repeated or mislabelled if scripted engines are killed, swapped and paused at random."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from pool_support import QUICK, ReplicaServer, Rows, check_drawn, pool_of, prompt_of

from areal_agents.core.completion import Completion, SamplingParams, TokenChunk
from areal_agents.errors import EngineError
from areal_agents.inference.pool import EnginePool

REPLICAS, CALLS, TOKENS = 3, 24, 120


class Trainer:
    """Publishes versions as the trainer does."""

    def __init__(self, rng: random.Random, pool: EnginePool, rows: Rows) -> None:
        self._rng, self._pool, self._rows = rng, pool, rows
        self.version = 0

    async def swap(self) -> None:
        """Write the row, then pause, update and resume every engine that answers."""
        self.version += 1
        row = self._rows.publish(self.version)
        mode = self._rng.choice(["retract", "in_place", "abort"])
        await asyncio.gather(*(self._swap_in(replica.engine, mode, row) for replica in self._pool.replicas))

    async def _swap_in(self, engine, mode, row) -> None:  # noqa: ANN001
        try:
            await engine.pause(mode)
            await asyncio.sleep(self._rng.uniform(0, 0.05))
            await engine.update_weights_from_disk(row.path, row.version)
        except EngineError:
            return
        finally:
            with contextlib.suppress(EngineError):
                await engine.resume()


async def disturb(
    rng: random.Random, servers: Sequence[ReplicaServer], trainer: Trainer, done: asyncio.Event
) -> None:
    """Disturb the engines in random ways and at random times until the calls have ended."""
    while not done.is_set():
        await asyncio.sleep(rng.uniform(0.01, 0.08))
        victim = rng.choice(servers)
        match rng.choice(["kill", "start", "swap", "abort"]):
            case "kill" if victim.is_alive and sum(server.is_alive for server in servers) > 1:
                await asyncio.to_thread(victim.kill)
            case "start" if not victim.is_alive:
                await asyncio.to_thread(victim.start)
            case "swap":
                await trainer.swap()
            case "abort" if victim.is_alive:
                victim.do(victim.app.abort_all)


@pytest.mark.parametrize(("seed", "spans"), [(0, True), (1, True), (2, True), (3, False)])
async def test_every_token_of_a_completion_was_sampled_by_an_engine(seed: int, spans: bool) -> None:
    """With `spans`, where chunks contain the versions of their tokens, no request fails. Without, a request
    may fail only if a client was streamed its tokens and its engine died some time after a swap."""
    rng = random.Random(seed)
    rows = Rows()
    rows.publish(0)
    servers = [
        ReplicaServer(chunk_tokens=rng.choice([1, 3]), spans=spans, incremental=rng.random() < 0.5)
        for _ in range(REPLICAS)
    ]
    # An engine runs for about half a second here, so that many engines of a request die by chance.
    pool = pool_of(servers, rows, replace(QUICK, suspect_after=1000, most_deaths=1000))
    trainer, done = Trainer(rng, pool, rows), asyncio.Event()
    sampling = SamplingParams(TOKENS, ignore_eos=True)
    seen: defaultdict[int, list[TokenChunk]] = defaultdict(list)
    deadline = asyncio.get_running_loop().time() + 60

    async def call(number: int) -> Completion | EngineError:
        await asyncio.sleep(rng.uniform(0, 0.8))
        take = seen[number].append if number % 2 else None
        try:
            return await pool.generate(
                f"r{number}", prompt_of(number), sampling, take, affinity=str(number % 7)
            )
        except EngineError as error:
            return error

    disturbing = asyncio.create_task(disturb(rng, servers, trainer, done))
    try:
        results = await asyncio.gather(*(call(number) for number in range(CALLS)))
        while not pool.counts.failovers + pool.counts.continued:
            # On a busy machine every call can run between two disturbances: more calls are made until one of
            # them is disturbed.
            assert asyncio.get_running_loop().time() < deadline, "no call was ever disturbed"
            results += await asyncio.gather(
                *(call(number) for number in range(len(results), len(results) + CALLS))
            )
    finally:
        done.set()
        await disturbing
        await pool.aclose()
        for server in servers:
            if server.is_alive:
                server.kill()
    drawn = [exchange for server in servers for exchange in server.exchanges]
    for number, result in enumerate(results):
        if isinstance(result, EngineError):
            assert number % 2 and not spans and "policy version of tokens" in str(result), result
            continue
        assert len(result) == TOKENS and result.finish_reason == "length"
        check_drawn(prompt_of(number), result, drawn)
        assert result.versions.max() <= trainer.version
        if number % 2:
            assert [t for c in seen[number] for t in c.token_ids] == result.token_ids.tolist()
            given = [v for c in seen[number] for v in c.logprobs]
            np.testing.assert_array_equal(np.float32(given), result.logprobs)
    assert not any(replica.running for replica in pool.replicas)
