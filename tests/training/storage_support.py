"""The trainer and the engine of a run whose versions go through an object storage, here a folder."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from areal_agents.inference import SGLangEngine
from areal_agents.launch.weight_fetcher import WeightFetcher
from areal_agents.object_storage.location import Location
from areal_agents.store import Store
from areal_agents.store.engine_weights import EngineWeights
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.model import Policy
from areal_agents.training.publish.config import PublishConfig
from areal_agents.training.publish.storage_publisher import StoragePublisher

WAIT_S = 60.0


def until(is_so: Callable[[], bool]) -> None:
    """Wait until a condition is true, for at most `WAIT_S` seconds."""
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Site:
    """An object storage and a store, with the publisher and the weight fetcher that use them."""

    def __init__(self, folder: Path, store: Store, model: Path, *, adapters: bool = False) -> None:
        self.store, self.model, self.adapters = store, model, adapters
        self.bucket = folder / "bucket"
        self.engine_folder = folder / "engine"
        self.trainer_folder = folder / "trainer"

    def publisher(self, policy: Policy, group: Ranks, **config: float) -> StoragePublisher:
        return StoragePublisher(
            self.config(**config), policy, group, store=self.store, run_dir=self.trainer_folder,
            model_path=self.model, keep=2, adapters=self.adapters, engines=1,
        )  # fmt: skip

    @contextmanager
    def fetcher(self, url: str) -> Iterator[None]:
        """Run the weight fetcher of an engine, and check that it removes its row when it ends."""
        stop = threading.Event()

        async def fetch() -> None:
            config = self.config()
            async with SGLangEngine(url, control_timeout_s=60) as engine:
                await WeightFetcher(
                    config, self.store, engine, Location.open(config.location),
                    index=0, epoch=None, folder=self.engine_folder,
                    model=self.model if self.adapters else None, keep=2, stop=stop,
                ).run()  # fmt: skip

        thread = threading.Thread(target=lambda: asyncio.run(fetch()))
        thread.start()
        try:
            self.wait(lambda weights: True)
            yield
        finally:
            stop.set()
            thread.join()
        assert self.store.engine_weights() == []

    def wait(self, is_so: Callable[[EngineWeights], bool]) -> EngineWeights:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            for row in self.store.engine_weights():
                if is_so(row.weights):
                    return row.weights
            time.sleep(0.05)
        raise AssertionError(self.store.engine_weights())

    def stored(self, version: int) -> Path:
        """Return the folder of a version in the storage."""
        [found] = (self.bucket / self.store.run_id()).glob(f"v{version}-*")
        return found

    def stored_versions(self) -> list[str]:
        """Return the names of the versions in the storage, one for each folder."""
        return sorted(path.name.partition("-")[0] for path in (self.bucket / self.store.run_id()).iterdir())

    def config(self, **config: float) -> PublishConfig:
        return PublishConfig.model_validate(
            {"transport": "object_storage", "location": f"file://{self.bucket}", "whole_every": 3, **config}
        )
