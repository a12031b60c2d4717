"""Weights are sent as handles of shared memory, from this process to an engine in another one."""

from __future__ import annotations

import base64
import os
import pickle
import select
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from ipc_worker import COUNT, FAILURES, main
from publish_support import assert_serves, disturb, publisher

from areal_agents.errors import EngineError, EngineRejected, RequestError, TrainingError
from areal_agents.inference import SGLangEngine, running_engine
from areal_agents.inference.embedded.updates.payloads import read_payload
from areal_agents.inference.engine import ModelInfo, WeightBucket
from areal_agents.inference.ports import reserved_ports
from areal_agents.store import Store
from areal_agents.training.distributed import Ranks, ranks
from areal_agents.training.model.model import Policy, load_policy
from areal_agents.training.publish import ipc
from areal_agents.training.publish.buckets import Packed

pytestmark = pytest.mark.usefixtures("small_buckets")


def a_bucket(values: torch.Tensor) -> Packed:
    data = ipc.shared_buffer(64, torch.device("cpu"))[: values.nbytes]
    data.copy_(values.view(torch.uint8))
    dtype = str(values.dtype).removeprefix("torch.")
    return Packed(WeightBucket(("a", "b"), (dtype, dtype), ((2, 2), (values.numel() - 4,))), data, last=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_handle_is_read_as_the_weights_it_names(dtype: torch.dtype) -> None:
    values = torch.arange(7).to(dtype)
    payload, _ = ipc.handle(a_bucket(values))
    assert len(payload) < 2500  # the payload does not contain the weights
    piece = read_payload(payload, "flattened_bucket")
    assert piece.is_shared
    (a, first), (b, second) = piece.whole
    assert (a, b, first.shape, second.shape) == ("a", "b", (2, 2), (3,))
    assert torch.equal(first, values[:4].view(2, 2)) and torch.equal(second, values[4:])


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_each_handle_of_a_bucket_holds_a_reference_of_its_own(opened: int) -> None:
    """Each of two engines gets one handle; those that the engines do not open are given back."""
    handles, bucket = ipc.Handles(), a_bucket(torch.arange(7.0))
    made = [handles.make(bucket) for _ in range(2)]
    assert made[0] != made[1]
    for payload in made[:opened]:
        piece = read_payload(payload, "flattened_bucket")
        assert torch.equal(piece.whole[0][1], torch.arange(4.0).view(2, 2))
        del piece  # as the engine does, which gives the reference back
    handles.give_back(made[:opened])
    del bucket
    assert not own_buffers()


def test_the_process_that_torch_starts_inherits_no_pipe() -> None:
    """Otherwise, a process that waits for the end of a pipe of this one would also wait for the engines."""
    code = (
        "import os, torch; from areal_agents.training.publish.ipc import shared_buffer; "
        "buffer = shared_buffer(100, torch.device('cpu')); print('made', flush=True); input()"
    )
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[writing]
    ) as process:
        os.close(writing)
        assert process.stdout is not None and process.stdout.readline() == b"made\n"
        process.kill()  # the manager still runs for a moment
    holds = select.select([reading], [], [], 0)[0] == []
    os.close(reading)
    assert not holds


def test_no_byte_of_the_weights_is_in_the_request(
    policy: Policy, group: Ranks, store: Store, engine_url: str, run_dir: Path, model_folder: Path
) -> None:
    sizes = []

    class Measuring(SGLangEngine):
        async def update_weights_from_tensors(
            self, payloads: Sequence[str], version: int, **options: Any
        ) -> None:
            assert options["form"] == "flattened_bucket"
            sizes.extend(map(len, payloads))
            await super().update_weights_from_tensors(payloads, version, **options)

    before = own_buffers()
    with publisher(
        policy, group, store, [Measuring(engine_url)], run_dir, model_folder, transport="ipc", bucket_mb=400
    ) as out:
        for version in range(3):
            disturb(policy, version)
            published = out.publish(version=version, step=version)
            assert published is not None and published.repaired == 0
            assert published.sent_bytes == published.nbytes > sum(sizes[-2:])
            assert_serves(engine_url, policy, version)
    assert len(sizes) > 3 and max(sizes) < 12_000
    assert set(own_buffers()) <= set(before)


