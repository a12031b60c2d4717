"""A failure while a version is published affects that engine or version, without wrong tokens or a hang."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from publish_support import assert_serves, disturb, publisher, sample
from test_writing_models import full_disk
from training_support import build_model

from areal_agents.core.completion import SamplingParams, as_token_ids
from areal_agents.errors import EngineError, EngineRejected, EngineUnavailable, TrainingError
from areal_agents.inference import SGLangEngine
from areal_agents.inference.config import EmbeddedEngineConfig
from areal_agents.inference.engine import ModelInfo, PauseMode, WeightBucket, WeightsChecksum
from areal_agents.inference.engine_process import EngineProcess
from areal_agents.store import Store
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.model import Policy

ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 12345.0}}
OPTIONS = {"kernel": "torch", "threads": 1, "slots": 4, "max_context": 256, "port": 0}
pytestmark = pytest.mark.usefixtures("small_buckets")


@pytest.fixture
def second(model_folder: Path) -> Iterator[EngineProcess]:
    """A second engine, which a test may kill."""
    with EngineProcess(EmbeddedEngineConfig(model=str(model_folder), **OPTIONS)) as engine:
        yield engine


class DyingEngine(SGLangEngine):
    """A client whose server is killed while the second bucket is being sent."""

    def __init__(self, server: EngineProcess) -> None:
        super().__init__(server.url)
        self.buckets, self._victim = 0, server

    async def receive_weights(self, bucket: WeightBucket, *, group: str, version: int, last: bool) -> None:
        self.buckets += 1
        call = asyncio.ensure_future(super().receive_weights(bucket, group=group, version=version, last=last))
        if self.buckets == 2:
            await asyncio.sleep(0)  # the request is sent, and the broadcast begins
            os.killpg(self._victim.pid, signal.SIGKILL)
        await call


class RefusingEngine(SGLangEngine):
    """A client whose server refuses the second bucket, and so never takes part in its broadcast."""

    buckets = 0

    async def receive_weights(self, bucket: WeightBucket, *, group: str, version: int, last: bool) -> None:
        self.buckets += 1
        if self.buckets == 2:
            raise EngineRejected(f"{self.base_url} refused a bucket")
        await super().receive_weights(bucket, group=group, version=version, last=last)


def test_if_one_of_several_engines_dies_the_others_take_the_version(
    policy: Policy,
    group: Ranks,
    store: Store,
    second: EngineProcess,
    engine_url: str,
    run_dir: Path,
    model_folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engines = [DyingEngine(second), SGLangEngine(engine_url)]
    with publisher(policy, group, store, engines, run_dir, model_folder, transport="broadcast") as out:
        for version, (left_out, repaired) in enumerate([(1, 1), (1, 0)]):
            disturb(policy, version)
            published = out.publish(version=version, step=version)
            assert published is not None
            assert (published.left_out, published.repaired) == (left_out, repaired)
            assert_serves(engine_url, policy, version)
    assert f"is published without the engine {second.url}" in caplog.text
    assert (
        f"{engine_url} loaded {run_dir / 'weights' / 'v0'} because sending the weights failed" in caplog.text
    )


@pytest.mark.parametrize("transport", ["disk", "tensor"])
def test_a_dead_replica_is_left_out_and_a_returned_one_takes_part(
    transport: str,
    policy: Policy,
    group: Ranks,
    store: Store,
    engine_url: str,
    run_dir: Path,
    model_folder: Path,
) -> None:
    engines = [SGLangEngine("http://127.0.0.1:9"), SGLangEngine(engine_url)]
    with publisher(policy, group, store, engines, run_dir, model_folder, transport=transport) as out:
        published = out.publish(version=0, step=0)
        assert published is not None and published.left_out == 1 and published.busy_s is None
        assert_serves(engine_url, policy, 0)
    with (
        publisher(policy, group, store, engines[:1], run_dir, model_folder, transport=transport) as out,
        pytest.raises(EngineUnavailable),
    ):
        out.publish(version=1, step=1)
    latest = store.latest_version()
    assert latest is not None and latest.version == 1  # the number is not used again


def test_a_refused_bucket_is_repaired_from_the_folder_before_anything_is_sampled(
    policy: Policy, group: Ranks, store: Store, engine_url: str, run_dir: Path, model_folder: Path
) -> None:
    engines = [RefusingEngine(engine_url)]
    with publisher(policy, group, store, engines, run_dir, model_folder, transport="broadcast") as out:
        for version, repaired in enumerate([1, 0]):
            disturb(policy, version)
            published = out.publish(version=version, step=version)
            assert published is not None and published.repaired == repaired
            assert published.agreement == (None if version else 1.0)
            assert_serves(engine_url, policy, version)


def test_a_full_disk_leaves_the_old_version_served(
    policy: Policy, group: Ranks, store: Store, engine_url: str, run_dir: Path, model_folder: Path
) -> None:
    with publisher(policy, group, store, [SGLangEngine(engine_url)], run_dir, model_folder) as out:
        out.publish(version=0, step=0)
        completion = sample(engine_url)
        disturb(policy, 1)
        with full_disk(50_000), pytest.raises(TrainingError, match=r"cannot write the weights to .*/v1"):
            out.publish(version=1, step=1)
        latest = store.latest_version()
        assert latest is not None and latest.version == 0
        assert sample(engine_url).versions.tolist() == completion.versions.tolist() == [0] * 12
        assert [p.name for p in (run_dir / "weights").iterdir()] == ["v0"]
        out.publish(version=1, step=1)  # the disk has room again
    assert_serves(engine_url, policy, 1)


def test_an_engine_with_other_weights_than_the_published_ones_is_found_and_stays_paused(
    policy: Policy,
    group: Ranks,
    store: Store,
    engine_url: str,
    run_dir: Path,
    model_folder: Path,
    tmp_path: Path,
) -> None:
    resumed = []

    class Deaf(SGLangEngine):
        async def update_weights_from_disk(self, path: str, version: int) -> None:
            await super().update_weights_from_disk(str(model_folder), version)

        async def resume(self) -> None:
            resumed.append(self.base_url)
            await super().resume()

    disturb(policy, 1)
    with (
        publisher(policy, group, store, [Deaf(engine_url)], run_dir, model_folder) as out,
        pytest.raises(EngineError, match=rf"{engine_url} serves other weights.*model\.\S+ differs"),
    ):
        out.publish(version=0, step=0)

    async def ask() -> None:
        one = SamplingParams(max_new_tokens=1)
        async with SGLangEngine(engine_url, request_timeout_s=60) as engine:
            asking = asyncio.create_task(engine.generate("r", as_token_ids([2, 3]), one))
            ended, _ = await asyncio.wait({asking}, timeout=0.5)
            assert not ended
            await engine.resume()
            await asking

    assert not resumed
    asyncio.run(ask())


def test_an_engine_of_another_model_is_refused_before_it_is_paused(
    policy: Policy,
    group: Ranks,
    store: Store,
    engine_url: str,
    run_dir: Path,
    model_folder: Path,
    tmp_path: Path,
) -> None:
    class Foreign(SGLangEngine):
        async def model_info(self) -> ModelInfo:
            return replace(await super().model_info(), **changes[0])

        async def pause(self, mode: PauseMode) -> None:
            raise AssertionError("paused")

    wide = build_model(tmp_path / "other") / "config.json"
    wide.write_text(wide.read_text().replace('"hidden_size": 32', '"hidden_size": 64'))
    turned = build_model(tmp_path / "turned") / "config.json"
    turned.write_text(json.dumps(json.loads(turned.read_text()) | ROPE))
    changes = [{"vocab_size": 128}, {"model_path": str(wide.parent)}, {"model_path": str(turned.parent)}]
    faults = ["a vocabulary of 128, not 96", "hidden_size 64, not 32", "rope_parameters .*12345"]
    with publisher(policy, group, store, [Foreign(engine_url)], run_dir, model_folder) as out:
        for version, fault in enumerate(faults):
            with pytest.raises(EngineError, match=f"does not serve the model that is trained: {fault}"):
                out.publish(version=version, step=0)
            changes.pop(0)


def test_an_engine_without_checksums_gets_the_version_with_a_warning(
    policy: Policy,
    group: Ranks,
    store: Store,
    engine_url: str,
    run_dir: Path,
    model_folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Mute(SGLangEngine):
        async def checksum(self) -> WeightsChecksum:
            raise EngineRejected("404: no such route")

    caplog.set_level(logging.WARNING)
    with publisher(policy, group, store, [Mute(engine_url)], run_dir, model_folder) as out:
        published = out.publish(version=0, step=0)
    assert published is not None and published.agreement is None
    assert "cannot be compared: 404" in caplog.text


def test_an_engine_that_becomes_reachable_later_is_compared_then(
    policy: Policy, group: Ranks, store: Store, engine_url: str, run_dir: Path, model_folder: Path
) -> None:
    class Late(SGLangEngine):
        is_there = False

        @property
        def base_url(self) -> str:
            return "http://late"

        async def model_info(self) -> ModelInfo:
            if not self.is_there:
                raise EngineUnavailable("it is not there yet")
            return await super().model_info()

        async def checksum(self) -> WeightsChecksum:
            (held,) = (await super().checksum()).ranks
            return WeightsChecksum(({**held, "model.norm.weight": "0" * 16},))

    late = Late(engine_url)
    with publisher(policy, group, store, [SGLangEngine(engine_url), late], run_dir, model_folder) as out:
        for version in (0, 1):
            published = out.publish(version=version, step=version)
            assert published is not None and published.left_out == 1
            assert published.agreement == (1.0 if version == 0 else None)
        late.is_there = True
        with pytest.raises(EngineError, match=r"http://late serves other weights.*norm\.weight differs"):
            out.publish(version=2, step=2)


@pytest.mark.parametrize("transport", ["disk", "tensor"])
def test_an_engine_that_was_unreachable_is_compared_like_a_new_one(
    transport: str, policy: Policy, group: Ranks, store: Store, engine_url: str, run_dir: Path,
    model_folder: Path, second: EngineProcess,
) -> None:  # fmt: skip
    """It is compared before it resumes, whereas an engine that always answered is compared only once."""
    compared, resumed = [], []

    class Away(SGLangEngine):
        is_away = False

        async def model_info(self) -> ModelInfo:
            if self.is_away:
                raise EngineUnavailable("it is away")
            return await super().model_info()

        async def resume(self) -> None:
            await super().resume()
            resumed.append(compared.count(self.base_url))

        async def checksum(self) -> WeightsChecksum:
            compared.append(self.base_url)
            (held,) = (await super().checksum()).ranks
            is_wrong = compared.count(second.url) == 2
            return WeightsChecksum(({**held, "model.norm.weight": "0" * 16} if is_wrong else held,))

    stays, away = Away(engine_url), Away(second.url)
    with publisher(
        policy, group, store, [stays, away], run_dir, model_folder, transport=transport, folder_every=9
    ) as out:
        for version, away.is_away in enumerate([False, False, True, True]):
            published = out.publish(version=version, step=version)
            assert published is not None and published.left_out == away.is_away
            assert published.agreement == (1.0 if version == 0 else None)
        away.is_away = False
        with pytest.raises(EngineError, match=f"{second.url} serves other weights.*norm.weight differs"):
            out.publish(version=4, step=4)
    assert sorted(compared) == sorted([engine_url, second.url, second.url])
    assert 2 not in resumed  # the engine with wrong weights stays paused


def test_an_old_folder_that_cannot_be_removed_is_removed_later(
    policy: Policy, group: Ranks, store: Store, engine_url: str, run_dir: Path, model_folder: Path
) -> None:
    old, elsewhere = run_dir / "weights" / "v0", run_dir / "elsewhere"
    with publisher(policy, group, store, [SGLangEngine(engine_url)], run_dir, model_folder) as out:
        out.publish(version=0, step=0)
        old.rename(elsewhere)
        old.symlink_to(elsewhere)  # the target of a link is never removed
        out.publish(version=1, step=1)
        out.publish(version=2, step=2)
        assert sorted(p.name for p in old.parent.iterdir()) == ["v0", "v1", "v2"]
        old.unlink()
        elsewhere.rename(old)
        out.publish(version=3, step=3)
    assert sorted(p.name for p in old.parent.iterdir()) == ["v2", "v3"]


def test_an_unreachable_engine_is_waited_for_if_the_only_other_one_has_another_model(
    policy: Policy, group: Ranks, store: Store, engine_url: str, run_dir: Path, model_folder: Path
) -> None:
    class Foreign(SGLangEngine):
        async def model_info(self) -> ModelInfo:
            return replace(await super().model_info(), vocab_size=128)

    engines = [Foreign(engine_url), SGLangEngine("http://127.0.0.1:9")]
    with (
        publisher(policy, group, store, engines, run_dir, model_folder) as out,
        pytest.raises(EngineUnavailable, match="127.0.0.1:9"),
    ):
        out.publish(version=0, step=0)
