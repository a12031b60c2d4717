"""A swap of weights during a generation: which policy sampled each token, compared with transformers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inference_support import (
    EMBEDDED,
    FREEZING,
    PATIENCE_S,
    Missed,
    again_if_missed,
    build_model,
    client_of,
    fresh_ids,
    load_reference,
    prompt_of,
    reference_greedy,
    reference_logprobs,
)
from test_engine_contract import until_running

from areal_agents.core.completion import Completion, SamplingParams, TokenIds
from areal_agents.errors import EngineError, EngineRejected
from areal_agents.inference import PauseMode, SGLangEngine
from areal_agents.inference.pool import EnginePool

REAL = pytest.param("sglang", marks=pytest.mark.sglang)
LONG = SamplingParams(1500, temperature=0.0, ignore_eos=True)


@pytest.fixture
async def engine(swapping_url: str, model_folder: Path) -> AsyncIterator[SGLangEngine]:
    """The engine, with version 0 before and after the test."""
    async with fresh_ids(swapping_url) as client:
        await client.update_weights_from_disk(str(model_folder), 0)
        yield client
        await client.resume()
        await client.update_weights_from_disk(str(model_folder), 0)


async def swap_in_mid_generation(
    engine: SGLangEngine, folder: Path, mode: PauseMode, prompts: list[TokenIds], version: int = 7
) -> list[Completion]:
    tasks = [asyncio.create_task(engine.generate(f"x{i}", p, LONG)) for i, p in enumerate(prompts)]
    await until_running(engine, *tasks, count=min(len(prompts), 2))
    await asyncio.sleep(0.02)
    await engine.pause(mode)
    await engine.update_weights_from_disk(str(folder), version)
    await engine.resume()
    return list(await asyncio.gather(*tasks))


def boundary(completion: Completion) -> int:
    """Return the index of the first token of the new version; the versions are [0, .., 0, 7, .., 7].

    Raise Missed if the swap came before the first token or after the last.
    """
    if len(set(completion.versions)) == 1:
        raise Missed
    changes = np.flatnonzero(np.diff(completion.versions))
    assert completion.versions[0] == 0 and completion.versions[-1] == 7 and len(changes) == 1
    return int(changes[0]) + 1


@again_if_missed
async def test_after_a_retraction_the_prefix_is_recomputed_and_every_token_has_its_version(
    engine: SGLangEngine, model_folder: Path, next_model_folder: Path
) -> None:
    old, new = load_reference(model_folder), load_reference(next_model_folder)
    prompts = [prompt_of(40, seed=1), prompt_of(25, seed=2)]
    done = await swap_in_mid_generation(engine, next_model_folder, "retract", prompts)
    for prompt, completion in zip(prompts, done, strict=True):
        b = boundary(completion)
        assert len(completion) == 1500
        before = reference_logprobs(old, prompt, completion.token_ids)
        after = reference_logprobs(new, prompt, completion.token_ids)
        np.testing.assert_allclose(completion.logprobs[:b], before[:b], atol=1e-4)
        np.testing.assert_allclose(completion.logprobs[b:], after[b:], atol=1e-4)
        assert abs(completion.logprobs[b] - before[b]) > 1e-3
    assert (await engine.model_info()).version == 7


@again_if_missed
async def test_an_aborted_generation_continues_through_the_pool_with_the_new_weights(
    engine: SGLangEngine, swapping_url: str, model_folder: Path, next_model_folder: Path
) -> None:
    old, new = load_reference(model_folder), load_reference(next_model_folder)
    prompt = prompt_of(40, seed=6)
    async with aclosing(EnginePool([client_of(swapping_url)])) as pool:
        running = asyncio.create_task(pool.generate("x", prompt, LONG))
        await until_running(engine, running)
        await asyncio.sleep(0.02)
        await engine.pause("abort")
        await engine.update_weights_from_disk(str(next_model_folder), 7)
        await engine.resume()
        completion = await running
    b = boundary(completion)
    assert len(completion) == 1500 and completion.finish_reason == "length"
    before = reference_logprobs(old, prompt, completion.token_ids)
    after = reference_logprobs(new, prompt, completion.token_ids)
    np.testing.assert_allclose(completion.logprobs[:b], before[:b], atol=1e-4)
    np.testing.assert_allclose(completion.logprobs[b:], after[b:], atol=1e-4)
    assert abs(completion.logprobs[b] - before[b]) > 1e-3


@torch.inference_mode()
def mixed_logprobs(old, new, prompt: TokenIds, completion: Completion, b: int) -> np.ndarray:  # noqa: ANN001
    """Return logprobs from token b on, by `new` with the keys and values that `old` computed before."""
    ids = torch.from_numpy(np.concatenate([prompt, completion.token_ids]).astype(np.int64))[None]
    kept = len(prompt) + b - 1  # the last token before the swap had not been computed yet
    cache = old(ids[:, :kept], use_cache=True).past_key_values
    logits = new(ids[:, kept:-1], past_key_values=cache).logits[0]
    return torch.log_softmax(logits, dim=-1).gather(1, ids[0, kept + 1 :, None])[:, 0].numpy()


@pytest.mark.parametrize("swapping_url", FREEZING, indirect=True)
@again_if_missed
async def test_after_an_in_place_swap_the_old_keys_and_values_are_used_by_the_running_call_only(
    engine: SGLangEngine, model_folder: Path, next_model_folder: Path
) -> None:
    old, new = load_reference(model_folder), load_reference(next_model_folder)
    prompt = prompt_of(40, seed=3)
    [completion] = await swap_in_mid_generation(engine, next_model_folder, "in_place", [prompt])
    b = boundary(completion)
    before = reference_logprobs(old, prompt, completion.token_ids)
    np.testing.assert_allclose(completion.logprobs[:b], before[:b], atol=1e-4)
    mixed = mixed_logprobs(old, new, prompt, completion, b)
    np.testing.assert_allclose(completion.logprobs[b:], mixed, atol=1e-4)
    pure = reference_logprobs(new, prompt, completion.token_ids)
    assert np.abs(completion.logprobs[b:] - pure[b:]).max() > 1e-3

    again = await engine.generate("again", prompt, SamplingParams(30, temperature=0.0, ignore_eos=True))
    assert again.token_ids.tolist() == reference_greedy(new, prompt, 30).tolist()
    assert again.versions.tolist() == [7] * 30


@pytest.mark.parametrize("swapping_url", [REAL], indirect=True)
async def test_a_server_with_the_overlap_schedule_is_not_paused_in_place(engine: SGLangEngine) -> None:
    """It would label one token of each request, sampled by the old weights, with the new version."""
    with pytest.raises(EngineError, match="--disable-overlap-schedule"):
        await engine.pause("in_place")


async def test_a_prefix_of_the_old_version_is_never_reused(
    engine: SGLangEngine, model_folder: Path, next_model_folder: Path
) -> None:
    prompt, params = prompt_of(120, seed=4), SamplingParams(20, temperature=0.0, ignore_eos=True)
    first = await engine.generate("a", prompt, params)
    await engine.update_weights_from_disk(str(next_model_folder), 1)
    second = await engine.generate("b", prompt, params)
    assert first.token_ids.tolist() == reference_greedy(load_reference(model_folder), prompt, 20).tolist()
    assert (
        second.token_ids.tolist() == reference_greedy(load_reference(next_model_folder), prompt, 20).tolist()
    )
    assert second.versions.tolist() == [1] * 20


# A real SGLang must have no prefix cache for it, see docs/sglang.md; vLLM retracts requests instead.
@pytest.mark.parametrize("swapping_url", FREEZING, indirect=True)
@again_if_missed
async def test_without_a_pause_a_swap_waits_for_running_requests_and_holds_new_ones(
    engine: SGLangEngine, model_folder: Path, next_model_folder: Path
) -> None:
    running = asyncio.create_task(engine.generate("r", prompt_of(30, seed=5), LONG))
    await until_running(engine, running)
    swap = asyncio.create_task(engine.update_weights_from_disk(str(next_model_folder), 3))
    await asyncio.sleep(0.05)
    later = asyncio.create_task(engine.generate("l", prompt_of(30, seed=5), LONG))
    before, after, _ = await asyncio.gather(running, later, swap)
    assert before.versions.tolist() == [0] * 1500
    if not after.versions.any():  # the later request ran before the swap
        raise Missed
    assert after.versions.tolist() == [3] * 1500


@pytest.mark.parametrize("swapping_url", [REAL], indirect=True)
@pytest.mark.parametrize("pause", [None, "abort"])
async def test_a_server_accepts_weights_at_the_moment_when_its_last_request_ends(
    engine: SGLangEngine, model_folder: Path, next_model_folder: Path, pause: PauseMode | None
) -> None:
    """Its scheduler has already begun another step for that request, and cannot flush its cache then."""
    folders = [model_folder, next_model_folder]
    for version in range(60):
        params = SamplingParams(40 + version % 7, temperature=0.0, ignore_eos=True)
        running = asyncio.create_task(engine.generate(f"e{version}", prompt_of(30, seed=version), params))
        if pause is not None:
            await running
            await engine.pause(pause)
        else:
            await asyncio.sleep(0.005 * (version % 4))
        await engine.update_weights_from_disk(str(folders[version % 2]), version)
        await engine.resume()
        assert len(await running) == params.max_new_tokens
    assert (await engine.model_info()).version == 59


async def test_a_request_that_arrived_during_the_pause_runs_with_the_new_weights(
    engine: SGLangEngine, next_model_folder: Path
) -> None:
    await engine.pause("retract")
    task = asyncio.create_task(engine.generate("p", prompt_of(30), SamplingParams(5, ignore_eos=True)))
    await asyncio.sleep(0.05)
    await engine.update_weights_from_disk(str(next_model_folder), 4)
    assert not task.done()
    await engine.resume()
    assert (await task).versions.tolist() == [4] * 5


async def test_missing_weights_are_refused_and_the_old_ones_kept(
    engine: SGLangEngine, model_folder: Path, tmp_path: Path
) -> None:
    before = await engine.checksum()
    with pytest.raises(EngineRejected, match=r"\(400\)"):
        await engine.update_weights_from_disk(str(tmp_path / "nowhere"), 9)
    await assert_serves_version_0(engine, model_folder)
    assert await engine.checksum() == before


@pytest.mark.parametrize("swapping_url", EMBEDDED, indirect=True)
async def test_weights_of_other_shapes_are_refused_and_the_old_ones_kept(
    engine: SGLangEngine, model_folder: Path, tmp_path: Path
) -> None:
    """A real SGLang exits instead, whatever the transport, see docs/sglang.md."""
    larger = build_model(tmp_path / "larger", hidden_size=96)
    with pytest.raises(EngineRejected, match="expected"):
        await engine.update_weights_from_disk(str(larger), 9)
    await assert_serves_version_0(engine, model_folder)


async def assert_serves_version_0(engine: SGLangEngine, model_folder: Path) -> None:
    prompt, params = prompt_of(30, seed=6), SamplingParams(20, temperature=0.0, ignore_eos=True)
    completion = await engine.generate("k", prompt, params)
    expected = reference_greedy(load_reference(model_folder), prompt, 20).tolist()
    assert completion.token_ids.tolist() == expected
    assert completion.versions.tolist() == [0] * 20


async def test_the_checksum_differs_between_weights_and_is_the_same_for_equal_ones(
    engine: SGLangEngine, model_folder: Path, next_model_folder: Path
) -> None:
    first = await engine.checksum()
    await engine.update_weights_from_disk(str(next_model_folder), 1)
    second = await engine.checksum()
    await engine.update_weights_from_disk(str(model_folder), 2)
    assert first != second
    assert await engine.checksum() == first


async def test_a_version_that_is_no_integer_is_an_error(engine: SGLangEngine) -> None:
    await engine._call("POST", "/update_weight_version", {"new_version": "step-3"})
    with pytest.raises(EngineError, match="step-3"):
        await engine.generate("v", prompt_of(5), SamplingParams(3))
    await engine._call("POST", "/update_weight_version", {"new_version": "12", "abort_all_requests": False})
    assert (await engine.generate("w", prompt_of(5), SamplingParams(3))).versions.tolist()[-1] == 12


async def flushed(engine: SGLangEngine) -> None:
    """Flush the cache as soon as the server has released the request that it has just answered."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await engine._call("POST", "/flush_cache", {})
                return
            except EngineRejected:
                await asyncio.sleep(0.1)