@pytest.mark.parametrize("has_opened", [False, True])
def test_an_engine_that_refuses_a_handle_loads_the_folder(
    has_opened: bool, policy: Policy, group: Ranks, store: Store, engine_url: str, run_dir: Path,
    model_folder: Path,
) -> None:  # fmt: skip
    """No buffer is kept for that engine, whether or not it has opened the handle."""

    class Refusing(SGLangEngine):
        async def update_weights_from_tensors(
            self, payloads: Sequence[str], version: int, **options: Any
        ) -> None:
            if version != 1 or not options["last"] or has_opened:
                await super().update_weights_from_tensors(payloads, version, **options)
            if version == 1 and options["last"]:
                raise EngineRejected(f"{self.base_url} does not see the GPU of the sender")

    with publisher(
        policy, group, store, [Refusing(engine_url)], run_dir, model_folder, transport="ipc", bucket_mb=400
    ) as out:
        for version, repaired in enumerate([0, 1, 0]):
            disturb(policy, version)
            published = out.publish(version=version, step=version)
            assert published is not None and published.repaired == repaired
            assert_serves(engine_url, policy, version)
            assert not own_buffers()


def own_buffers() -> list[str]:
    """The buffers of this process in shared memory."""
    return [name for name in os.listdir(ipc.SHARED_MEMORY) if f"torch_{os.getpid()}_" in name]


