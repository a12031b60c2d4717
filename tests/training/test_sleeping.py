"""Engines release memory while a step is trained; running requests are paused, and nothing is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from publish_support import PROMPT, held_generation, publisher, resume

from areal_agents.core.completion import Completion, SamplingParams
from areal_agents.errors import EngineError, EngineUnavailable
from areal_agents.inference import SGLangEngine
from areal_agents.inference.engine import MemoryKind
from areal_agents.store import Store
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.model import load_policy
from areal_agents.training.publish.sleep import fall_asleep, wake
from areal_agents.training.step.step import Stopped

GREEDY = SamplingParams(200, temperature=0.0, ignore_eos=True)
KV = ("kv_cache",)


async def test_generations_that_a_sleep_interrupts_give_the_same_completions(served_url: str) -> None:
    async with SGLangEngine(served_url, request_timeout_s=60) as engine:
        started = time.monotonic()
        expected = await engine.generate("calm", PROMPT, GREEDY)
        calm_s = time.monotonic() - started
        running = await held_generation(
            engine, lambda: fall_asleep([engine], KV), lambda: wake([engine], KV), GREEDY
        )
        begun = asyncio.Event()
        later = asyncio.create_task(engine.generate("later", PROMPT, GREEDY, lambda piece: begun.set()))
        # In the time of a whole generation, or a second, not even the first token arrives.
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(begun.wait(), min(calm_s, 1.0))
        assert not running.done()
        await wake([engine], KV)
        for completion in (await running, await later):
            assert_same(completion, expected)


def assert_same(completion: Completion, expected: Completion) -> None:
    assert completion.token_ids.tolist() == expected.token_ids.tolist()
    assert completion.finish_reason == "length"
    np.testing.assert_allclose(completion.logprobs, expected.logprobs, atol=1e-5)


async def test_an_engine_that_does_not_answer_is_skipped(
    engine_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with SGLangEngine(engine_url) as engine, SGLangEngine("http://127.0.0.1:9") as gone:
        with pytest.raises(EngineUnavailable):
            await gone.health()
        await fall_asleep([engine, gone], KV)
        await wake([engine, gone], KV)
        assert len(await engine.generate("g", PROMPT, GREEDY)) == 200
    assert caplog.text.count("an engine does not answer, so it keeps its memory as it is") == 2


def test_an_error_in_a_step_is_not_hidden_by_an_engine_that_does_not_wake(
    group: Ranks, store: Store, engine_url: str, run_dir: Path, model_folder: Path
) -> None:
    class Sleeper(SGLangEngine):
        async def resume_memory(self, kinds: Sequence[MemoryKind]) -> None:
            await super().resume_memory(kinds)
            raise EngineError("it has no memory left")

    policy = load_policy(model_folder, group)
    with (
        publisher(policy, group, store, [Sleeper(engine_url)], run_dir, model_folder) as out,
        pytest.raises(Stopped),
        out.engines_asleep(KV),
    ):
        raise Stopped
    resume(engine_url)