@pytest.mark.parametrize("swapping_url", FREEZING, indirect=True)
@again_if_missed
async def test_flush_is_refused_while_requests_are_frozen(engine: SGLangEngine) -> None:
    task = asyncio.create_task(engine.generate("f", prompt_of(30, seed=7), LONG))
    await until_running(engine, task)
    await engine.pause("in_place")
    await check_refused(engine, task, "/flush_cache", {}, "flush")
    await engine.resume()
    assert (await task).versions.tolist() == [0] * 1500
    await flushed(engine)


async def check_refused(
    engine: SGLangEngine, frozen: asyncio.Task[Completion], path: str, body: dict[str, Any], said: str
) -> None:
    """Check that a request is refused because of a frozen call; raise Missed if the call ended before."""
    try:
        await engine._call("POST", path, body)
    except EngineRejected as refused:
        assert said in str(refused).lower()
    else:
        await engine.resume()
        await frozen
        raise Missed


@pytest.mark.parametrize("swapping_url", EMBEDDED, indirect=True)
@again_if_missed
async def test_a_swap_that_would_flush_frozen_requests_is_refused(
    engine: SGLangEngine, model_folder: Path, next_model_folder: Path
) -> None:
    """A real SGLang exits instead; the client never requests it."""
    task = asyncio.create_task(engine.generate("f", prompt_of(30, seed=7), LONG))
    await until_running(engine, task)
    await engine.pause("in_place")
    body = {"model_path": str(next_model_folder), "weight_version": "5", "flush_cache": True}
    await check_refused(engine, task, "/update_weights_from_disk", body, "send flush_cache false")
    await engine.resume()
    assert (await task).versions.tolist() == [0] * 1500
