"""Weight updates by every transport: the new weights are served afterwards, and a failure changes nothing.

The same tests run for the embedded engine's kernels and for a real SGLang, except those that would make a
real one exit.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from inference_support import (
    EMBEDDED,
    EVERY_SERVER,
    FreshIds,
    Missed,
    again_if_missed,
    load_reference,
    prompt_of,
    reference_greedy,
    reference_logprobs,
)
from test_engine_contract import check_aborted, until_running
from test_weight_swap import LONG, assert_serves_version_0, boundary, check_refused
from weights_support import (
    TRANSPORTS,
    Transport,
    by_broadcast,
    by_disk,
    by_tensors,
    fresh_group,
    hashes_of,
    joined,
    payload_of,
    send,
    weights_of,
)

from areal_agents.core.completion import SamplingParams
from areal_agents.errors import EngineError, EngineRejected
from areal_agents.inference import SGLangEngine, running_engine
from areal_agents.inference.engine import WeightBucket, WeightGroup

SHORT = SamplingParams(20, temperature=0.0, ignore_eos=True)
LIMIT_S = 4.0  # how long the hurried engine waits for a trainer

of_each_transport = pytest.mark.parametrize("update", TRANSPORTS.values(), ids=TRANSPORTS)
embedded_only = pytest.mark.parametrize("swapping_url", EMBEDDED, indirect=True)
one_kernel = pytest.mark.parametrize("swapping_url", ["numba"], indirect=True)
each_engine = pytest.mark.parametrize(
    "swapping_url", ["numba", pytest.param("sglang", marks=pytest.mark.sglang)], indirect=True
)


@pytest.fixture
async def engine(swapping_url: str, model_folder: Path) -> AsyncIterator[SGLangEngine]:
    """The engine with version 0, whatever state the previous test left it in."""
    async with FreshIds(swapping_url) as client:
        await client.resume()
        await client.update_weights_from_disk(str(model_folder), 0)
        yield client


@pytest.mark.parametrize("swapping_url", EVERY_SERVER, indirect=True)
@of_each_transport
async def test_after_an_update_the_new_weights_are_served(
    engine: SGLangEngine, next_model_folder: Path, update: Transport
) -> None:
    prompt = prompt_of(60, seed=1)
    before = await engine.generate("before", prompt, SHORT)
    await engine.pause("retract")
    await update(engine, next_model_folder, 5)
    await engine.resume()
    after = await engine.generate("after", prompt, SHORT)
    new = load_reference(next_model_folder)
    assert before.versions.tolist() == [0] * 20 and after.versions.tolist() == [5] * 20
    assert after.token_ids.tolist() == reference_greedy(new, prompt, 20).tolist()
    expected = reference_logprobs(new, prompt, after.token_ids)
    np.testing.assert_allclose(after.logprobs, expected, atol=1e-4)
    assert (await engine.model_info()).version == 5
    assert (await engine.checksum()).ranks == (hashes_of(next_model_folder),)


@each_engine
@pytest.mark.parametrize("update", [by_tensors, by_broadcast])
@again_if_missed
async def test_every_token_gets_its_version_if_weights_are_swapped_during_a_generation(
    engine: SGLangEngine, model_folder: Path, next_model_folder: Path, update: Transport
) -> None:
    prompt = prompt_of(40, seed=2)
    task = asyncio.create_task(engine.generate("x", prompt, LONG))
    await until_running(engine, task)
    await asyncio.sleep(0.02)
    await engine.pause("retract")
    await update(engine, next_model_folder, 7)
    await engine.resume()
    completion = await task
    b = boundary(completion)
    before = reference_logprobs(load_reference(model_folder), prompt, completion.token_ids)
    after = reference_logprobs(load_reference(next_model_folder), prompt, completion.token_ids)
    np.testing.assert_allclose(completion.logprobs[:b], before[:b], atol=1e-4)
    np.testing.assert_allclose(completion.logprobs[b:], after[b:], atol=1e-4)
    assert abs(completion.logprobs[b] - before[b]) > 1e-3


@each_engine
@again_if_missed
async def test_a_pause_that_aborts_returns_only_tokens_of_the_old_weights(
    engine: SGLangEngine, model_folder: Path, next_model_folder: Path
) -> None:
    prompt = prompt_of(40, seed=4)
    task = asyncio.create_task(engine.generate("x", prompt, LONG))
    await until_running(engine, task)
    await asyncio.sleep(0.05)
    await engine.pause("abort")
    await by_disk(engine, next_model_folder, 6)
    later = asyncio.create_task(engine.generate("y", prompt, SHORT))
    await engine.resume()
    partial, after = await asyncio.gather(task, later)
    if not len(partial):
        raise Missed
    check_aborted(partial)
    assert len(partial) < 1500
    assert set(partial.versions.tolist()) == {0}
    drawn = reference_logprobs(load_reference(model_folder), prompt, partial.token_ids)
    np.testing.assert_allclose(partial.logprobs, drawn, atol=1e-4)
    assert after.versions.tolist() == [6] * 20


@one_kernel
async def test_generation_continues_while_weights_arrive_and_only_waits_for_the_swap(
    engine: SGLangEngine, next_model_folder: Path
) -> None:
    named = weights_of(next_model_folder)
    await engine.begin_weight_update()
    await engine.update_weights_from_tensors([payload_of(named)], 3)
    during = await engine.generate("during", prompt_of(30), SHORT)
    await engine.end_weight_update()
    after = await engine.generate("after", prompt_of(30), SHORT)
    assert during.versions.tolist() == [0] * 20 and after.versions.tolist() == [3] * 20


@each_engine
async def test_weights_outside_an_update_are_refused(engine: SGLangEngine, model_folder: Path) -> None:
    with pytest.raises(EngineRejected, match="begin_weight_update"):
        await engine.update_weights_from_tensors([payload_of(weights_of(model_folder)[:1])], 9)
    with pytest.raises(EngineRejected, match="begin_weight_update"):
        await engine.end_weight_update()
    await assert_serves_version_0(engine, model_folder)


@each_engine
async def test_an_update_that_a_lost_trainer_left_open_is_given_up(
    engine: SGLangEngine, next_model_folder: Path
) -> None:
    await engine.begin_weight_update()
    async with SGLangEngine(engine.base_url) as successor:
        await by_tensors(successor, next_model_folder, 4)
        assert (await successor.checksum()).ranks == (hashes_of(next_model_folder),)


@embedded_only
async def test_an_abandoned_update_is_never_served(
    engine: SGLangEngine, model_folder: Path, next_model_folder: Path
) -> None:
    """Not even if all of its weights have arrived, or more of them arrive later."""
    whole = [payload_of(weights_of(next_model_folder))]
    await engine.begin_weight_update()
    await engine.update_weights_from_tensors(whole, 9)
    await engine.prepare_weight_update()
    await engine.abandon_weight_update()
    await assert_serves_version_0(engine, model_folder)
    for late in (engine.update_weights_from_tensors(whole, 9), engine.end_weight_update()):
        with pytest.raises(EngineRejected, match="begin_weight_update"):
            await late
    await by_tensors(engine, next_model_folder, 2)
    assert (await engine.checksum()).ranks == (hashes_of(next_model_folder),)


WRONG = {
    "unknown name": ([("model.nrom.weight", torch.ones(64))], "model.nrom.weight is not a weight"),
    "other shape": ([("model.norm.weight", torch.ones(63))], r"shape \[63\], expected \[64\]"),
    "other numbers": ([("model.norm.weight", torch.ones(64, dtype=torch.int32))], "dtype torch.int32"),
    "twice": ([("model.norm.weight", torch.ones(64))] * 2, "twice"),
    "no tensors": ([("model.norm.weight", "ones")], "list of"),
    "code": ([os.system], "not allowed"),
}


@one_kernel
@pytest.mark.parametrize(("named", "message"), WRONG.values(), ids=WRONG)
async def test_invalid_tensors_are_refused_and_the_old_weights_are_kept(
    engine: SGLangEngine, model_folder: Path, next_model_folder: Path, named: list, message: str
) -> None:
    await engine.begin_weight_update()
    rest = [item for item in weights_of(next_model_folder) if item[0] != "model.norm.weight"]
    await engine.update_weights_from_tensors([payload_of(rest)], 9, last=False)
    with pytest.raises(EngineRejected, match=message):
        await engine.update_weights_from_tensors([payload_of(named)], 9)
    with pytest.raises(EngineRejected, match="lacks 1 of the model's 24 weights"):
        await engine.end_weight_update()
    await assert_serves_version_0(engine, model_folder)
    await by_tensors(engine, next_model_folder, 2)
    assert (await engine.generate("whole", prompt_of(9), SHORT)).versions.tolist() == [2] * 20


@one_kernel
async def test_invalid_update_requests_are_refused(engine: SGLangEngine, model_folder: Path) -> None:
    await engine.begin_weight_update()
    for payloads in ([], ["AAAA"] * 2, ["%%"], ["AAAA"]):
        with pytest.raises(EngineRejected, match="serialized_named_tensors"):
            await engine.update_weights_from_tensors(payloads, 9)
    bucket = WeightBucket(("model.norm.weight",), ("float32",), ((64,),))
    with pytest.raises(EngineRejected, match="was not joined"):
        await engine.receive_weights(bucket, group="nobody", version=9, last=True)
    with pytest.raises(EngineRejected, match="does not exist"):
        await engine.leave_weight_group("nobody")
    with pytest.raises(EngineRejected, match="needs an engine on a GPU"):
        await engine.join_weight_group(WeightGroup("127.0.0.1", 9, 1, 2, "g", "nccl"))
    with pytest.raises(EngineRejected, match="lacks 24"):
        await engine.end_weight_update()
    await engine.begin_weight_update()
    await engine.end_weight_update()  # nothing was announced, so nothing changes
    await assert_serves_version_0(engine, model_folder)


def test_a_bucket_with_a_misaligned_tensor_is_refused() -> None:
    WeightBucket(("a", "b"), ("float32", "bfloat16"), ((1,), (3,)))
    with pytest.raises(ValueError, match="b would begin at byte 6"):
        WeightBucket(("a", "b"), ("bfloat16", "float32"), ((3,), (1,)))


# A trainer in a separate process: it joins the group given in its arguments, and broadcasts nothing.
SILENT_TRAINER = """
import sys, time
from areal_agents.inference.embedded.updates.process_group import join_group
from areal_agents.inference.engine import WeightGroup
group = WeightGroup("127.0.0.1", int(sys.argv[1]), 1, 2, sys.argv[2], "gloo")
kept = join_group(group, rank=0, timeout_s=60)
time.sleep(600)
"""


@pytest.fixture
def silent_trainer() -> Iterator[tuple[WeightGroup, subprocess.Popen[str]]]:
    with fresh_group() as group:
        command = [sys.executable, "-c", SILENT_TRAINER, str(group.port), group.name]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            yield group, process
            process.kill()


@each_engine
async def test_the_death_of_a_trainer_during_a_broadcast_is_an_error_and_another_can_follow(
    engine: SGLangEngine,
    silent_trainer: tuple[WeightGroup, subprocess.Popen[str]],
    model_folder: Path,
    next_model_folder: Path,
) -> None:
    group, trainer = silent_trainer
    await engine.join_weight_group(group)
    await engine.pause("retract")
    await engine.begin_weight_update()
    named = weights_of(next_model_folder)
    names, tensors = zip(*named, strict=True)
    bucket = WeightBucket(names, ("float32",) * len(names), tuple(tuple(t.shape) for t in tensors))
    receiving = asyncio.create_task(engine.receive_weights(bucket, group=group.name, version=9, last=True))
    await asyncio.sleep(0.2)
    trainer.kill()
    with pytest.raises(EngineError, match="receive"):
        await receiving
    await engine.resume()
    await assert_serves_version_0(engine, model_folder)
    await engine.pause("retract")
    await by_broadcast(engine, next_model_folder, 3)  # this abandons the update that was left open
    await engine.resume()
    assert (await engine.checksum()).ranks == (hashes_of(next_model_folder),)
    assert (await engine.generate("again", prompt_of(9), SHORT)).versions.tolist() == [3] * 20


@pytest.fixture(scope="module")
def hurried_url(model_folder: Path) -> Iterator[str]:
    """An engine that waits LIMIT_S for a trainer."""
    with running_engine(model_folder, kernel="torch", threads=1, slots=4, broadcast_timeout_s=LIMIT_S) as url:
        yield url


async def until_listening(port: int) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return


async def test_a_trainer_that_hangs_does_not_block_the_engine(
    hurried_url: str,
    silent_trainer: tuple[WeightGroup, subprocess.Popen[str]],
    model_folder: Path,
    next_model_folder: Path,
) -> None:
    group, _ = silent_trainer
    async with SGLangEngine(hurried_url) as engine:
        await until_listening(group.port)
        await engine.join_weight_group(group)
        await engine.begin_weight_update()
        bucket = WeightBucket(("model.norm.weight",), ("float32",), ((64,),))
        receiving = asyncio.create_task(
            engine.receive_weights(bucket, group=group.name, version=9, last=True)
        )
        with fresh_group() as lonely:
            joining = asyncio.create_task(engine.join_weight_group(lonely))  # nothing listens there
            await assert_serves_version_0(engine, model_folder)  # generation continues
            with pytest.raises(EngineError, match="could not be joined"):
                await joining
        with pytest.raises(EngineError, match="received"):
            await receiving
        with pytest.raises(EngineRejected, match="lacks 24"):
            await engine.end_weight_update()
        await engine.leave_weight_group(group.name)
        await by_tensors(engine, next_model_folder, 2)  # which has no such limit
        assert (await engine.generate("again", prompt_of(9), SHORT)).versions.tolist() == [2] * 20


@one_kernel
async def test_an_update_that_ends_before_a_broadcast_has_arrived_changes_nothing(
    engine: SGLangEngine, model_folder: Path, next_model_folder: Path
) -> None:
    named = weights_of(next_model_folder)
    async with joined(engine) as (group, name):
        await engine.begin_weight_update()
        await send(engine, group, name, named[:-1], 6, last=False)
        late = asyncio.create_task(send(engine, group, name, named[-1:], 6, last=True))
        with pytest.raises(EngineRejected, match="lacks 1"):
            await engine.end_weight_update()
        await asyncio.wait([late])
        await assert_serves_version_0(engine, model_folder)


@one_kernel
async def test_a_prepared_folder_is_not_read_again_unless_it_changed(
    engine: SGLangEngine, model_folder: Path, next_model_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((next_model_folder / "config.json").read_bytes())
    file = tmp_path / "model.safetensors"
    file.write_bytes((next_model_folder / "model.safetensors").read_bytes())
    await engine.prepare_weights_from_disk(str(tmp_path))
    known = file.stat()
    file.write_bytes(bytes(known.st_size))
    os.utime(file, ns=(known.st_atime_ns, known.st_mtime_ns))  # as if the file had not changed
    await engine.update_weights_from_disk(str(tmp_path), 1)
    assert (await engine.checksum()).ranks == (hashes_of(next_model_folder),)
    await engine.prepare_weights_from_disk(str(model_folder))
    with pytest.raises(EngineRejected, match="cannot be read"):
        await engine.update_weights_from_disk(str(tmp_path), 2)  # another folder was prepared last
    file.write_bytes((model_folder / "model.safetensors").read_bytes())
    await engine.prepare_weights_from_disk(str(tmp_path))
    file.write_bytes((next_model_folder / "model.safetensors").read_bytes())
    await by_disk(engine, tmp_path, 3)
    assert (await engine.checksum()).ranks == (hashes_of(next_model_folder),)


@one_kernel
async def test_a_folder_that_cannot_be_prepared_is_refused(
    engine: SGLangEngine, model_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(EngineRejected, match="holds no .safetensors"):
        await engine.prepare_weights_from_disk(str(tmp_path))
    await assert_serves_version_0(engine, model_folder)


@each_engine
@again_if_missed
async def test_memory_is_released_during_a_pause_and_allocated_again(
    engine: SGLangEngine, model_folder: Path
) -> None:
    with pytest.raises(EngineError, match="only after a pause"):
        await engine.release_memory(["kv_cache"])
    running = asyncio.create_task(engine.generate("r", prompt_of(30, seed=8), LONG))
    await until_running(engine, running)
    await engine.pause("retract")
    await engine.release_memory(["kv_cache"])
    await engine.resume_memory(["kv_cache"])
    await engine.resume()
    completion = await running
    expected = reference_logprobs(load_reference(model_folder), prompt_of(30, seed=8), completion.token_ids)
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
    await assert_serves_version_0(engine, model_folder)


@embedded_only
@again_if_missed
async def test_released_weights_are_restored_by_the_next_update(
    engine: SGLangEngine, model_folder: Path, next_model_folder: Path
) -> None:
    await engine.pause("retract")
    await engine.release_memory(["weights", "kv_cache"])
    with pytest.raises(EngineRejected, match="was released"):
        await engine.checksum()
    waiting = asyncio.create_task(engine.generate("w", prompt_of(9), SHORT))
    await engine.resume()
    await engine.resume_memory(["weights", "kv_cache"])
    assert (await asyncio.wait([waiting], timeout=0.1))[1]  # nothing is sampled without weights
    await engine.update_weights_from_disk(str(next_model_folder), 8)
    assert (await waiting).versions.tolist() == [8] * 20
    task = asyncio.create_task(engine.generate("busy", prompt_of(9), LONG))
    await until_running(engine, task)
    try:
        await check_refused(
            engine, task, "/release_memory_occupation", {"tags": ["kv_cache"]}, "while nothing runs"
        )
    except Missed:
        await engine.resume_memory(["kv_cache"])
        raise
    await engine.abort("busy")
    check_aborted(await task)
