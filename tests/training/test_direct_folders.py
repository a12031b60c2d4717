"""Transports that send the weights first: their version folders, and how their failures are handled."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from publish_support import LONG, PROMPT, assert_serves, disturb, publisher
from safetensors.torch import load_file

from areal_agents.errors import EngineError, EngineRejected, EngineUnavailable, TrainingError
from areal_agents.inference import SGLangEngine
from areal_agents.inference.engine import PauseMode, WeightGroup
from areal_agents.store import Store
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.model import Policy
from areal_agents.training.publish.direct_folders import DirectFolders
from areal_agents.training.publish.host_copy import HostCopy

GIVEN_UP = "TRANSPORT DOES NOT WORK"
pytestmark = pytest.mark.usefixtures("small_buckets")


def folders(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "weights").iterdir())


def given_up(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if GIVEN_UP in record.getMessage()]


def is_pending(store: Store) -> bool:
    latest = store.latest_version()
    assert latest is not None
    return latest.folder_pending


def test_a_folder_is_written_for_every_nth_version_and_for_the_last(
    policy: Policy, group: Ranks, store: Store, engine_url: str, run_dir: Path, model_folder: Path
) -> None:
    engines = [SGLangEngine(engine_url)]
    with publisher(
        policy, group, store, engines, run_dir, model_folder, transport="tensor", folder_every=2, keep=4
    ) as out:
        for version in range(4):
            disturb(policy, version)
            published = out.publish(version=version, step=version)
            assert published is not None and published.density is None  # the previous version was not kept
            assert published.sent_bytes == published.nbytes > 0
            assert_serves(engine_url, policy, version)
        assert folders(run_dir) == ["v0", "v2"] and is_pending(store)
        out.finish()
        assert folders(run_dir) == ["v0", "v2", "v3"] and not is_pending(store)
    last = load_file(run_dir / "weights" / "v3" / "model.safetensors")
    assert all(torch.equal(last[name], weight) for name, weight in policy.full_state_dict().items())


def test_the_row_marks_the_folder_as_pending_before_an_engine_has_the_weights(
    policy: Policy, group: Ranks, store: Store, engine_url: str, run_dir: Path, model_folder: Path
) -> None:
    seen = []

    class Looking(SGLangEngine):
        async def begin_weight_update(self, pause: PauseMode | None = None) -> None:
            latest = store.latest_version()
            assert latest is not None
            seen.append((latest.version, latest.folder_pending, Path(latest.path).exists()))
            await super().begin_weight_update(pause)

    with publisher(
        policy, group, store, [Looking(engine_url)], run_dir, model_folder, transport="tensor"
    ) as out:
        out.publish(version=0, step=0)
    assert seen == [(0, True, False)] and not is_pending(store) and folders(run_dir) == ["v0"]


@pytest.mark.parametrize("transport", ["tensor", "broadcast"])
def test_the_engine_samples_while_buckets_arrive(
    transport: str, policy: Policy, group: Ranks, store: Store, engine_url: str, run_dir: Path,
    model_folder: Path,
) -> None:  # fmt: skip
    """A generation that begins after the first bucket ends before the second is sent."""
    versions: list[set[int]] = []

    class Sampling(SGLangEngine):
        async def begin_weight_update(self, pause: PauseMode | None = None) -> None:
            await super().begin_weight_update(pause)
            completion = await self.generate("meanwhile", PROMPT, LONG)
            versions.append(set(completion.versions.tolist()))

    disturb(policy, 1)
    with publisher(
        policy, group, store, [Sampling(engine_url)], run_dir, model_folder, transport=transport
    ) as out:
        out.publish(version=1, step=1)
        assert_serves(engine_url, policy, 1)
    assert versions == [{0}]


def test_an_engine_is_repaired_from_a_folder_that_was_not_due(
    policy: Policy, group: Ranks, store: Store, engine_url: str, run_dir: Path, model_folder: Path
) -> None:
    class Refusing(SGLangEngine):
        async def update_weights_from_tensors(
            self, payloads: Sequence[str], version: int, **options: Any
        ) -> None:
            if version == 1 and options["last"]:
                raise EngineRejected(f"{self.base_url} refused the last bucket")
            await super().update_weights_from_tensors(payloads, version, **options)

    engines = [Refusing(engine_url)]
    with publisher(
        policy, group, store, engines, run_dir, model_folder, transport="tensor", folder_every=9
    ) as out:
        for version, repaired in enumerate([0, 1, 0]):
            disturb(policy, version)
            published = out.publish(version=version, step=version)
            assert published is not None and published.repaired == repaired
            assert_serves(engine_url, policy, version)
            if version:  # the first folder, which is always due, may still be being written
                assert is_pending(store) == (version == 2)
    assert folders(run_dir) == ["v0", "v1"]


def test_a_last_bucket_that_arrives_too_late_does_not_complete_the_update(
    policy: Policy, group: Ranks, store: Store, engine_url: str, run_dir: Path, model_folder: Path
) -> None:
    """The buffer may have been overwritten before the engine read it."""
    served = []

    class Late(SGLangEngine):
        async def update_weights_from_tensors(
            self, payloads: Sequence[str], version: int, **options: Any
        ) -> None:
            await super().update_weights_from_tensors(payloads, version, **options)
            if version == 1 and options["last"]:
                raise EngineUnavailable(f"{self.base_url} did not answer in time")

        async def prepare_weights_from_disk(self, path: str) -> None:
            served.append((await self.model_info()).version)
            await super().prepare_weights_from_disk(path)

    with publisher(
        policy, group, store, [Late(engine_url)], run_dir, model_folder, transport="tensor"
    ) as out:
        for version, repaired in enumerate([0, 1, 0]):
            disturb(policy, version)
            published = out.publish(version=version, step=version)
            assert published is not None and published.repaired == repaired
            assert_serves(engine_url, policy, version)
    assert served == [0]  # the engine served version 0 until it read the folder


def test_no_further_folder_is_written_for_an_engine_that_stays_lost(
    policy: Policy, group: Ranks, store: Store, engine_url: str, run_dir: Path, model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The HTTP server of the engine answers, but the process that has the weights is dead."""
    copies = []

    class HalfDead(SGLangEngine):
        @property
        def base_url(self) -> str:
            return "http://half-dead"

        async def update_weights_from_tensors(self, *arguments: Any, **options: Any) -> None:
            raise EngineUnavailable(f"{self.base_url} did not answer")

        async def begin_weight_update(self, pause: PauseMode | None = None) -> None:
            """Succeed, as with a server whose HTTP process answers this request by itself."""

        async def abandon_weight_update(self) -> None:
            raise EngineUnavailable(f"{self.base_url} did not answer")

    begin = DirectFolders.begin

    def begin_and_note(self: DirectFolders, version: int, *, copied: bool = False) -> HostCopy | None:
        copy = begin(self, version, copied=copied)
        copies.append(copy is not None)
        return copy

    monkeypatch.setattr(DirectFolders, "begin", begin_and_note)
    engines = [HalfDead(engine_url), SGLangEngine(engine_url)]
    with publisher(
        policy, group, store, engines, run_dir, model_folder, transport="tensor", folder_every=9
    ) as out:
        for version in range(3):
            disturb(policy, version)
            published = out.publish(version=version, step=version)
            assert published is not None and (published.left_out, published.repaired) == (1, 0)
            assert_serves(engine_url, policy, version)
    assert folders(run_dir) == ["v0"] and copies == [True, True, False]  # one more when it answered again


