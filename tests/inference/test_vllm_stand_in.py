"""The client of vLLM with a stand-in that speaks its API: swaps, refusals, and checks of the client.

Tests that need the real server are in test_vllm.py and, with the mark `vllm`, among the contract tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inference_support import (
    FreshVLLMIds,
    again_if_missed,
    load_reference,
    prompt_of,
    reference_greedy,
    reference_logprobs,
)
from real_vllm import VLLMUrl
from test_engine_contract import check_aborted
from vllm_stand_in import VLLMStandIn

from areal_agents.core.completion import SamplingParams, TokenChunk
from areal_agents.errors import EngineError, EngineRejected, EngineUnavailable
from areal_agents.inference import running_engine
from areal_agents.inference.engine import WeightBucket
from areal_agents.inference.vllm.client import VLLMEngine
from areal_agents.testing import running

GREEDY = SamplingParams(20, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def engine_url(model_folder: Path) -> Iterator[str]:
    with running_engine(model_folder, threads=1, slots=4, max_context=2048) as url:
        yield url


@pytest.fixture
def server(engine_url: str) -> VLLMStandIn:
    return VLLMStandIn(engine_url)


@pytest.fixture
async def engine(server: VLLMStandIn, model_folder: Path) -> AsyncIterator[VLLMEngine]:
    with running(server.app) as url:
        async with FreshVLLMIds(VLLMUrl(url)) as client:
            yield client
            server.answers.clear()
            await client.resume()
            await client.update_weights_from_disk(str(model_folder), 0)
            await client._call("POST", "/close")


async def test_tokens_logprobs_and_versions_are_those_of_the_model(
    engine: VLLMEngine, model_folder: Path
) -> None:
    prompt = prompt_of(30, seed=1)
    pieces: list[TokenChunk] = []
    params = SamplingParams(20, temperature=0.7, ignore_eos=True, seed=3, top_logprobs=4)
    streamed = await engine.generate("s", prompt, params, pieces.append, stream_interval=6)
    whole = await engine.generate("w", prompt, params)
    assert streamed.token_ids.tolist() == whole.token_ids.tolist()
    assert all(piece.versions == () for piece in pieces)  # vLLM reports them at the end
    expected = reference_logprobs(load_reference(model_folder), prompt, whole.token_ids, temperature=0.7)
    np.testing.assert_allclose(whole.logprobs, expected, atol=2e-5)
    assert whole.versions.tolist() == [0] * 20 and whole.finish_reason == "length"
    assert [len(best) for best in whole.top_logprobs] == [4] * 20
    assert streamed.top_logprobs == whole.top_logprobs
    assert all(best[0][1] >= best[-1][1] for best in whole.top_logprobs)


async def test_the_weights_of_a_folder_and_their_version_are_swapped_in_one_pause(
    engine: VLLMEngine, server: VLLMStandIn, next_model_folder: Path
) -> None:
    await engine.update_weights_from_disk(str(next_model_folder), 7)
    assert server.calls == [
        "pause", "reset_prefix_cache", "areal_load_folder", "update_weight_version", "resume",
    ]  # fmt: skip
    done = await engine.generate("a", prompt_of(30), GREEDY)
    assert done.versions.tolist() == [7] * 20 and (await engine.model_info()).version == 7
    expected = reference_greedy(load_reference(next_model_folder), prompt_of(30), 20)
    assert done.token_ids.tolist() == expected.tolist()

    server.calls.clear()
    await engine.pause("retract")
    await engine.update_weights_from_disk(str(next_model_folder), 8)
    assert server.calls == ["pause", "reset_prefix_cache", "areal_load_folder", "update_weight_version"]
    await engine.resume()  # the caller resumes what it paused itself


async def test_a_missing_folder_is_refused_and_the_version_stays(
    engine: VLLMEngine, server: VLLMStandIn, tmp_path: Path
) -> None:
    with pytest.raises(EngineRejected, match=r"refused load_folder \(400\)"):
        await engine.update_weights_from_disk(str(tmp_path / "nowhere"), 9)
    assert (server.version, server.is_paused) == ("default", False)


@again_if_missed
async def test_a_pause_that_aborts_ends_what_runs_and_holds_what_comes(engine: VLLMEngine) -> None:
    begun = asyncio.Event()
    long = SamplingParams(1900, temperature=0.0, ignore_eos=True)
    call = asyncio.create_task(engine.generate("r", prompt_of(30), long, lambda _: begun.set()))
    await asyncio.wait_for(begun.wait(), 60)
    await engine.pause("abort")
    done = await asyncio.wait_for(call, 60)
    check_aborted(done)
    assert 0 < len(done) < 1900
    assert set(done.versions.tolist()) == {0}
    held = asyncio.create_task(engine.generate("h", prompt_of(30), GREEDY))
    await engine.update_weights_from_disk((await engine.model_info()).model_path, 3)
    assert not held.done()
    await engine.resume()
    assert (await held).versions.tolist() == [3] * 20


async def test_unsupported_operations_are_refused_with_an_alternative(engine: VLLMEngine) -> None:
    with pytest.raises(EngineRejected, match="in_place.*use retract"):
        await engine.pause("in_place")
    with pytest.raises(EngineRejected, match="no tensors in requests; use .*disk, broadcast"):
        await engine.update_weights_from_tensors(["x"], 1)
    with pytest.raises(EngineRejected, match="use engine.colocate"):
        await engine.release_memory(["kv_cache"])
    with pytest.raises(EngineRejected, match="routed experts"):
        await engine.generate("e", prompt_of(5), SamplingParams(3, routed_experts_from=0))


async def test_a_server_that_was_started_with_other_settings_is_refused(
    engine: VLLMEngine, server: VLLMStandIn
) -> None:
    described = {
        "model_path": "/m", "vocab_size": 256, "max_model_len": 512, "model_type": "qwen3", "workers": 1,
    }  # fmt: skip
    server.answers["areal_describe"] = described | {"logprobs_mode": "raw_logprobs", "pipeline": 1}
    with pytest.raises(EngineError, match="--logprobs-mode raw_logprobs; use processed_logprobs"):
        await engine.model_info()
    server.answers["areal_describe"] = described | {"logprobs_mode": "processed_logprobs", "pipeline": 2}
    with pytest.raises(EngineError, match="data parallelism, which is not supported"):
        await engine.model_info()


async def test_the_failure_of_a_worker_is_not_a_refusal(engine: VLLMEngine, server: VLLMStandIn) -> None:
    """A refusal keeps the old weights; after a failure the state of the weights is unknown."""
    server.answers["areal_receive"] = {"error": "RuntimeError: the connection was closed", "failed": True}
    bucket = WeightBucket(("model.norm.weight",), ("float32",), ((64,),))
    with pytest.raises(EngineError, match="connection was closed") as raised:
        await engine.receive_weights(bucket, group="g", version=1, last=True)
    assert not isinstance(raised.value, EngineRejected | EngineUnavailable)


async def test_abandoning_an_update_restores_the_first_version(
    engine: VLLMEngine, server: VLLMStandIn, model_folder: Path
) -> None:
    await engine.update_weights_from_disk(str(model_folder), 4)
    server.answers["areal_abandon"] = {"is_reset": False}
    await engine.abandon_weight_update()
    assert server.version == "4"
    server.answers["areal_abandon"] = {"is_reset": True}
    await engine.abandon_weight_update()
    assert server.version == "default" and not server.is_paused


async def test_while_weights_are_loaded_the_previous_version_is_reported(
    engine: VLLMEngine, server: VLLMStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile the part of vLLM that knows the version does not answer, but the rest does."""
    call = engine._http.call

    async def limited(method: str, path: str, *body: Any, **options: Any) -> Any:
        """Wait briefly for the answer that does not come, and long for every other one."""
        is_held = path == "/weight_info" and server.holds_version.is_set()
        return await call(method, path, *body, **options | {"timeout_s": 0.2 if is_held else 60.0})

    monkeypatch.setattr(engine._http, "call", limited)
    info = await engine.model_info()
    server.version = "not to be read"
    server.holds_version.set()
    assert await engine.model_info() == info
    server.holds_version.clear()
    with pytest.raises(EngineError, match="not to be read"):
        await engine.model_info()
    server.version = "default"
