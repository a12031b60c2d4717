"""Requests that crash engines, requests that run at the same time, and requests whose engines die for other
reasons."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import orjson
import pytest
from pool_support import QUICK, SLOW_S, ReplicaServer, Rows, check_drawn, prompt_of
from test_pool import LONG, serving, until

from areal_agents.core.completion import Completion, SamplingParams, TokenChunk
from areal_agents.errors import EngineError, EngineUnavailable
from areal_agents.inference import SGLangEngine
from areal_agents.inference.pool import EnginePool, PoolLimits
from areal_agents.inference.pool.replica import Replica
from areal_agents.inference.pool.suspects import has_arrived

PROMPT = prompt_of(0)
HUNDRED = SamplingParams(100, ignore_eos=True)


class DeadlyServer(ReplicaServer):
    """Crashes when a request whose id begins with "poison" is about to get the token after its first `at`."""

    def __init__(self, at: int = 0) -> None:
        self.deaths = 0
        self._at = at
        self._had: dict[str, int] = {}  # by request: how many tokens of the completion were in its prompt
        super().__init__()
        self.spoil = self._sent

    def _answer(self, call: Any) -> Any:
        self._had[call.body["rid"]] = len(call.input_ids) - len(PROMPT)
        return super()._answer(call)

    def _sent(self, chunk: dict[str, Any]) -> bytes:
        rid, count = chunk["meta_info"]["id"], chunk["meta_info"]["completion_tokens"]
        if rid.startswith("poison") and self._had[rid] + count > self._at:
            if self.is_alive:
                self.deaths += 1
                self.crash()
            raise ConnectionResetError
        return b"data: " + orjson.dumps(chunk) + b"\n\n"


@asynccontextmanager
async def pool_over(
    servers: Sequence[ReplicaServer], limits: PoolLimits = QUICK
) -> AsyncIterator[EnginePool]:
    """A pool over servers that are restarted as soon as the pool knows that they are dead."""

    async def keep(server: ReplicaServer, replica: Replica) -> None:
        while True:
            await asyncio.sleep(0.002)
            if not server.is_alive and replica.misses:
                server.start()

    try:
        async with serving(list(servers), limits=limits) as pool:
            keepers = [asyncio.create_task(keep(*pair)) for pair in zip(servers, pool.replicas, strict=True)]
            yield pool
            for keeper in keepers:
                keeper.cancel()
            await asyncio.wait(keepers)
    finally:
        for server in servers:
            if server.is_alive:
                server.kill()


async def grown(seen: list[TokenChunk]) -> None:
    """Wait for ten more chunks, after which a suspect is no longer tried."""
    known = len(seen)
    await until(lambda: len(seen) > known + 10)


async def ended(call: Any) -> Completion | EngineError:
    try:
        return await call
    except EngineError as error:
        return error


@pytest.mark.parametrize(("replicas", "is_read"), [(1, True), (3, True), (3, False)])
@pytest.mark.parametrize("at", [0, 30], ids=["at once", "later"])
async def test_a_request_that_kills_engines_is_given_up_and_no_other_request(
    replicas: int, at: int, is_read: bool
) -> None:
    servers = [DeadlyServer(at) for _ in range(replicas)]
    async with pool_over(servers, replace(QUICK, unread_interval=32)) as pool:
        seen: list[TokenChunk] = []
        take = seen.append if is_read else None
        calls = [pool.generate(f"r{n}", prompt_of(n), HUNDRED, take) for n in range(1, 7)]
        poison = pool.generate("poison", PROMPT, HUNDRED, take)
        *innocents, guilty = await asyncio.gather(*map(ended, [*calls, poison]))
        assert isinstance(guilty, EngineError) and "3 engines died while they ran it; the last" in str(guilty)
        assert not isinstance(guilty, EngineUnavailable)  # clients would repeat the request
        for number, completion in enumerate(innocents, 1):
            assert isinstance(completion, Completion), completion
            check_drawn(prompt_of(number), completion, [e for server in servers for e in server.exchanges])
        assert sum(server.deaths for server in servers) == 3
        with pytest.raises(EngineError, match="given up less than 10 minutes ago: 3 engines died"):
            await pool.generate("poison, asked for again", PROMPT, replace(HUNDRED, seed=1))
        assert sum(server.deaths for server in servers) == 3
        assert not any(replica.running for replica in pool.replicas)


async def test_a_prompt_that_kills_engines_is_not_tried_by_every_request_of_a_group() -> None:
    servers = [DeadlyServer() for _ in range(2)]
    async with pool_over(servers) as pool:
        calls = [ended(pool.generate(f"poison {n}", PROMPT, HUNDRED)) for n in range(12)]
        assert all(isinstance(call, EngineError) for call in await asyncio.gather(*calls))
        assert sum(server.deaths for server in servers) < 12  # otherwise each would kill at least one


async def test_a_request_whose_engines_die_by_chance_continues_up_to_a_number_of_deaths() -> None:
    servers = [ReplicaServer() for _ in range(2)]
    async with pool_over(servers, replace(QUICK, most_deaths=4)) as pool:
        for deaths in (3, 4):
            for server in servers:
                server.chunk_delay_s = SLOW_S
            seen: list[TokenChunk] = []
            call = asyncio.create_task(pool.generate("r", PROMPT, LONG, seen.append))
            for _ in range(deaths):
                await grown(seen)
                running = next(s for s, r in zip(servers, pool.replicas, strict=True) if r.running)
                known = pool.counts.failovers
                await asyncio.to_thread(running.kill)
                await until(lambda call=call, known=known: call.done() or pool.counts.failovers > known)
            if deaths == 3:
                for server in servers:
                    server.hurry()
                check_drawn(PROMPT, await call, servers[0].exchanges + servers[1].exchanges)
            else:
                with pytest.raises(EngineError, match="4 engines died while they ran it"):
                    await call


async def test_a_death_counts_for_all_requests_on_the_engine_even_if_it_is_restarted_at_once() -> None:
    server = ReplicaServer(chunk_delay_s=SLOW_S)
    async with pool_over([server], replace(QUICK, most_deaths=1)) as pool:
        seen: list[TokenChunk] = []
        calls = [asyncio.create_task(pool.generate(f"r{n}", PROMPT, LONG, seen.append)) for n in range(12)]
        await grown(seen)
        server.do(server.crash)
        outcomes = await asyncio.gather(*map(ended, calls))
        assert all("1 engines died while they ran it" in str(outcome) for outcome in outcomes)


async def test_a_restart_between_two_health_checks_counts_as_a_death() -> None:
    server, rows = ReplicaServer(chunk_delay_s=SLOW_S), Rows()
    rows.publish(3)
    async with serving([server], rows, limits=replace(QUICK, most_deaths=1)) as pool:
        seen: list[TokenChunk] = []
        calls = [asyncio.create_task(pool.generate(f"r{n}", PROMPT, LONG, seen.append)) for n in range(3)]
        await until(lambda: len(seen) > 20)
        server.kill()
        server.start()  # the pool, which runs in this thread, could do nothing in between
        outcomes = await asyncio.gather(*map(ended, calls))
        assert all("1 engines died while they ran it" in str(outcome) for outcome in outcomes)
    server.kill()


async def test_a_request_that_found_no_server_has_not_arrived() -> None:
    server = ReplicaServer(chunk_delay_s=SLOW_S)
    async with SGLangEngine(server.url, vocab_size=2048) as engine:
        call = asyncio.create_task(engine.generate("r", PROMPT, LONG))
        while not server.app._running:
            await asyncio.sleep(0.005)
        await asyncio.to_thread(server.kill)
        with pytest.raises(EngineUnavailable) as broken:
            await call
        with pytest.raises(EngineUnavailable) as refused:
            await engine.generate("s", PROMPT, LONG)
    assert has_arrived(broken.value) and not has_arrived(refused.value)
