"""Only changed weights are sent, and the engine then has all published weights, bit for bit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from publish_support import assert_serves, disturb, publisher, serve_folder
from training_support import build_model

from areal_agents.errors import EngineError, EngineRejected, RequestError
from areal_agents.inference import SGLangEngine
from areal_agents.inference.embedded.model.architecture import read_architecture
from areal_agents.inference.embedded.model.weights import load_weights
from areal_agents.inference.embedded.updates.incoming import IncomingWeights
from areal_agents.inference.embedded.updates.payloads import Piece
from areal_agents.store import Store
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.model import Policy, load_policy
from areal_agents.training.publish.buckets import make_buffers, packed
from areal_agents.training.publish.delta import split
from areal_agents.training.publish.host_copy import HostCopy

BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
pytestmark = pytest.mark.usefixtures("small_buckets")


@pytest.fixture
def policy(model_folder: Path, group: Ranks) -> Policy:
    policy = load_policy(model_folder, group)
    policy.saved_dtype = torch.bfloat16
    return policy


def change_few(policy: Policy, seed: int, share: float = 0.05) -> None:
    """Change a share of the weights by an amount that is visible in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            local = parameter.to_local()
            chosen = torch.rand(local.shape, generator=generator) < share
            local.add_(torch.where(chosen, 0.1, 0.0))


def test_few_bytes_are_sent_if_few_weights_change(
    policy: Policy, group: Ranks, store: Store, engine_url: str, run_dir: Path, model_folder: Path
) -> None:
    with publisher(
        policy, group, store, [SGLangEngine(engine_url)], run_dir, model_folder, transport="delta",
        delta_check_every=3, folder_every=2, bucket_mb=70,
    ) as out:  # fmt: skip
        for version in range(6):
            change_few(policy, version)
            published = out.publish(version=version, step=version)
            assert published is not None and published.repaired == 0
            assert published.agreement == (1.0 if version in (0, 2, 5) else None)
            if version:
                assert published.density == pytest.approx(0.05, abs=0.01)
                assert published.sent_bytes == pytest.approx(6 * 0.05 / 2 * published.nbytes, rel=0.2)
            else:
                assert published.density is None and published.sent_bytes == published.nbytes
        disturb(policy, 1)
        published = out.publish(version=6, step=6)
        assert published is not None and published.sent_bytes > 0.99 * published.nbytes  # all weights
        assert published.sent_bytes <= published.nbytes


def test_an_engine_with_another_version_receives_all_weights(
    policy: Policy, group: Ranks, store: Store, engine_url: str, run_dir: Path, model_folder: Path
) -> None:
    with publisher(
        policy, group, store, [SGLangEngine(engine_url)], run_dir, model_folder, transport="delta",
        verify="every",
    ) as out:  # fmt: skip
        for version in range(1, 4):
            change_few(policy, version)
            published = out.publish(version=version, step=version)
            assert published is not None and (published.repaired, published.agreement) == (0, 1.0)
            assert (published.sent_bytes == published.nbytes) == (version != 2)
            if version == 2:
                serve_folder(engine_url, model_folder)  # as after a restart


def test_changes_to_a_version_that_is_not_served_are_refused_and_repaired(
    policy: Policy, group: Ranks, store: Store, engine_url: str, run_dir: Path, model_folder: Path
) -> None:
    class Restarting(SGLangEngine):
        async def prepare_weight_update(self) -> None:
            if (await self.model_info()).version == 1:
                await self.update_weights_from_disk(str(model_folder), 0)
            await super().prepare_weight_update()

    with publisher(
        policy, group, store, [Restarting(engine_url)], run_dir, model_folder, transport="delta",
        verify="every",
    ) as out:  # fmt: skip
        for version, repaired in ((1, 0), (2, 1)):
            change_few(policy, version)
            published = out.publish(version=version, step=version)
            assert published is not None and (published.repaired, published.agreement) == (repaired, 1.0)


def test_a_wrong_change_is_found_by_the_comparison(
    policy: Policy, group: Ranks, store: Store, engine_url: str, run_dir: Path, model_folder: Path
) -> None:
    class Losing(SGLangEngine):
        """Does not send the buckets of version 1, except for the last one."""

        async def update_weights_from_tensors(
            self, payloads: Sequence[str], version: int, **options: Any
        ) -> None:
            if version == 1 and not options["last"]:
                return
            await super().update_weights_from_tensors(payloads, version, **options)

    with publisher(
        policy, group, store, [Losing(engine_url)], run_dir, model_folder, transport="delta", verify="off",
        delta_check_every=3,
    ) as out:  # fmt: skip
        for version in range(2):
            change_few(policy, version)
            out.publish(version=version, step=version)
        change_few(policy, 2)
        with pytest.raises(EngineError, match="serves other weights than those published"):
            out.publish(version=2, step=2)

    async def resume() -> None:
        async with SGLangEngine(engine_url) as engine:
            await engine.resume()

    asyncio.run(resume())


