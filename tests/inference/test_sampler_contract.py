"""The contract of `Sampler`, for each implementation: scripted, embedded, SGLang, vLLM, pools of
them, in-process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
import pytest
from inference_support import PATIENCE_S, VOCAB, client_of, prompt_of
from real_vllm import VLLMUrl
from scripted_sampler import ScriptedSampler
from vllm_stand_in import VLLMStandIn

from areal_agents.core.completion import SamplingParams, TokenChunk
from areal_agents.errors import EngineRejected, EngineUnavailable
from areal_agents.inference import SGLangEngine, running_engine
from areal_agents.inference.engine import Sampler
from areal_agents.inference.pool import EnginePool
from areal_agents.rendering import ChatRenderer
from areal_agents.testing import ScriptedApp, filler, running
from areal_agents.testing.tokenizer import read_tokenizer

MODEL = Path(__file__).parents[2] / "examples" / "search_agent" / "model"
LENGTH = 12
PARAMS = SamplingParams(LENGTH, ignore_eos=True)
SAMPLERS = [
    "scripted",
    "embedded",
    "pool of scripted",
    "pool of embedded",
    "in the process",
    pytest.param("sglang", marks=pytest.mark.sglang),
    "vllm stand-in",
    pytest.param("vllm", marks=pytest.mark.vllm),
]


def scripted() -> ScriptedApp:
    tokenizer, stop_token_id = read_tokenizer(MODEL)
    script = filler(400, tokenizer, stop_token_id=stop_token_id, chunk_tokens=2, chunk_delay_s=0.001)
    return ScriptedApp(tokenizer, script, stop_token_id=stop_token_id, context_length=512)


def in_process() -> Sampler:
    renderer = ChatRenderer.from_folder(MODEL)
    return ScriptedSampler(renderer, lambda call: [5] * 400, max_context=512, token_delay_s=0.001)


def over_http(urls: list[str]) -> Sampler:
    engines = [client_of(url, request_timeout_s=PATIENCE_S) for url in urls]
    return engines[0] if len(engines) == 1 else EnginePool(engines, names=urls)


@pytest.fixture(scope="module", params=SAMPLERS)
def urls(request: pytest.FixtureRequest, model_folder: Path) -> Iterator[list[str]]:
    """The servers of one sampler: two for a pool, none for a sampler within the process."""
    kind = request.param
    if kind == "in the process":
        yield []
        return
    if kind in ("sglang", "vllm"):
        yield [request.getfixturevalue(f"{kind}_url")]
        return
    if kind == "vllm stand-in":
        with running_engine(model_folder, threads=1, slots=4, max_context=512) as engine:
            server = VLLMStandIn(engine)
            with running(server.app) as url:
                yield [VLLMUrl(url)]
                httpx.post(f"{url}/close")
        return
    with ExitStack() as stack:
        count = 2 if kind.startswith("pool") else 1
        if kind.endswith("scripted"):
            yield [stack.enter_context(running(scripted())) for _ in range(count)]
        else:
            options = {"threads": 1, "slots": 4, "max_context": 512}
            yield [stack.enter_context(running_engine(model_folder, **options)) for _ in range(count)]


@pytest.fixture
async def sampler(urls: list[str]) -> AsyncIterator[Sampler]:
    made = over_http(urls) if urls else in_process()
    yield made
    await made.aclose()


async def test_a_completion_is_aligned_within_its_limit_and_of_the_served_version(sampler: Sampler) -> None:
    info = await sampler.model_info()
    done = await sampler.generate("a", prompt_of(20), PARAMS)
    assert 1 <= len(done.token_ids) == len(done.logprobs) == len(done.versions) <= LENGTH
    assert done.finish_reason == "length" and len(done.token_ids) == LENGTH
    assert done.token_ids.min() >= 0 and done.token_ids.max() < info.vocab_size
    assert np.isfinite(done.logprobs).all() and done.logprobs.max() <= 1e-4
    assert set(done.versions.tolist()) == {info.version}


async def test_the_pieces_of_a_stream_add_up_to_the_completion(sampler: Sampler) -> None:
    pieces: list[TokenChunk] = []
    done = await sampler.generate("s", prompt_of(20), PARAMS, pieces.append, affinity="episode")
    assert [i for piece in pieces for i in piece.token_ids] == done.token_ids.tolist()
    np.testing.assert_allclose([p for piece in pieces for p in piece.logprobs], done.logprobs)


async def test_the_pieces_of_a_stream_have_the_requested_size(sampler: Sampler) -> None:
    pieces: list[TokenChunk] = []
    params, interval = SamplingParams(300, ignore_eos=True), 32
    done = await sampler.generate("i", prompt_of(20), params, pieces.append, stream_interval=interval)
    sizes = [len(piece.token_ids) for piece in pieces]
    assert [i for piece in pieces for i in piece.token_ids] == done.token_ids.tolist()
    assert sum(sizes) == 300
    # The first piece is sent at once, and the last has the rest. On a busy machine there may be no others.
    assert min(sizes[1:-1], default=interval) >= interval


async def test_an_exception_of_a_listener_ends_the_call_and_the_sampler_continues_to_serve(
    sampler: Sampler,
) -> None:
    def refuse(piece: TokenChunk) -> None:
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        await sampler.generate("r", prompt_of(20), PARAMS, refuse)
    assert len((await sampler.generate("r2", prompt_of(20), PARAMS)).token_ids) == LENGTH


async def test_a_cancelled_call_ends_and_the_sampler_continues_to_serve(sampler: Sampler) -> None:
    first: asyncio.Event = asyncio.Event()
    call = asyncio.create_task(
        sampler.generate("c", prompt_of(20), SamplingParams(300, ignore_eos=True), lambda _: first.set())
    )
    async with asyncio.timeout(PATIENCE_S):
        await first.wait()
    call.cancel()
    await asyncio.wait([call], timeout=PATIENCE_S)
    assert call.cancelled() or call.done()
    assert len((await sampler.generate("c2", prompt_of(20), PARAMS)).token_ids) == LENGTH


async def test_each_of_several_concurrent_calls_is_answered(sampler: Sampler) -> None:
    calls = [sampler.generate(f"n{i}", prompt_of(10 + i), PARAMS, affinity=f"e{i % 3}") for i in range(8)]
    done = await asyncio.gather(*calls)
    assert [len(one.token_ids) for one in done] == [LENGTH] * 8


async def test_a_prompt_that_cannot_be_served_is_refused(sampler: Sampler) -> None:
    info = await sampler.model_info()
    with pytest.raises(EngineRejected):
        await sampler.generate("w", np.array([3, info.vocab_size], np.int32), PARAMS)
    with pytest.raises(EngineRejected):
        await sampler.generate("l", prompt_of(info.max_context + 1), PARAMS)
    await sampler.health()


async def test_an_unreachable_engine_is_unavailable() -> None:
    async with SGLangEngine("http://127.0.0.1:9", request_timeout_s=1.0) as gone:
        with pytest.raises(EngineUnavailable):
            await gone.generate("g", prompt_of(VOCAB // 64), PARAMS)