def test_a_folder_that_cannot_be_written_is_an_error_and_the_engines_keep_serving(
    policy: Policy, group: Ranks, store: Store, engine_url: str, run_dir: Path, model_folder: Path
) -> None:
    with publisher(
        policy, group, store, [SGLangEngine(engine_url)], run_dir, model_folder, transport="tensor"
    ) as out:
        out.publish(version=0, step=0)
        out.finish()
        disturb(policy, 1)
        weights, elsewhere = run_dir / "weights", run_dir / "elsewhere"
        weights.rename(elsewhere)
        weights.write_text("a file, in which no folder can be made")
        out.publish(version=1, step=1)
        with pytest.raises(TrainingError, match=r"cannot write the weights to .*/v1"):
            out.publish(version=2, step=2)
        assert_serves(engine_url, policy, 1)
        latest = store.latest_version()
        assert latest is not None and (latest.version, latest.folder_pending) == (1, True)
        weights.unlink()
        elsewhere.rename(weights)
        out.publish(version=2, step=2)
        out.finish()
    assert folders(run_dir) == ["v0", "v2"] and not is_pending(store)


def test_too_little_memory_for_the_copy_is_an_error_before_anything_is_recorded(
    policy: Policy, group: Ranks, store: Store, engine_url: str, run_dir: Path, model_folder: Path,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 10 kB\n")
    monkeypatch.setattr("areal_agents.training.publish.host_copy._MEMORY", tmp_path / "meminfo")
    with (
        publisher(
            policy, group, store, [SGLangEngine(engine_url)], run_dir, model_folder, transport="tensor"
        ) as out,
        pytest.raises(TrainingError, match=r"needs .* GB.*transport: disk"),
    ):
        out.publish(version=0, step=0)
    assert store.latest_version() is None


def test_a_group_that_cannot_be_joined_is_reported_once_and_the_folder_is_loaded(
    policy: Policy, group: Ranks, store: Store, engine_url: str, run_dir: Path, model_folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    joins = []

    class Refusing(SGLangEngine):
        async def join_weight_group(self, group: WeightGroup) -> None:
            joins.append(group.name)
            raise EngineError(f"{self.base_url}: Failed to initialize custom process group: no NCCL")

    caplog.set_level(logging.ERROR)
    with publisher(
        policy, group, store, [Refusing(engine_url)], run_dir, model_folder, transport="broadcast",
        timeout_s=20,
    ) as out:  # fmt: skip
        for version in range(3):
            disturb(policy, version)
            published = out.publish(version=version, step=version)
            assert published is not None and published.repaired == (1 if version == 0 else 0)
            assert_serves(engine_url, policy, version)
            assert not is_pending(store)
        out.finish()
        assert out._folders._copy is None  # a copy of a model of 8 B would take 16 GB of host memory
    assert len(joins) == 1
    (said,) = given_up(caplog)
    assert "broadcast reached no engine" in said and "no NCCL" in said and "GB a version" in said


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        ("Duplicate GPU detected : rank 0 and rank 1 both on device 1000", "Duplicate GPU detected"),
        ("NCCL error: unhandled system error. No space left on device (28)", "/dev/shm, .* --shm-size"),
    ],
)
def test_a_communicator_that_nccl_cannot_create_is_reported_once(
    failure: str, says: str, policy: Policy, group: Ranks, store: Store, engine_url: str, run_dir: Path,
    model_folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """NCCL creates its communicator at the first broadcast, and fails there."""
    calls = []

    def duplicate(*arguments: Any, **options: Any) -> None:
        calls.append(arguments)
        raise RuntimeError(failure)

    monkeypatch.setattr(dist, "broadcast", duplicate)
    caplog.set_level(logging.ERROR)
    with publisher(
        policy, group, store, [SGLangEngine(engine_url)], run_dir, model_folder, transport="broadcast",
        timeout_s=20,
    ) as out:  # fmt: skip
        for version in range(2):
            disturb(policy, version)
            out.publish(version=version, step=version)
            assert_serves(engine_url, policy, version)
    assert len(calls) == 1
    (said,) = given_up(caplog)
    assert re.search(says, said)


def test_the_transport_is_used_again_after_an_engine_was_lost(
    policy: Policy, group: Ranks, store: Store, engine_url: str, run_dir: Path, model_folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    class Losing(SGLangEngine):
        lost = 0

        async def join_weight_group(self, group: WeightGroup) -> None:
            if self.lost < 2:
                self.lost += 1
                raise EngineUnavailable(f"{self.base_url} did not answer")
            await super().join_weight_group(group)

    with publisher(
        policy, group, store, [Losing(engine_url)], run_dir, model_folder, transport="broadcast",
        timeout_s=20,
    ) as out:  # fmt: skip
        for version, repaired in enumerate([1, 1, 0]):
            disturb(policy, version)
            published = out.publish(version=version, step=version)
            assert published is not None and published.repaired == repaired
            assert_serves(engine_url, policy, version)
    assert not given_up(caplog)
