"""A router of the user in front of the engines: which requests go through it, and which must not."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import pytest
from pool_support import QUICK, SLOW_S, ReplicaServer, Rows, check_drawn, prompt_of, text_of
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from areal_agents.core.completion import Grammar, SamplingParams, TokenChunk
from areal_agents.inference import SGLangEngine
from areal_agents.inference.pool import EnginePool, RouterEngine
from areal_agents.testing import running

LONG = SamplingParams(300, ignore_eos=True)
KNOWN = {"rid", "input_ids", "return_logprob", "logprob_start_len", "stream", "sampling_params", "lora_path"}


class Router:
    """Behaves like sglang-router 0.3.2: it chooses the workers in turn, forwards /generate without the fields
    that it does not know, has no other endpoint of the engines, and answers 500 for an unreachable worker."""

    def __init__(self, urls: list[str]) -> None:
        self.passed = 0
        self._turns = itertools.cycle(urls)
        self.app = Starlette(routes=[Route("/generate", self.generate, methods=["POST"])])

    async def generate(self, request: Request) -> Response:
        body = {name: value for name, value in (await request.json()).items() if name in KNOWN}
        body["sampling_params"].pop("structural_tag", None)
        session = aiohttp.ClientSession()
        try:
            answer = await session.post(next(self._turns) + "/generate", json=body)
        except aiohttp.ClientError as error:
            await session.close()
            return JSONResponse({"error": {"message": str(error)}}, 500)
        self.passed += 1

        async def passing() -> AsyncIterator[bytes]:
            try:
                async for part in answer.content.iter_any():
                    yield part
            finally:
                await session.close()

        return StreamingResponse(passing(), answer.status, media_type=answer.content_type)


@contextmanager
def routed(servers: list[ReplicaServer]) -> Iterator[tuple[Router, str]]:
    router = Router([server.url for server in servers])
    with running(router.app) as url:  # type: ignore[arg-type]
        yield router, url


@pytest.fixture
def servers() -> Iterator[list[ReplicaServer]]:
    servers = [ReplicaServer(chunk_delay_s=SLOW_S) for _ in range(2)]
    yield servers
    for server in servers:
        if server.is_alive:
            server.kill()


def pool_through(url: str, servers: list[ReplicaServer], rows: Rows) -> EnginePool:
    workers = [SGLangEngine(server.url) for server in servers]
    names = [server.url for server in servers]
    router = RouterEngine(url, workers)
    return EnginePool(workers, names=names, current=rows, decode=text_of, router=router, limits=QUICK)


async def test_generations_go_through_the_router_and_survive_the_death_of_a_worker(
    servers: list[ReplicaServer],
) -> None:
    rows = Rows()
    rows.publish(0)
    with routed(servers) as (router, url):
        pool = pool_through(url, servers, rows)
        seen: list[TokenChunk] = []
        calls = [
            asyncio.create_task(pool.generate(f"r{n}", prompt_of(n), LONG, seen.append)) for n in range(6)
        ]
        while len(seen) < 60:
            await asyncio.sleep(0.01)
        servers[0].kill()
        servers[1].hurry()
        for number, completion in enumerate(await asyncio.gather(*calls)):
            check_drawn(prompt_of(number), completion, servers[0].exchanges + servers[1].exchanges)
            assert len(completion) == 300
        assert pool.counts.failovers >= 3 and router.passed >= 6
        # The worker restarts with its first weights. The pool discards what it samples before it is updated.
        rows.publish(2)
        await pool.replicas[1].engine.update_weights_from_disk("/weights/v2", 2)
        while pool.replicas[1].version < 2:
            await asyncio.sleep(0.01)
        servers[0].start()
        calls = [asyncio.create_task(pool.generate(f"s{n}", prompt_of(n), LONG)) for n in range(4)]
        for completion in await asyncio.gather(*calls):
            assert set(completion.versions) == {2}
        await pool.aclose()


async def test_requests_with_fields_that_the_router_drops_go_directly_to_a_worker(
    servers: list[ReplicaServer],
) -> None:
    tag = Grammar("structural_tag", '{"format": {"type": "any_text"}}')
    with routed(servers) as (router, url):
        pool = pool_through(url, servers, Rows())
        completion = await pool.generate("r", prompt_of(1), SamplingParams(5, ignore_eos=True, grammar=tag))
        assert len(completion) == 5 and router.passed == 0
        exchanges: list[Any] = servers[0].exchanges + servers[1].exchanges
        assert [exchange.body["sampling_params"]["structural_tag"] for exchange in exchanges] == [tag.text]
        await pool.generate("s", prompt_of(1), SamplingParams(5, ignore_eos=True))
        assert router.passed == 1
        await pool.aclose()


async def test_an_abort_reaches_the_worker_that_has_the_request(servers: list[ReplicaServer]) -> None:
    with routed(servers) as (_, url):
        pool = pool_through(url, servers, Rows())
        seen: list[TokenChunk] = []
        call = asyncio.create_task(pool.generate("r", prompt_of(1), LONG, seen.append))
        while len(seen) < 5:
            await asyncio.sleep(0.01)
        await pool.abort("r")
        completion = await call
        assert completion.finish_reason == "abort" and 5 <= len(completion) < 300
        await pool.aclose()
