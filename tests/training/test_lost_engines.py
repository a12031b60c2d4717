"""If the only engine dies while a version is published, the version waits for it, with every transport."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from publish_support import ReturningEngine, assert_serves, disturb, publisher

from areal_agents.errors import EngineUnavailable
from areal_agents.inference import SGLangEngine
from areal_agents.inference.config import EmbeddedEngineConfig
from areal_agents.inference.engine import WeightBucket
from areal_agents.inference.engine_process import EngineProcess
from areal_agents.inference.pool import CurrentVersion
from areal_agents.inference.pool.monitor import load
from areal_agents.inference.ports import reserved_ports
from areal_agents.store import Store
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.lora import LoraOptions
from areal_agents.training.model.model import ModelOptions, load_policy

PUBLISHING = "areal_agents.training.publish"
OPTIONS = {"kernel": "torch", "threads": 1, "slots": 4, "max_context": 256}
BROADCAST_S = 240.0  # limit of a broadcast, which a restart of the engine takes much less than


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send weights in several buckets instead of one, and pause only briefly between attempts."""
    monkeypatch.setattr(f"{PUBLISHING}.transports.MB", 100)
    monkeypatch.setattr(f"{PUBLISHING}.preflight._POLL_S", 0.02)
    monkeypatch.setattr(f"{PUBLISHING}.swapping._FIRST_PAUSE_S", 0.02)


@pytest.mark.parametrize(
    ("transport", "dies_at", "refuses"),
    [
        ("disk", "/update_weights_from_disk", ""),
        ("tensor", "/pause_generation", ""),
        ("tensor", "/update_weights_from_tensor", ""),
        ("tensor", "/update_weights_from_disk", "/update_weights_from_tensor"),  # it dies during the repair
        ("tensor", "/continue_generation", ""),
        ("broadcast", "/pause_generation", ""),
        ("lora", "/load_lora_adapter", ""),
        ("lora", "/update_weight_version", ""),
    ],
)
def test_a_version_waits_for_the_only_engine(
    transport: str,
    dies_at: str,
    refuses: str,
    group: Ranks,
    store: Store,
    engine_url: str,
    run_dir: Path,
    model_folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    lora = LoraOptions(rank=2) if transport == "lora" else None
    policy = load_policy(model_folder, group, options=ModelOptions(lora=lora))
    disturb(policy, 1)
    engine = ReturningEngine(engine_url, model_folder, dies_at=dies_at, refuses=refuses)
    with publisher(
        policy, group, store, [engine], run_dir, model_folder, transport=transport, engine_wait_s=20
    ) as out:
        published = out.publish(version=1, step=1)
    assert published is not None and (published.left_out, published.repaired) == (0, 0)
    assert engine.asked.count("/model_info") == 4 and dies_at in engine.asked
    assert "engines were lost, delivering the version again" in caplog.text
    assert_serves(engine_url, policy, 1, adapters=lora is not None)


@pytest.mark.parametrize("transport", ["disk", "tensor"])
def test_the_engine_that_a_version_waited_for_is_compared_once_more(
    transport: str, group: Ranks, store: Store, engine_url: str, run_dir: Path, model_folder: Path
) -> None:
    """The next version is compared again, because the engine that came back may be another process."""
    policy = load_policy(model_folder, group)
    engine = ReturningEngine(engine_url, model_folder, dies_at="")
    with publisher(
        policy, group, store, [engine], run_dir, model_folder, transport=transport, engine_wait_s=20
    ) as out:
        agreements = []
        for version in range(1, 5):
            if version == 2:
                engine.asked.clear()
                engine.dies_at = "/continue_generation"
            published = out.publish(version=version, step=version)
            assert published is not None
            agreements.append(published.agreement)
    assert agreements == [1.0, None, 1.0, None]


def test_an_adapter_that_a_proxy_has_loaded_meanwhile_is_not_unloaded(
    group: Ranks,
    store: Store,
    engine_url: str,
    run_dir: Path,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests already name the adapter, and would be refused without it."""

    class CaughtUpEngine(ReturningEngine):
        async def start_anew(self) -> None:
            await super().start_anew()
            async with SGLangEngine(self.base_url) as engine:
                await load(engine, CurrentVersion(1, str(run_dir / "weights" / "v1")))

    monkeypatch.setattr(f"{PUBLISHING}.adapters._OTHERS_S", 0.02)
    policy = load_policy(model_folder, group, options=ModelOptions(lora=LoraOptions(rank=2)))
    disturb(policy, 1)
    engine = CaughtUpEngine(engine_url, model_folder, dies_at="/load_lora_adapter")
    with publisher(
        policy, group, store, [engine], run_dir, model_folder, transport="lora", engine_wait_s=20
    ) as out:
        out.publish(version=1, step=1)
    assert engine.asked.count("/load_lora_adapter") == 2 and "/unload_lora_adapter" not in engine.asked
    assert_serves(engine_url, policy, 1, adapters=True)


@pytest.mark.parametrize("transport", ["disk", "tensor"])
def test_the_wait_for_an_engine_that_does_not_come_back_ends(
    transport: str, group: Ranks, store: Store, engine_url: str, run_dir: Path, model_folder: Path
) -> None:
    engine = ReturningEngine(engine_url, model_folder, dies_at="/pause_generation", looks=None)
    with publisher(
        load_policy(model_folder, group), group, store, [engine], run_dir, model_folder,
        transport=transport, engine_wait_s=0.3,
    ) as out:  # fmt: skip
        began = time.monotonic()
        with pytest.raises(EngineUnavailable, match="not reachable"):
            out.publish(version=1, step=1)
        assert time.monotonic() - began > 0.3


class KilledEngine(SGLangEngine):
    """The client of a server that is killed at the second bucket and restarted shortly afterwards."""

    def __init__(self, server: EngineProcess) -> None:
        super().__init__(server.url, control_timeout_s=BROADCAST_S)
        self.buckets = 0
        self.again = threading.Timer(0.5, server.start)
        self._victim = server

    async def receive_weights(self, bucket: WeightBucket, *, group: str, version: int, last: bool) -> None:
        self.buckets += 1
        call = asyncio.ensure_future(super().receive_weights(bucket, group=group, version=version, last=last))
        if self.buckets == 2:
            await asyncio.sleep(0)  # the request is sent, and the broadcast begins
            os.killpg(self._victim.pid, signal.SIGKILL)
            self._victim.wait()
            self.again.start()
        await call


@pytest.fixture
def server(model_folder: Path) -> Iterator[EngineProcess]:
    """An engine that can be killed, and restarted on the same port."""
    with reserved_ports(1) as (port,):
        config = EmbeddedEngineConfig(model=str(model_folder), port=port, **OPTIONS)
        with EngineProcess(config) as engine:
            yield engine


def test_a_killed_engine_gets_the_version_by_a_broadcast_when_it_is_back(
    group: Ranks, store: Store, server: EngineProcess, run_dir: Path, model_folder: Path
) -> None:
    policy = load_policy(model_folder, group)
    engine = KilledEngine(server)
    with publisher(
        policy, group, store, [engine], run_dir, model_folder,
        transport="broadcast", timeout_s=BROADCAST_S, engine_wait_s=2 * BROADCAST_S,
    ) as out:  # fmt: skip
        for version in range(2):
            disturb(policy, version)
            published = out.publish(version=version, step=version)
            assert published is not None and (published.left_out, published.repaired) == (0, 0)
            assert published.publish_s < BROADCAST_S  # the broken broadcast is not waited for
            assert published.agreement == (None if version else 1.0)
            assert_serves(server.url, policy, version)
    assert engine.buckets > 4