def test_an_engine_that_rejects_changes_is_reported_once(
    policy: Policy, group: Ranks, store: Store, engine_url: str, run_dir: Path, model_folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    class Plain(SGLangEngine):
        async def update_weights_from_tensors(self, *arguments: Any, **options: Any) -> None:
            raise EngineRejected("load_format must be flattened_bucket")

    caplog.set_level(logging.ERROR)
    with publisher(
        policy, group, store, [Plain(engine_url)], run_dir, model_folder, transport="delta"
    ) as out:
        for version in range(2):
            change_few(policy, version)
            out.publish(version=version, step=version)
    assert sum("TRANSPORT DOES NOT WORK" in record.getMessage() for record in caplog.records) == 1


SPECIAL = {
    torch.bfloat16: [0x7FC0, 0x7F81, 0xFFA5, 0x8000, 0x0000, 0x0001, 0x7F80, 0xFF80, 0x7F7F],
    torch.float16: [0x7E00, 0x7C01, 0xFE55, 0x8000, 0x0000, 0x0001, 0x7C00, 0xFC00, 0x7BFF],
    torch.float32: [0x7FC00000, 0x7F800001, 0xFFA5A5A5, 0x80000000, 0, 1, 0x7F800000, 0xFF800000, 0x7F7FFFFF],
}


@settings(max_examples=25, deadline=None)
@given(
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    tied=st.booleans(),
    seed=st.integers(0, 2**31),
    steps=st.integers(1, 6),
    bucket=st.sampled_from([1, 3_000, 10_000_000]),
)
def test_changes_give_the_same_bits_as_all_weights(
    dtype: torch.dtype, tied: bool, seed: int, steps: int, bucket: int, models: dict[bool, Path]
) -> None:
    """Weights change over several steps to NaNs of any payload, negative zeros, infinities and subnormals."""
    generator = torch.Generator().manual_seed(seed)
    arch = read_architecture(models[tied])
    served = load_weights(models[tied], arch)
    shapes = dict(IncomingWeights(arch)._shapes)
    weights = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    copy = HostCopy(shapes, dtype, pinned=False)
    size = {"dtype": dtype, "bucket_bytes": bucket}
    buffers = make_buffers(shapes, **size, device=torch.device("cpu"))
    for step in range(steps + 1):
        whole, sparse = IncomingWeights(arch), IncomingWeights(arch)
        copy.begin(step)
        for bucket_of in packed(iter(weights.items()), shapes, **size, buffers=buffers):
            sent = replace(bucket_of, changes=copy.take(bucket_of, compare=True, changes=True))
            whole.add(Piece(sent.tensors(), is_shared=True))
            if step == 0:
                sparse.add(Piece(sent.tensors(), is_shared=True))
            else:
                changes, rest = split(sent)
                sparse.add(Piece(rest, changes, str(step)))
        sparse.note(str(step), flush_cache=True)
        expected = whole.finish(None)
        served = sparse.finish(served if step else None)
        for ours, theirs in zip(served.tensors(), expected.tensors(), strict=True):
            assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))
        for tensor in weights.values():
            bits = tensor.view(BITS[dtype]).view(-1)
            count = int(torch.randint(0, max(2, len(bits) // 4), (), generator=generator))
            places = torch.randint(0, len(bits), (count,), generator=generator)
            special = torch.tensor(SPECIAL[dtype]).to(BITS[dtype])
            bits[places] = special[torch.randint(0, len(special), (count,), generator=generator)]


def test_incomplete_changes_are_never_served(models: dict[bool, Path]) -> None:
    """A weight whose change did not arrive would keep its old value under the new version."""
    arch = read_architecture(models[False])
    served = load_weights(models[False], arch)
    name = next(iter(IncomingWeights(arch)._shapes))
    change = (name, torch.tensor([0]), torch.tensor([2.0]))
    update = IncomingWeights(arch)
    update.add(Piece([], [change], "3"))
    with pytest.raises(RequestError, match="a piece of the changes did not arrive"):
        update.finish(served)  # the last piece has the version
    update.note("4", flush_cache=True)
    update.has_failed = True
    with pytest.raises(RequestError, match="a piece of the changes did not arrive"):
        update.finish(served)
    update.has_failed = False
    update.finish(served)
    with pytest.raises(RequestError, match="were used before"):
        update.finish(served)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    return {
        tied: build_model(tmp_path_factory.mktemp("tied" if tied else "untied"), tied=tied)
        for tied in (True, False)
    }


def test_the_engine_serves_weights_that_were_sent_as_changes(
    group: Ranks, store: Store, engine_url: str, run_dir: Path, model_folder: Path
) -> None:
    policy = load_policy(model_folder, group)
    with publisher(
        policy, group, store, [SGLangEngine(engine_url)], run_dir, model_folder, transport="delta"
    ) as out:
        for version in range(3):
            change_few(policy, version)
            out.publish(version=version, step=version)
            assert_serves(engine_url, policy, version)
