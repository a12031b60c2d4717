"""A policy that is a LoRA adapter: which adapter each call uses, and which version its tokens get."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
from inference_support import (
    FreshIds,
    Missed,
    again_if_missed,
    load_reference,
    prompt_of,
    reference_greedy,
    reference_logprobs,
)
from test_engine_contract import check_aborted, until_running
from transformers import PreTrainedModel
from weights_support import adapted_reference, write_adapter

from areal_agents.core.completion import Completion, SamplingParams, TokenChunk
from areal_agents.errors import EngineRejected
from areal_agents.inference import SGLangEngine
from areal_agents.inference.engine import adapter_name

PROMPT = prompt_of(120, seed=3)
SHORT = SamplingParams(20, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(1200, temperature=0.0, ignore_eos=True)

each_engine = pytest.mark.parametrize(
    "swapping_url", ["numba", pytest.param("sglang", marks=pytest.mark.sglang)], indirect=True
)
one_kernel = pytest.mark.parametrize("swapping_url", ["numba"], indirect=True)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> dict[int, Path]:
    """The adapter folders of versions 1 to 3."""
    folder = tmp_path_factory.mktemp("adapters")
    return {v: write_adapter(folder / f"v{v}", model_folder, seed=v) for v in (1, 2, 3)}


@pytest.fixture(scope="module")
def policies(adapters: dict[int, Path], model_folder: Path) -> dict[int, PreTrainedModel]:
    """The model of every version in transformers; version 0 is the base model."""
    merged = {version: adapted_reference(model_folder, path) for version, path in adapters.items()}
    return {0: load_reference(model_folder), **merged}


@pytest.fixture
async def engine(swapping_url: str, model_folder: Path) -> AsyncIterator[SGLangEngine]:
    """The engine with version 0; adapters are unloaded after the test."""
    async with FreshIds(swapping_url, adapters=True) as client:
        await client.resume()
        await client.update_weights_from_disk(str(model_folder), 0)
        yield client
        await unload_all(client)


async def unload_all(engine: SGLangEngine) -> None:
    for version in (1, 2, 3):
        try:
            await engine.unload_adapter(adapter_name(version))
        except EngineRejected:
            continue  # the test did not load it, or has unloaded it


async def publish(engine: SGLangEngine, adapters: dict[int, Path], version: int) -> None:
    await engine.load_adapter(adapter_name(version), str(adapters[version]))
    await engine.set_version(version, abort_running=True)


async def publish_beside(engine: SGLangEngine, adapters: dict[int, Path], version: int) -> None:
    """Publish a version without aborting running calls."""
    await engine.load_adapter(adapter_name(version), str(adapters[version]))
    await engine.set_version(version, abort_running=False)
    await engine.model_info()


def assert_drawn_by(version: int, policies: dict[int, PreTrainedModel], completion: Completion) -> None:
    assert set(completion.versions.tolist()) == {version}
    expected = reference_logprobs(policies[version], PROMPT, completion.token_ids)
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
    if len(completion) == SHORT.max_new_tokens:
        assert completion.token_ids.tolist() == reference_greedy(policies[version], PROMPT, 20).tolist()


@each_engine
async def test_every_call_gets_the_adapter_of_the_version_served(
    engine: SGLangEngine, adapters: dict[int, Path], policies: dict[int, PreTrainedModel]
) -> None:
    assert_drawn_by(0, policies, await engine.generate("a", PROMPT, SHORT))
    await publish(engine, adapters, 1)
    # The prefix cache has the prompt as computed by the base model, which must not be used.
    assert_drawn_by(1, policies, await engine.generate("b", PROMPT, SHORT))
    await publish(engine, adapters, 2)
    assert_drawn_by(2, policies, await engine.generate("c", PROMPT, SHORT))
    assert (await engine.model_info()).version == 2


@each_engine
async def test_tokens_are_scored_under_the_adapter_of_the_version_served(
    engine: SGLangEngine, adapters: dict[int, Path], policies: dict[int, PreTrainedModel]
) -> None:
    for version in (0, 1, 2):
        if version:
            await publish(engine, adapters, version)
        scores = await engine.score(f"s{version}", PROMPT, start=50, top=1)
        assert scores.version == version
        expected = reference_logprobs(policies[version], PROMPT[:50], PROMPT[50:])
        np.testing.assert_allclose(scores.token_logprobs, expected, atol=1e-4)


@each_engine
@again_if_missed
async def test_a_running_call_keeps_its_adapter_and_its_label(
    engine: SGLangEngine,
    adapters: dict[int, Path],
    policies: dict[int, PreTrainedModel],
    model_folder: Path,
) -> None:
    await unload_all(engine)
    await publish(engine, adapters, 1)
    await engine.model_info()
    chunks: list[TokenChunk] = []
    running = asyncio.create_task(engine.generate("r", PROMPT, LONG, on_tokens=chunks.append))
    await until_running(engine, running)
    await publish_beside(engine, adapters, 2)
    beside = await engine.generate("n", PROMPT, SHORT)  # in the same batches as the first call
    if running.done():
        raise Missed
    unloading = asyncio.create_task(engine.unload_adapter(adapter_name(1)))
    completion = await running
    await unloading
    assert_drawn_by(2, policies, beside)
    assert len(completion) == 1200
    assert_drawn_by(1, policies, completion)
    assert {v for chunk in chunks for v in chunk.versions} == {1}
    assert sum(len(chunk.versions) for chunk in chunks) == 1200


@each_engine
@again_if_missed
async def test_publishing_aborts_running_calls_and_the_next_call_uses_the_new_adapter(
    engine: SGLangEngine,
    adapters: dict[int, Path],
    policies: dict[int, PreTrainedModel],
    model_folder: Path,
) -> None:
    await unload_all(engine)
    await publish(engine, adapters, 1)
    await engine.model_info()
    running = asyncio.create_task(engine.generate("r", PROMPT, LONG))
    await until_running(engine, running)
    await asyncio.sleep(0.05)
    async with SGLangEngine(engine.base_url) as trainer:
        await publish(trainer, adapters, 2)
    partial = await running
    if not len(partial):
        raise Missed
    check_aborted(partial)
    assert len(partial) < 1200
    assert_drawn_by(1, policies, partial)
    assert_drawn_by(2, policies, await engine.generate("next", PROMPT, SHORT))


@one_kernel
async def test_a_call_for_an_unloaded_adapter_uses_the_current_adapter(
    engine: SGLangEngine, adapters: dict[int, Path], policies: dict[int, PreTrainedModel]
) -> None:
    await publish(engine, adapters, 1)
    await engine.model_info()
    async with SGLangEngine(engine.base_url) as trainer:
        await publish(trainer, adapters, 2)
        await trainer.unload_adapter(adapter_name(1))
        assert_drawn_by(2, policies, await engine.generate("late", PROMPT, SHORT))
        await trainer.unload_adapter(adapter_name(2))  # now the served version has no adapter
    with pytest.raises(EngineRejected, match="'policy-2' is not loaded; loaded are none"):
        await engine.generate("lost", PROMPT, SHORT)


@one_kernel
async def test_adapters_follow_new_base_weights(
    engine: SGLangEngine, adapters: dict[int, Path], next_model_folder: Path
) -> None:
    await publish(engine, adapters, 1)
    await engine.update_weights_from_disk(str(next_model_folder), 1)
    moved = {1: adapted_reference(next_model_folder, adapters[1])}
    assert_drawn_by(1, moved, await engine.generate("m", PROMPT, SHORT))


@one_kernel
@again_if_missed
async def test_a_running_call_survives_unloading_of_its_adapter_and_new_base_weights(
    engine: SGLangEngine, adapters: dict[int, Path], model_folder: Path, next_model_folder: Path
) -> None:
    await unload_all(engine)
    await publish(engine, adapters, 1)
    await engine.model_info()
    running = asyncio.create_task(engine.generate("r", PROMPT, LONG))
    await until_running(engine, running)
    unloading = asyncio.create_task(engine.unload_adapter(adapter_name(1)))
    await publish_beside(engine, adapters, 2)
    await engine.pause("retract")
    await engine.update_weights_from_disk(str(next_model_folder), 2)
    await engine.resume()
    was_early = unloading.done()
    assert (await running).versions.tolist() == [1] * 1200
    await unloading
    if was_early:
        raise Missed
    moved = {2: adapted_reference(next_model_folder, adapters[2])}
    assert_drawn_by(2, moved, await engine.generate("n", PROMPT, SHORT))


@one_kernel
async def test_an_adapter_loaded_under_an_earlier_name_reuses_nothing_of_the_earlier_adapter(
    engine: SGLangEngine, adapters: dict[int, Path], policies: dict[int, PreTrainedModel]
) -> None:
    await publish(engine, adapters, 1)
    await engine.model_info()
    assert_drawn_by(1, policies, await engine.generate("a", PROMPT, SHORT))
    await engine.unload_adapter(adapter_name(1))
    await engine.load_adapter(adapter_name(1), str(adapters[2]))
    assert_drawn_by(1, {1: policies[2]}, await engine.generate("b", PROMPT, SHORT))


@each_engine
async def test_a_name_that_is_already_loaded_and_a_missing_folder_are_refused(
    engine: SGLangEngine, adapters: dict[int, Path], tmp_path: Path, policies: dict[int, PreTrainedModel]
) -> None:
    await publish(engine, adapters, 1)
    with pytest.raises(EngineRejected, match="already loaded"):
        await engine.load_adapter(adapter_name(1), str(adapters[2]))
    with pytest.raises(EngineRejected, match="nowhere"):
        await engine.load_adapter(adapter_name(3), str(tmp_path / "nowhere"))
    await engine.model_info()
    assert_drawn_by(1, policies, await engine.generate("k", PROMPT, SHORT))


@one_kernel
async def test_the_scale_of_rank_stabilised_lora_is_used(
    engine: SGLangEngine, model_folder: Path, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "rs", model_folder, seed=5, config={"use_rslora": True})
    await publish(engine, {1: folder}, 1)
    await engine.model_info()
    assert_drawn_by(
        1, {1: adapted_reference(model_folder, folder)}, await engine.generate("s", PROMPT, SHORT)
    )


def with_config(**config: object) -> Callable[[Path, Path], Path]:
    return lambda folder, base: write_adapter(folder, base, seed=1, config=config)


def truncated(folder: Path, base: Path) -> Path:
    file = write_adapter(folder, base, seed=1) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    return folder


REFUSED = {
    "dora": (with_config(use_dora=True), "use_dora True"),
    "bias": (with_config(bias="all"), "bias 'all'"),
    "ranks": (with_config(rank_pattern={"q_proj": 8}), "rank_pattern"),
    "whole modules": (with_config(modules_to_save=["lm_head"]), "modules_to_save"),
    "another kind": (with_config(peft_type="IA3"), "peft_type 'IA3'"),
    "another rank": (with_config(r=8), r"expected \[8, "),
    "no rank": (with_config(r=None), "cannot be read as a LoRA adapter"),
    "half a file": (truncated, "cannot be read as a LoRA adapter"),
}


@one_kernel
@pytest.mark.parametrize(("write", "message"), REFUSED.values(), ids=REFUSED)
async def test_an_adapter_that_is_unsupported_or_does_not_fit_is_refused(
    engine: SGLangEngine,
    model_folder: Path,
    tmp_path: Path,
    policies: dict[int, PreTrainedModel],
    write: Callable[[Path, Path], Path],
    message: str,
) -> None:
    write(tmp_path / "a", model_folder)
    with pytest.raises(EngineRejected, match=message):
        await engine.load_adapter(adapter_name(1), str(tmp_path / "a"))
    assert_drawn_by(0, policies, await engine.generate("still", PROMPT, SHORT))
