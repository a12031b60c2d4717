"""A real vLLM: broadcasts, adapters, and refusals of its workers. The contract tests run on it as well."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
from inference_support import (
    FreshVLLMIds,
    again_if_missed,
    build_model,
    load_reference,
    prompt_of,
    reference_greedy,
    reference_logprobs,
)
from real_vllm import VLLMUrl, running_vllm
from test_engine_contract import until_running
from test_weight_swap import assert_serves_version_0, boundary
from weights_support import (
    adapted_reference,
    by_broadcast,
    fresh_group,
    joined,
    send,
    weights_of,
    write_adapter,
)

from areal_agents.core.completion import SamplingParams
from areal_agents.errors import EngineRejected
from areal_agents.inference.engine import WeightBucket, adapter_name

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

SHORT = SamplingParams(20, temperature=0.0, ignore_eos=True)


@pytest.fixture
async def engine(vllm_url: VLLMUrl, model_folder: Path) -> AsyncIterator[FreshVLLMIds]:
    """The engine with version 0, whatever state the previous test left it in."""
    async with FreshVLLMIds(vllm_url) as client:
        await client.resume()
        await client.update_weights_from_disk(str(model_folder), 0)
        yield client


@again_if_missed
async def test_every_token_gets_its_version_if_a_broadcast_arrives_during_a_generation(
    engine: FreshVLLMIds, model_folder: Path, next_model_folder: Path
) -> None:
    prompt, params = prompt_of(40, seed=2), SamplingParams(300, temperature=0.0, ignore_eos=True)
    task = asyncio.create_task(engine.generate("x", prompt, params))
    await until_running(engine, task)
    await asyncio.sleep(0.05)
    await engine.pause("retract")
    await by_broadcast(engine, next_model_folder, 7)
    await engine.resume()
    completion = await task
    b = boundary(completion)
    before = reference_logprobs(load_reference(model_folder), prompt, completion.token_ids)
    after = reference_logprobs(load_reference(next_model_folder), prompt, completion.token_ids)
    np.testing.assert_allclose(completion.logprobs[:b], before[:b], atol=1e-4)
    np.testing.assert_allclose(completion.logprobs[b:], after[b:], atol=1e-4)
    assert abs(completion.logprobs[b] - before[b]) > 1e-3
    assert (await engine.model_info()).version == 7


async def test_an_update_that_a_lost_trainer_left_open_is_given_up(
    engine: FreshVLLMIds, model_folder: Path, next_model_folder: Path
) -> None:
    """Half of the weights have arrived; version 0 is loaded again, and the next update is complete."""
    named = weights_of(next_model_folder)
    await engine.pause("retract")
    async with joined(engine) as (group, name):
        await engine.begin_weight_update()
        await send(engine, group, name, named[:7], 9, last=False)
    await engine.abandon_weight_update()
    await engine.resume()
    await assert_serves_version_0(engine, model_folder)
    await engine.pause("retract")
    await by_broadcast(engine, next_model_folder, 4)
    await engine.resume()
    done = await engine.generate("a", prompt_of(30), SHORT)
    assert (
        done.token_ids.tolist()
        == reference_greedy(load_reference(next_model_folder), prompt_of(30), 20).tolist()
    )
    assert done.versions.tolist() == [4] * 20


async def test_invalid_update_requests_are_refused_and_change_nothing(
    engine: FreshVLLMIds, model_folder: Path, tmp_path: Path
) -> None:
    bucket = WeightBucket(("model.norm.weight",), ("float32",), ((64,),))
    with pytest.raises(EngineRejected, match="between begin_weight_update and end"):
        await engine.receive_weights(bucket, group="nobody", version=9, last=True)
    with pytest.raises(EngineRejected, match="no update to end"):
        await engine.end_weight_update()
    await engine.begin_weight_update()
    with pytest.raises(EngineRejected, match="was not joined"):
        await engine.receive_weights(bucket, group="nobody", version=9, last=True)
    await engine.abandon_weight_update()
    with pytest.raises(EngineRejected, match="does not exist"):
        await engine.leave_weight_group("nobody")
    with fresh_group() as group, pytest.raises(EngineRejected, match="nccl does not fit an engine on cpu"):
        await engine.join_weight_group(type(group)(group.address, group.port, 1, 2, group.name, "nccl"))
    larger = build_model(tmp_path / "larger", hidden_size=96)
    with pytest.raises(EngineRejected, match=r"has the shape .*expected"):
        await engine.update_weights_from_disk(str(larger), 9)
    await assert_serves_version_0(engine, model_folder)


@pytest.fixture(scope="module")
def adapters_url(vllm_python: str, model_folder: Path) -> Iterator[VLLMUrl]:
    """A server with adapters, as a run with `trainer.lora` starts it."""
    with running_vllm(vllm_python, model_folder, lora_rank=4) as url:
        yield url


async def test_each_version_is_sampled_with_its_adapter(
    adapters_url: VLLMUrl, model_folder: Path, tmp_path: Path
) -> None:
    prompt = prompt_of(30, seed=5)
    async with FreshVLLMIds(adapters_url, adapters=True) as engine:
        base = await engine.generate("b", prompt, SHORT)
        expected = reference_greedy(load_reference(model_folder), prompt, 20)
        assert base.token_ids.tolist() == expected.tolist() and set(base.versions.tolist()) == {0}
        for version in (1, 2):
            folder = write_adapter(tmp_path / str(version), model_folder, seed=version)
            await engine.load_adapter(adapter_name(version), str(folder))
            await engine.set_version(version, abort_running=True)
            done = await engine.generate("a", prompt, SHORT)
            reference = adapted_reference(model_folder, folder)
            assert set(done.versions.tolist()) == {version}
            expected = reference_logprobs(reference, prompt, done.token_ids)
            np.testing.assert_allclose(done.logprobs, expected, atol=1e-3)
            scores = await engine.score("s", prompt, start=5, top=2)
            given = reference_logprobs(reference, prompt[:5], prompt[5:])
            np.testing.assert_allclose(scores.token_logprobs, given, atol=1e-3)
            assert scores.version == version
        await engine.unload_adapter(adapter_name(1))
        assert (await engine.generate("c", prompt, SHORT)).token_ids.tolist() == done.token_ids.tolist()
