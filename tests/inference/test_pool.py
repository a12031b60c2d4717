"""A pool over real clients of scripted engines: which engine gets a request, and what happens if it dies."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from polling import until
from pool_support import (
    QUICK,
    SLOW_S,
    ReplicaServer,
    Rows,
    chain,
    check_drawn,
    pool_of,
    prompt_of,
    reached,
)

from areal_agents.core.completion import Grammar, SamplingParams, TokenChunk
from areal_agents.errors import ConfigError, EngineError, EngineRejected, EngineUnavailable
from areal_agents.inference import SGLangEngine
from areal_agents.inference.pool import CurrentVersion, EnginePool, monitor, refuse_other_models

FORTY = SamplingParams(40, ignore_eos=True)
LONG = SamplingParams(400, ignore_eos=True)


@contextmanager
def servers_of(count: int, **options: Any) -> Iterator[list[ReplicaServer]]:
    servers = [ReplicaServer(**options) for _ in range(count)]
    try:
        yield servers
    finally:
        for server in servers:
            if server.is_alive:
                server.kill()


@asynccontextmanager
async def serving(
    servers: list[ReplicaServer], rows: Rows | None = None, **options: Any
) -> AsyncIterator[EnginePool]:
    """A started pool; all of its replicas serve."""
    pool = pool_of(servers, rows, **options)
    pool.start()
    try:
        await until(lambda: states(pool) == ["serving"] * len(servers))
        yield pool
    finally:
        await pool.aclose()


def states(pool: EnginePool) -> list[str]:
    return [replica.state for replica in pool.replicas]


async def test_an_episode_stays_on_one_replica_and_new_ones_go_to_the_least_loaded() -> None:
    with servers_of(3) as servers:
        async with serving(servers) as pool:
            calls = [
                pool.generate(f"{episode}-{turn}", prompt_of(episode), FORTY, affinity=f"e{episode}")
                for episode in range(9)
                for turn in range(3)
            ]
            await asyncio.gather(*calls)
            # These run one after another, so that no replica is loaded.
            for episode in range(9, 15):
                await pool.generate(f"{episode}", prompt_of(episode), FORTY, affinity=f"e{episode}")
    homes: dict[tuple[int, ...], set[int]] = {}
    for index, server in enumerate(servers):
        for exchange in server.exchanges:
            homes.setdefault(tuple(exchange.input_ids.tolist()), set()).add(index)
    assert len(homes) == 15 and all(len(where) == 1 for where in homes.values())
    assert set(Counter(min(where) for where in homes.values()).values()) == {5}


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_completion_of_a_killed_replica_continues_on_another_one(streamed: bool) -> None:
    with servers_of(2, chunk_delay_s=SLOW_S) as servers:
        async with serving(servers) as pool:
            got: list[int] = []
            take = (lambda chunk: got.extend(chunk.token_ids)) if streamed else None
            call = asyncio.create_task(pool.generate("r", prompt_of(1), LONG, take))
            await until(lambda: reached(pool, "r") > 0)
            first = next(i for i, replica in enumerate(pool.replicas) if replica.running)
            servers[first].kill()
            servers[1 - first].hurry()
            completion = await call
            assert completion.finish_reason == "length"
            assert got == (completion.token_ids.tolist() if streamed else [])
            check_drawn(prompt_of(1), completion, servers[0].exchanges + servers[1].exchanges)
            resumed = servers[1 - first].exchanges[-1]
            assert 0 < pool.counts.resubmitted_tokens == len(resumed.input_ids) - 12 < 400
            assert pool.counts.failovers == 1
            await until(lambda: states(pool)[first] == "down")


async def test_a_completion_that_no_client_reads_arrives_in_large_pieces_and_survives_a_death() -> None:
    """The tokens of the piece that the engine had not sent are sampled again."""
    with servers_of(2, chunk_delay_s=SLOW_S / 2) as servers:
        async with serving(servers, limits=replace(QUICK, unread_interval=32)) as pool:
            call = asyncio.create_task(pool.generate("r", prompt_of(1), LONG))
            await until(lambda: reached(pool, "r") >= 33)
            first = next(i for i, replica in enumerate(pool.replicas) if replica.running)
            servers[first].kill()
            servers[1 - first].hurry()
            completion = await call
            assert len(completion.token_ids) == 400 and completion.finish_reason == "length"
            check_drawn(prompt_of(1), completion, servers[0].exchanges + servers[1].exchanges)
            assert pool.counts.resubmitted_tokens % 32 == 1  # the first piece has one token
            read: list[int] = []
            await pool.generate("s", prompt_of(2), FORTY, lambda chunk: read.append(len(chunk.token_ids)))
            assert sum(read) == 40 and max(read) < 32  # a client that streams gets each token at once
    asked = {e.rid.partition("~")[0].rstrip("$"): e.body for e in servers[0].exchanges + servers[1].exchanges}
    assert asked["r"]["sampling_params"]["stream_interval"] == 32
    assert "stream_interval" not in asked["s"]["sampling_params"]


async def test_a_replica_that_hangs_is_lost_and_its_requests_continue() -> None:
    """It still listens but never answers, so only health checks can detect that it is lost."""
    with servers_of(2, chunk_delay_s=SLOW_S) as servers:
        async with serving(servers, limits=replace(QUICK, probe_timeout_s=0.5)) as pool:
            call = asyncio.create_task(pool.generate("r", prompt_of(1), LONG))
            await until(lambda: any(replica.running for replica in pool.replicas))
            first = next(i for i, replica in enumerate(pool.replicas) if replica.running)
            with servers[first].hanging():
                servers[1 - first].hurry()
                completion = await call
            check_drawn(prompt_of(1), completion, servers[0].exchanges + servers[1].exchanges)
            assert servers[1 - first].exchanges


async def test_a_paused_replica_does_not_count_as_dead() -> None:
    """However long the trainer pauses a replica, its requests stay there, and the pool loads nothing."""
    with servers_of(2, chunk_delay_s=SLOW_S) as servers:
        rows = Rows()
        rows.publish(0)
        async with serving(servers, rows) as pool:
            seen: list[list[TokenChunk]] = [[], [], [], []]
            calls = [
                asyncio.create_task(
                    pool.generate(f"r{n}", prompt_of(n), LONG, seen[n].append, affinity=str(n))
                )
                for n in range(4)
            ]
            await until(lambda: all(seen))
            assert [replica.running for replica in pool.replicas] == [2, 2]
            clients = [replica.engine for replica in pool.replicas]
            await asyncio.gather(*(engine.pause("retract") for engine in clients))
            rows.publish(1)
            await asyncio.sleep(0.3)  # six health checks, within the time that a swap may take
            assert states(pool) == ["serving"] * 2 and not any(call.done() for call in calls)
            held = asyncio.create_task(pool.generate("new", prompt_of(9), FORTY))
            await asyncio.gather(*(engine.update_weights_from_disk("/w/1", 1) for engine in clients))
            await asyncio.gather(*(engine.resume() for engine in clients))
            for server in servers:
                server.hurry()
            for number, completion in enumerate(await asyncio.gather(*calls)):
                check_drawn(prompt_of(number), completion, [e for s in servers for e in s.exchanges])
                assert set(completion.versions) == {0, 1}
            assert set((await held).versions) == {1}
            assert pool.counts.failovers == pool.counts.catch_ups == 0


async def test_a_restarted_replica_gets_the_current_version_before_it_serves() -> None:
    with servers_of(2) as servers:
        rows = Rows()
        rows.publish(0)
        async with serving(servers, rows) as pool:
            await pool.model_info()
            servers[0].kill()
            await until(lambda: states(pool)[0] == "down")
            rows.publish(5)  # meanwhile the trainer updates the other replica
            await pool.replicas[1].engine.update_weights_from_disk("/w/5", 5)
            calls = [asyncio.create_task(pool.generate(f"r{n}", prompt_of(n), FORTY)) for n in range(4)]
            servers[0].start()
            await until(lambda: states(pool) == ["serving"] * 2)
            calls += [asyncio.create_task(pool.generate(f"s{n}", prompt_of(n), FORTY)) for n in range(8)]
            for completion in await asyncio.gather(*calls):
                assert set(completion.versions) == {5}
            info = await pool.replicas[0].engine.model_info()
            assert (info.version, info.model_path) == (5, "/weights/v5")  # the folder named in the row
            assert pool.counts.catch_ups == 1
            assert servers[0].exchanges


@pytest.mark.parametrize(
    "then", ["the folder is written", "the trainer sends the next version", "its own process loads it"]
)
async def test_a_late_replica_waits_for_a_folder_that_is_not_written_yet(then: str) -> None:
    by_itself = then == "its own process loads it"
    waits = {"in_storage": True} if by_itself else {"folder_pending": True}
    what = "read from the object storage" if by_itself else "written"
    with servers_of(2) as servers:
        rows = Rows()
        rows.publish(0)
        async with serving(servers, rows) as pool:
            await pool.model_info()
            servers[0].kill()
            await until(lambda: states(pool)[0] == "down")
            rows.current = replace(rows.publish(5), **waits)
            await load(servers[1].url, 5)
            servers[0].start()
            await until(lambda: f"the folder of that version is not {what} yet" in pool.replicas[0].reason)
            calls = [pool.generate(f"r{n}", prompt_of(n), FORTY) for n in range(4)]
            for completion in await asyncio.gather(*calls):
                assert set(completion.versions) == {5}
            assert states(pool) == ["late", "serving"] and not servers[0].exchanges
            assert (await pool.replicas[0].engine.model_info()).version == 0
            if then == "the folder is written":
                rows.publish(5)
            elif by_itself:
                await load(servers[0].url, 5)
            else:
                rows.current = replace(rows.publish(6), folder_pending=True)
                await asyncio.gather(*(load(server.url, 6) for server in servers))
            await until(lambda: states(pool) == ["serving"] * 2)
            if then == "the folder is written":  # a health check may see the version before the load returns
                await until(lambda: pool.counts.catch_ups == 1)
            assert pool.counts.catch_ups == (then == "the folder is written")


async def test_two_pools_may_bring_the_same_late_replica_to_the_current_version() -> None:
    with servers_of(2) as servers:
        rows = Rows()
        rows.publish(3)
        await asyncio.gather(*(load(server.url, 3) for server in servers[1:]))
        async with serving(servers, rows) as one, serving(servers, rows) as other:
            pools = [one, other]
            await asyncio.gather(*(pool.model_info() for pool in pools))
            await until(lambda: all(states(pool) == ["serving"] * 2 for pool in pools))
            calls = [pool.generate(f"r{n}", prompt_of(n), FORTY) for n, pool in enumerate(pools * 4)]
            for completion in await asyncio.gather(*calls):
                assert set(completion.versions) == {3}


@pytest.mark.parametrize("another_loads", [True, False])
async def test_a_version_that_another_process_has_loaded_meanwhile_is_not_loaded_again(
    another_loads: bool,
) -> None:
    loaded: list[str] = []

    class Shared(SGLangEngine):
        async def settle(self) -> None:
            if another_loads:
                await load(self.base_url, 7)

        async def update_weights_from_disk(self, path: str, version: int) -> None:
            loaded.append(path)
            await super().update_weights_from_disk(path, version)

    with servers_of(1) as [server]:
        async with Shared(server.url) as engine:
            await monitor.load(engine, CurrentVersion(7, "/weights/v7"))
            assert (await engine.model_info()).version == 7
    assert loaded == ([] if another_loads else ["/weights/v7"])


async def test_a_replica_restarted_between_health_checks_returns_no_tokens_of_its_old_weights() -> None:
    """Between two health checks, only the version of the tokens reveals the restart."""
    with servers_of(1) as servers:
        rows = Rows()
        rows.publish(4)
        async with serving(servers, rows, limits=replace(QUICK, probe_every_s=30.0)) as pool:
            await pool.generate("first", prompt_of(1), FORTY)
            assert pool.counts.catch_ups == 1
            servers[0].kill()
            servers[0].start()
            got: list[int] = []
            whole = await pool.generate("r", prompt_of(2), FORTY, lambda chunk: got.extend(chunk.token_ids))
            assert set(whole.versions) == {4} and got == whole.token_ids.tolist()
            whole = await pool.generate("w", prompt_of(3), FORTY)
            assert set(whole.versions) == {4}
            servers[0].kill()
            servers[0].start()
            whole = await pool.generate("x", prompt_of(4), FORTY)  # not streamed
            assert set(whole.versions) == {4}


async def test_the_error_names_every_engine_if_none_serves() -> None:
    with servers_of(2) as servers:
        async with serving(servers, limits=replace(QUICK, wait_s=0.3)) as pool:
            await pool.generate("r", prompt_of(1), FORTY)
            for server in servers:
                server.kill()
            await until(lambda: states(pool) == ["down"] * 2)
            with pytest.raises(EngineUnavailable, match=r"serves within 0.3 s: http.*is down.*; http"):
                await pool.generate("s", prompt_of(1), FORTY)
            with pytest.raises(EngineUnavailable, match="not reachable"):
                await pool.model_info()
            servers[1].start()
            await until(lambda: states(pool)[1] == "serving")
            completion = await pool.generate("t", prompt_of(1), FORTY)
            assert completion.token_ids.tolist() == chain(prompt_of(1).tolist(), 40)


def broken(kind: str) -> Callable[[dict[str, Any]], bytes]:
    """Return a `spoil` function, which writes chunks as a broken engine does."""

    def spoil(chunk: dict[str, Any]) -> bytes:
        if kind == "garbage":
            return b"data: <html>\n\n"
        if kind == "half":
            raise ConnectionResetError
        if kind == "nan":
            chunk["meta_info"]["output_token_logprobs"] = [(5.0, t, None) for t in chunk["output_ids"]]
        if kind == "ids":
            chunk["output_ids"] = [7 for _ in chunk["output_ids"]]
        if kind == "version":
            chunk["meta_info"]["weight_version"] = "v-next"
        if kind == "ahead":
            chunk["meta_info"]["weight_version"] = "99"
            chunk["meta_info"].pop("weight_versions", None)
        if kind == "abort":
            chunk["meta_info"]["finish_reason"] = {"type": "abort", "message": "for no reason"}
        return b"data: " + json.dumps(chunk).encode() + b"\n\n"

    return spoil


@pytest.mark.parametrize("kind", ["garbage", "half", "nan", "ids", "version", "ahead", "abort"])
async def test_an_engine_with_invalid_answers_affects_no_completion(kind: str) -> None:
    """Every request ends as if the other replica were the only one."""
    with servers_of(2) as servers:
        rows = Rows()
        rows.publish(0)
        servers[0].spoil = broken(kind)
        async with serving(servers, rows) as pool:
            calls = [pool.generate(f"r{n}", prompt_of(n), FORTY) for n in range(6)]
            for number, completion in enumerate(await asyncio.gather(*calls)):
                check_drawn(prompt_of(number), completion, servers[0].exchanges + servers[1].exchanges)
                assert completion.finish_reason == "length" and set(completion.versions) == {0}
            assert pool.counts.failovers + pool.counts.continued >= 3


async def test_a_single_engine_with_invalid_answers_is_an_error_and_no_endless_loop() -> None:
    with servers_of(1) as servers:
        servers[0].spoil = broken("garbage")
        async with serving(servers, limits=replace(QUICK, longest_pause_s=0.05)) as pool:
            with pytest.raises(EngineError, match="without a token; the last time: .*not JSON"):
                await pool.generate("r", prompt_of(1), FORTY, lambda chunk: None)
            assert len(servers[0].exchanges) <= 6


async def test_a_replica_of_another_model_is_refused_at_the_start_and_when_it_appears() -> None:
    with servers_of(2) as servers:
        async with serving(servers) as pool:
            await pool.model_info()
            await until(lambda: states(pool) == ["serving"] * 2)
            servers[1].kill()
            servers[1].start(vocab_size=900)
            await until(lambda: states(pool)[1] == "refused")
            assert "a vocabulary of 900" in pool.replicas[1].reason
            calls = [pool.generate(f"r{n}", prompt_of(n), FORTY) for n in range(4)]
            await asyncio.gather(*calls)
            assert not servers[1].exchanges
            for limit, said in (({"vocab_size": 900}, "vocabulary"), ({"context_length": 512}, "context")):
                servers[1].kill()
                servers[1].start(**limit)
                async with SGLangEngine(servers[0].url) as first, SGLangEngine(servers[1].url) as second:
                    urls = [server.url for server in servers]
                    with pytest.raises(ConfigError, match=f"{urls[1]}: it serves a {said} of .* {urls[0]}"):
                        await refuse_other_models(urls, [first, second])
                    servers[1].kill()
                    await refuse_other_models(urls, [first, second])  # a replica may start later
                    servers[1].start()


async def test_a_replica_of_another_model_is_refused_even_if_it_answers_first() -> None:
    with servers_of(2) as servers:
        async with SGLangEngine(servers[0].url) as right:
            vocab_size = (await right.model_info()).vocab_size
        for server in servers:
            server.kill()
        servers[1].start(vocab_size=900)
        async with aclosing(pool_of(servers, vocab_size=vocab_size)) as pool:
            pool.start()
            await until(lambda: states(pool)[1] == "refused")
            assert f"a vocabulary of 900, expected {vocab_size}" in pool.replicas[1].reason
            servers[0].start()
            completion = await pool.generate("r", prompt_of(1), FORTY)
            assert completion.token_ids.tolist() == chain(prompt_of(1).tolist(), 40)
            assert not servers[1].exchanges


async def test_a_request_that_its_caller_ends_is_not_sent_again() -> None:
    with servers_of(2, chunk_delay_s=SLOW_S) as servers:
        async with serving(servers) as pool:
            seen: list[TokenChunk] = []
            call = asyncio.create_task(pool.generate("r", prompt_of(1), LONG, seen.append))
            await until(lambda: len(seen) > 5)
            await pool.abort("r")
            completion = await call
            assert completion.finish_reason == "abort" and 5 < len(completion) < 400
            call = asyncio.create_task(pool.generate("c", prompt_of(2), LONG, seen.append))
            await until(lambda: any(replica.running for replica in pool.replicas))
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await until(lambda: len(servers[0].exchanges + servers[1].exchanges) == 2)
            assert not any(replica.running for replica in pool.replicas)
            assert pool.counts.continued == pool.counts.failovers == 0


async def test_a_refused_request_fails_without_a_failover() -> None:
    with servers_of(2, context_length=100) as servers:
        async with serving(servers) as pool:
            with pytest.raises(EngineRejected, match="context"):
                await pool.generate("r", prompt_of(1), LONG)
            assert states(pool) == ["serving"] * 2 and pool.counts.failovers == 0


async def test_a_replica_that_its_own_process_left_paused_is_not_resumed() -> None:
    with servers_of(1) as servers:
        rows = Rows()
        rows.trainer_lives = False
        rows.current = replace(rows.publish(0), in_storage=True)
        async with SGLangEngine(servers[0].url) as own:
            await own.pause("retract")
            async with serving(servers, rows) as pool:
                call = asyncio.create_task(pool.generate("r", prompt_of(0), FORTY))
                await asyncio.sleep(0.3)  # six health checks
                assert not call.done()
                await own.resume()
                assert set((await call).versions) == {0}


async def test_pauses_with_mode_abort_lose_no_tokens() -> None:
    with servers_of(2, chunk_delay_s=SLOW_S) as servers:
        rows = Rows()
        rows.publish(0)
        async with serving(servers, rows) as pool:
            calls = [asyncio.create_task(pool.generate(f"r{n}", prompt_of(n), LONG)) for n in range(6)]
            await until(lambda: sum(replica.running for replica in pool.replicas) == 6)
            for version in (1, 2, 3):
                before = [reached(pool, f"r{n}") for n in range(6)]
                await until(lambda before=before: all(reached(pool, f"r{n}") > before[n] for n in range(6)))
                rows.publish(version)
                clients = [replica.engine for replica in pool.replicas]
                await asyncio.gather(*(engine.pause("abort") for engine in clients))
                await asyncio.gather(
                    *(engine.update_weights_from_disk(f"/w/{version}", version) for engine in clients)
                )
                await asyncio.gather(*(engine.resume() for engine in clients))
            before = [reached(pool, f"r{n}") for n in range(6)]
            await until(lambda: all(reached(pool, f"r{n}") > before[n] for n in range(6)))
            for server in servers:
                server.hurry()
            for number, completion in enumerate(await asyncio.gather(*calls)):
                check_drawn(prompt_of(number), completion, servers[0].exchanges + servers[1].exchanges)
                assert sorted(set(completion.versions.tolist())) == [0, 1, 2, 3]
                assert (completion.versions[1:] >= completion.versions[:-1]).all()
            assert pool.counts.continued == 18 and pool.counts.failovers == 0


async def test_a_request_with_a_grammar_starts_over_elsewhere_unless_a_piece_was_streamed() -> None:
    sampling = SamplingParams(400, ignore_eos=True, grammar=Grammar("regex", "x*"))
    for streamed in (False, True):
        with servers_of(2, chunk_delay_s=SLOW_S) as servers:
            async with serving(servers) as pool:
                got: list[TokenChunk] = []
                call = asyncio.create_task(
                    pool.generate("r", prompt_of(1), sampling, got.append if streamed else None)
                )
                await until(lambda pool=pool: reached(pool, "r") > 0)
                next(s for s, r in zip(servers, pool.replicas, strict=True) if r.running).kill()
                for server in servers:
                    server.hurry()
                if streamed:
                    with pytest.raises(EngineUnavailable, match="with a grammar"):
                        await call
                    assert got
                else:
                    assert len(await call) == 400
                    assert [len(e.input_ids) for s in servers for e in s.exchanges] == [12, 12]


async def test_replicas_without_a_published_version_serve_with_any_version() -> None:
    with servers_of(2) as servers:
        await load(servers[1].url, 7)
        async with serving(servers) as pool:
            await pool.generate("r", prompt_of(1), FORTY)
            await until(lambda: states(pool) == ["serving"] * 2)
            assert (await pool.model_info()).version == 7


async def load(url: str, version: int) -> None:
    async with SGLangEngine(url) as engine:
        await engine.update_weights_from_disk(f"/weights/v{version}", version)
