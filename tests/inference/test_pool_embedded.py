"""A pool of two real engine processes: one is killed during generations, restarted, and updated."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from inference_support import (
    MAX_CONTEXT,
    Missed,
    again_if_missed,
    load_reference,
    prompt_of,
    reference_greedy,
    reference_logprobs,
)
from polling import until
from pool_support import QUICK, Rows

from areal_agents.core.completion import SamplingParams, TokenChunk
from areal_agents.inference import EmbeddedEngineConfig, EngineProcess, SGLangEngine
from areal_agents.inference.pool import CurrentVersion, EnginePool
from areal_agents.inference.ports import reserved_ports

LIMITS = replace(QUICK, probe_timeout_s=5.0, wait_s=60.0)
GREEDY = SamplingParams(1000, temperature=0.0, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=1.0, seed=11)


@pytest.fixture
def port() -> Iterator[int]:
    """A port that no other process gets while no engine listens on it."""
    with reserved_ports(1) as (port,):
        yield port


def engine_on(model: Path, port: int = 0) -> EngineProcess:
    config = EmbeddedEngineConfig(
        model=str(model), port=port, threads=1, slots=4, max_context=MAX_CONTEXT, kernel="numba",
        incremental_streaming=True,
    )  # fmt: skip
    return EngineProcess(config)


@again_if_missed
async def test_completions_survive_kill_9_of_an_engine_and_its_restart(
    model_folder: Path, next_model_folder: Path, port: int
) -> None:
    """Greedy and seeded completions equal, token by token, those of an engine that was not killed."""
    old, new = load_reference(model_folder), load_reference(next_model_folder)
    rows, prompts = Rows(), [prompt_of(20, seed) for seed in range(2)]
    greedy = reference_greedy(old, prompts[0], 1000).tolist()
    first, second = engine_on(model_folder, port), engine_on(model_folder)
    first.start()
    second.start()
    again: EngineProcess | None = None
    try:
        for process in (first, second):
            process.wait_ready()
        urls = [first.url, second.url]
        pool = EnginePool([SGLangEngine(url) for url in urls], names=urls, current=rows, limits=LIMITS)
        pool.start()
        await until(lambda: all(replica.is_serving for replica in pool.replicas))
        undisturbed = await pool.generate("u", prompts[1], SEEDED)
        seen: list[list[TokenChunk]] = [[], [], [], []]
        calls = [
            asyncio.create_task(pool.generate(f"r{n}", prompts[n % 2], params, seen[n].append))
            for n, params in enumerate((GREEDY, SEEDED, GREEDY, SEEDED))
        ]
        await until(lambda: all(len(chunks) > 20 for chunks in seen))
        os.kill(first.pid, signal.SIGKILL)
        for number, completion in enumerate(await asyncio.gather(*calls)):
            expected = greedy if number % 2 == 0 else undisturbed.token_ids.tolist()
            assert completion.token_ids.tolist() == expected
            assert [token for chunk in seen[number] for token in chunk.token_ids] == expected
            scored = reference_logprobs(old, prompts[number % 2], completion.token_ids)
            np.testing.assert_allclose(completion.logprobs, scored, atol=1e-4)
            assert set(completion.versions) == {0}
        if pool.counts.failovers < 2:
            await pool.aclose()
            raise Missed
        assert pool.counts.failovers == 2 and pool.counts.resubmitted_tokens > 40

        rows.current = CurrentVersion(1, str(next_model_folder))  # only the second engine gets it
        await pool.replicas[1].engine.update_weights_from_disk(str(next_model_folder), 1)
        first.stop()
        again = engine_on(model_folder, port)
        again.start()
        await until(lambda: pool.replicas[0].is_serving)
        os.kill(second.pid, signal.SIGKILL)
        completion = await pool.generate("n", prompts[0], replace(GREEDY, max_new_tokens=20))
        assert completion.token_ids.tolist() == reference_greedy(new, prompts[0], 20).tolist()
        assert set(completion.versions) == {1} and pool.counts.catch_ups == 1
        await pool.aclose()
    finally:
        for process in (first, second, again):
            if process is not None:
                process.stop()


@pytest.mark.slow
@again_if_missed
async def test_versions_are_right_after_a_swap_with_an_abort_and_the_death_of_an_engine(
    model_folder: Path, next_model_folder: Path
) -> None:
    """Every token has the logprob of its version, before and after the swap and the death."""
    models = [load_reference(model_folder), load_reference(next_model_folder)]
    rows, prompt = Rows(), prompt_of(20, 5)
    rows.current = CurrentVersion(0, str(model_folder))
    engines = [engine_on(model_folder) for _ in range(2)]
    for engine in engines:
        engine.start()
    try:
        for engine in engines:
            engine.wait_ready()
        urls = [engine.url for engine in engines]
        pool = EnginePool([SGLangEngine(url) for url in urls], names=urls, current=rows, limits=LIMITS)
        pool.start()
        await until(lambda: all(replica.is_serving for replica in pool.replicas))
        seen: list[TokenChunk] = []
        sampling = replace(GREEDY, temperature=1.0)
        call = asyncio.create_task(pool.generate("r", prompt, sampling, seen.append))
        await until(lambda: len(seen) > 20)
        rows.current = CurrentVersion(1, str(next_model_folder))
        for mode in ("pause", "update", "resume"):
            for replica in pool.replicas:
                if mode == "pause":
                    await replica.engine.pause("abort")
                elif mode == "update":
                    await replica.engine.update_weights_from_disk(str(next_model_folder), 1)
                else:
                    await replica.engine.resume()
        swapped = len(seen)
        await until(lambda: call.done() or len(seen) > swapped + 20)
        if call.done():
            await pool.aclose()
            raise Missed
        victim = next(index for index, replica in enumerate(pool.replicas) if replica.running)
        os.kill(engines[victim].pid, signal.SIGKILL)
        completion = await call
        if not pool.counts.failovers:
            await pool.aclose()
            raise Missed
        assert pool.counts.continued == 1 and pool.counts.failovers == 1
        boundary = int((completion.versions == 0).sum())
        assert completion.versions.tolist() == [0] * boundary + [1] * (1000 - boundary) and boundary > 20
        before, after = (reference_logprobs(model, prompt, completion.token_ids) for model in models)
        np.testing.assert_allclose(completion.logprobs[:boundary], before[:boundary], atol=1e-4)
        np.testing.assert_allclose(completion.logprobs[boundary:], after[boundary:], atol=1e-4)
        assert abs(before[boundary] - after[boundary]) > 1e-3
        await pool.aclose()
    finally:
        for engine in engines:
            engine.stop()