@pytest.fixture(scope="module")
def handed_over(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of a hand-over on each of two ranks, by what failed in it."""
    out = tmp_path_factory.mktemp("ipc")
    with reserved_ports(1) as (port,):
        spawned = mp.spawn(main, (port, str(out)), nprocs=COUNT, join=False)
        try:
            for _ in range(COUNT):
                spawned.join(timeout=240)
            assert all(not process.is_alive() for process in spawned.processes), "a rank waits for another"
        finally:
            for process in spawned.processes:
                process.kill()
    return [torch.load(out / f"{rank}.pt") for rank in range(COUNT)]


def test_only_the_ranks_that_engines_read_make_handles(handed_over: list[dict[str, Any]]) -> None:
    """Otherwise, the memory of the other ranks would be kept for receivers that never open it."""
    for results in handed_over:
        assert results["nothing"] == ([[False, True]] * 3, "whole", [])


def test_no_rank_waits_for_one_that_fails_while_weights_are_sent(handed_over: list[dict[str, Any]]) -> None:
    first, second = handed_over
    other = "another rank failed while weights were sent; see its log"
    assert (first["sending"][1], second["sending"][1]) == ("the first rank cannot send", other)
    assert first["packing"][1] == other and "size of tensor" in second["packing"][1]
    assert [len(results[fails][0]) for results in handed_over for fails in FAILURES] == [3, 2, 1] * 2
    assert not [name for results in handed_over for fails in FAILURES for name in results[fails][2]]


async def workers(
    sender: ipc.IpcSender, info: ModelInfo, answering: dict[SGLangEngine, int]
) -> list[list[int]]:
    """The ranks whose handles each engine gets; `answering` has the number of workers of each."""
    await sender.open({engine: replace(info, workers=count) for engine, count in answering.items()}, 1)
    return [list(sender._workers[engine]) for engine in answering]


async def test_an_engine_gets_the_handles_of_its_gpu_whichever_others_answer(
    group: Ranks, engine_url: str
) -> None:
    async with SGLangEngine(engine_url) as a, SGLangEngine("http://127.0.0.1:9") as b:
        info = await a.model_info()
        gpus = replace(group, device=torch.device("cuda", 0), count=8, count_here=4)
        handles = ipc.Handles()
        told = ipc.IpcSender(gpus, handles, engines=[a, b], gpus=[(2,), (1,)])
        assert await workers(told, info, {b: 1}) == [[1]] and told.receiving == {1}
        assert await workers(told, info, {b: 1, a: 1}) == [[1], [2]] and told.receiving == {1, 2}
        counted = ipc.IpcSender(gpus, handles, engines=[a, b])
        assert await workers(counted, info, {b: 2}) == [[2, 3]]
        assert await workers(counted, info, {a: 2, b: 2}) == [[0, 1], [2, 3]]
        with pytest.raises(EngineError, match=r"running servers of different sizes .* 1, 2 workers"):
            await workers(counted, info, {a: 1, b: 2})
        with pytest.raises(EngineError, match=f"{b.base_url} has 2 workers, and was started on 1 GPUs"):
            await workers(told, info, {b: 2})
        with pytest.raises(EngineError, match=f"{b.base_url} has a worker on GPU 5, .* 4 ranks on this"):
            await workers(ipc.IpcSender(gpus, handles, engines=[a, b]), info, {b: 3})
        on_cpu = ipc.IpcSender(group, handles, engines=[a, b])
        assert await workers(on_cpu, info, {b: 1, a: 1}) == [[0], [0]]


def test_full_shared_memory_is_an_error_that_says_what_to_do(
    policy: Policy, group: Ranks, store: Store, engine_url: str, run_dir: Path, model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=3, f_frsize=4096))
    with (
        publisher(
            policy, group, store, [SGLangEngine(engine_url)], run_dir, model_folder, transport="ipc",
            bucket_mb=400,
        ) as out,
        pytest.raises(TrainingError, match=r"/dev/shm has no room for a bucket of .*--shm-size.*bucket_mb"),
    ):  # fmt: skip
        out.publish(version=1, step=1)
    monkeypatch.undo()
    with publisher(policy, group, store, [SGLangEngine(engine_url)], run_dir, model_folder) as out:
        out.publish(version=2, step=1)  # the engine was neither paused nor left with an open update
    assert_serves(engine_url, policy, 2)


def payload_of(value: object) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


@pytest.mark.parametrize(
    ("payload", "form", "says"),
    [
        (payload_of(os.system), "flattened_bucket", "posix.system is not allowed"),
        (payload_of([("a", torch.zeros(2))]), "flattened_bucket", "must hold flattened_tensor and metadata"),
        (payload_of({"flattened_tensor": torch.zeros(2), "metadata": [3]}), "flattened_bucket", "metadata"),
        ("no base64!", "flattened_bucket", "not a base64 pickle"),
        (payload_of({"changes": []}), "delta", "must name the version"),
        (payload_of({"before": "1", "changes": [("a", torch.zeros(2), torch.zeros(2))]}), "delta", "indices"),
        (payload_of({"before": "1", "changes": [], "whole": 3}), "delta", "whole must hold a list"),
        (payload_of([]), "direct", "'direct' is not supported"),
    ],
)
def test_invalid_payloads_are_refused(payload: str, form: str, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        read_payload(payload, form)


@pytest.mark.gpu
def test_a_gpu_hands_its_weights_to_an_engine_in_another_process(
    store: Store, run_dir: Path, model_folder: Path
) -> None:
    """CUDA IPC handles can be made only on a GPU."""
    with (
        ranks("cuda") as group,
        running_engine(model_folder, kernel="torch", device="cuda", slots=4, max_context=256) as url,
    ):
        policy = load_policy(model_folder, group)
        with publisher(
            policy, group, store, [SGLangEngine(url)], run_dir, model_folder, transport="ipc", verify="every"
        ) as out:
            for version in range(3):
                with torch.no_grad():
                    for parameter in policy.parameters():
                        parameter.to_local().mul_(1.01)
                published = out.publish(version=version, step=version)
                assert published is not None
                assert (published.repaired, published.agreement) == (0, 1.0)
