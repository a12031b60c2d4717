"""In the process of an engine: reads each version from the object storage, and has the engine load it.

It needs the store, which says what the current version is, the storage, and its own engine. Its row in the
store says what the engine has, which the trainer waits for. What fails is said there and in the log, and is
tried again; meanwhile the engine keeps the version that it has.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from areal_agents.config import Config
from areal_agents.errors import ArealAgentsError, EngineError, StoreError
from areal_agents.inference.clients import EngineClient, connect, protocol_of
from areal_agents.launch.run_folder import Endpoints, RunFolder
from areal_agents.launch.waiting import OnWait
from areal_agents.object_storage.fetched import FetchedVersions
from areal_agents.object_storage.location import Location
from areal_agents.object_storage.manifest import StoredVersion
from areal_agents.store import Store, VersionRow
from areal_agents.store.engine_weights import EngineWeights
from areal_agents.store.roles import BEAT_S
from areal_agents.training.publish import adapters, disk
from areal_agents.training.publish.config import PublishConfig, versions_folder
from areal_agents.training.publish.fleet import Fleet

logger = logging.getLogger(__name__)

_LOOK_S = 0.5  # between two reads of the current version
_LONGEST_PAUSE_S = 15.0  # between two attempts after an error
_END_S = 10.0  # longest wait for what is under way when the engine ends


class WeightFetcher:
    """Keeps one engine at the current version.

    Args:
        engine: its client; the caller closes it.
        index: its index.
        epoch: that of its process's place in the run; None: it has none.
        folder: where its versions are kept.
        model: the folder of the initial model if versions are adapters; None: they are whole weights.
        keep: the number of versions that are kept.
        stop: ends `run`; it is also set from here when another process has the place of this one.
    """

    def __init__(
        self,
        config: PublishConfig,
        store: Store,
        engine: EngineClient,
        location: Location,
        *,
        index: int,
        epoch: int | None,
        folder: Path,
        model: Path | None,
        keep: int,
        stop: threading.Event,
    ) -> None:
        self._config, self._store, self._engine, self._location = config, store, engine, location
        self._folder, self._model, self._keep, self._stop = folder, model, keep, stop
        self._shown = EngineWeights(index, secrets.token_hex(6), epoch=epoch)
        self._fetched: FetchedVersions | None = None
        self._is_compared = False
        self._old_adapters = adapters.OldAdapters([engine])

    async def run(self) -> None:
        """Bring the engine to each new version until `stop` is set."""
        beating: asyncio.Task[None] | None = None
        pause_s = _LOOK_S
        try:
            while not self._stop.is_set():
                try:
                    await self._look()
                    pause_s = _LOOK_S
                except ArealAgentsError as error:
                    pause_s = self._failed(str(error), pause_s)
                except Exception as error:  # a bug; without another attempt the engine would never be updated
                    logger.exception("the weights of the engine could not be updated")
                    pause_s = self._failed(repr(error), pause_s)
                if beating is None:
                    beating = asyncio.create_task(self._beat())
                await self._sleep(pause_s)
        finally:
            try:
                if beating is not None:
                    beating.cancel()
                    with suppress(asyncio.CancelledError):
                        await beating
                await self._old_adapters.aclose()
            finally:
                self._leave()

    async def _look(self) -> None:
        """Have the engine load the current version, unless it has it."""
        served = await asyncio.to_thread(self._store.served_versions)
        if served is None or not await self._answers():
            return
        goal = served.stable
        if self._shown.version == goal.version == (await self._engine.model_info()).version:
            self._shown = replace(self._shown, problem=None)
            return
        began = time.monotonic()
        path, received = await asyncio.to_thread(self._fetch, goal)
        fetch_s = time.monotonic() - began
        pause_s, agreement = await self._load(path, goal.version)
        busy_s = await self._engine.busy_s()
        self._shown = replace(
            self._shown, version=goal.version, problem=None, pause_s=pause_s, fetch_s=fetch_s,
            received_bytes=received, agreement=agreement, busy_s=busy_s,
        )  # fmt: skip
        await self._show()
        logger.info(
            "the engine serves version %d: %.1f MB in %.2f s from the storage, a pause of %.2f s",
            goal.version, received / 1e6, fetch_s, pause_s,
        )  # fmt: skip
        old = await asyncio.to_thread(self._forget_before, goal.version)
        if self._model is not None:
            self._old_adapters.forget(old)

    def _fetch(self, goal: VersionRow) -> tuple[Path, int]:
        """Return the folder of a version, and how many bytes of the storage were read for it."""
        if goal.checksum is None or goal.object_folder is None:
            raise EngineError(
                f"version {goal.version} was published by another transport than object_storage, so it "
                "cannot be read here; the next version can"
            )
        if self._fetched is None:
            location = self._location.child(self._store.run_id())
            self._fetched = FetchedVersions(self._folder, location, self._stop)
        before = self._fetched.received_bytes
        path = self._fetched.fetch(StoredVersion(goal.version, goal.object_folder, goal.checksum))
        return path, self._fetched.received_bytes - before

    async def _load(self, path: Path, version: int) -> tuple[float, float | None]:
        """Return how long the engine did not sample in seconds, and the share of its weights that agree."""
        checks = None
        is_due = self._config.verify == "every" or not self._is_compared
        if self._config.verify != "off" and is_due:
            from areal_agents.training.publish.checksums import EngineComparison, FolderWeights  # torch

            # an engine's checksum covers the base weights, without adapters
            checks = await asyncio.to_thread(
                lambda: EngineComparison(FolderWeights(path if self._model is None else self._model))
            )
        fleet = Fleet([self._engine], version)
        deliver = disk.deliver if self._model is None else adapters.deliver
        pause_s = await deliver(fleet, path, pause=self._config.pause, check=checks)
        if checks is None:
            return pause_s, None
        self._is_compared = bool(checks.compared)
        return pause_s, checks.share

    def _forget_before(self, version: int) -> list[int]:
        return [] if self._fetched is None else self._fetched.forget_before(version, keep=self._keep)

    async def _answers(self) -> bool:
        try:
            await self._engine.model_info()
        except EngineError:  # it is starting, or ends
            return False
        return True

    def _failed(self, problem: str, pause_s: float) -> float:
        """Note a failure, and return the pause after it in seconds."""
        if problem != self._shown.problem:
            logger.warning("the engine keeps version %s: %s", self._shown.version, problem)
            self._shown = replace(self._shown, problem=problem)
        return min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _beat(self) -> None:
        """From the engine's first answer on, show again and again that this process is running, also while a
        version is read."""
        has_answered = False
        while True:
            try:
                has_answered = has_answered or await self._answers()
                if has_answered:
                    with suppress(EngineError):
                        busy_s = await self._engine.busy_s()
                        self._shown = replace(self._shown, busy_s=busy_s)  # which may be another by now
                    await self._show()
            except StoreError as error:
                logger.warning("what the engine serves could not be written to the store: %s", error)
            except Exception:  # a bug; without further rows the trainer would consider the engine dead
                logger.exception("what the engine serves could not be written to the store")
            await asyncio.sleep(BEAT_S if has_answered else _LOOK_S)

    async def _show(self) -> None:
        if not await asyncio.to_thread(self._store.show_engine_weights, self._shown):
            logger.error("another process is engine %d of the run now; this one ends", self._shown.index)
            self._stop.set()

    async def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._stop.is_set() and (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, _LOOK_S))

    def _leave(self) -> None:
        try:
            self._store.leave_engine_weights(self._shown.index, self._shown.process)
        except StoreError as error:  # the row becomes old
            logger.warning("the end of the engine could not be written to the store: %s", error)


@contextmanager
def fetching_weights(
    config: Config, folder: RunFolder, endpoints: Endpoints, *, index: int
) -> Iterator[None]:
    """Keep an engine at the current version within the block, if it reads versions from an object storage.

    Raises:
        ConfigError: no installed package opens the storage.
    """
    publish = config.trainer.publish
    if publish.transport != "object_storage":
        yield
        return
    location = Location.open(publish.location)
    stop = threading.Event()

    async def fetch(store: Store) -> None:
        engine = connect(
            endpoints.engine_urls[index],
            protocol_of(config.engine.kind),
            key=endpoints.engine_key,
            update_timeout_s=publish.timeout_s,
        )
        async with engine:
            fetcher = WeightFetcher(
                publish,
                store,
                engine,
                location,
                index=index,
                epoch=None if endpoints.place is None else endpoints.place.epoch,
                folder=versions_folder(publish.folder, folder.root) / f"engine-{index}",
                model=Path(config.model) if config.trainer.publishes_adapters else None,
                keep=config.trainer.keep_weights,
                stop=stop,
            )
            await fetcher.run()

    def run() -> None:
        pause_s = _LOOK_S
        while not stop.is_set():
            try:
                with Store.open(folder.store_at(config.store.url), config.store.durability) as store:
                    asyncio.run(fetch(store))
            except Exception as error:  # without another attempt the engine would never be updated
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                logger.warning(
                    "the weights of the engine are not kept current; another attempt begins in %.0f s: %s",
                    pause_s, error, exc_info=not isinstance(error, ArealAgentsError),
                )  # fmt: skip
                stop.wait(pause_s)

    thread = threading.Thread(target=run, name="weights", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(_END_S)


def check_location(publish: PublishConfig) -> None:
    """Check that this machine can write to the object storage of a run and read from it, if it has one.

    Raises:
        ConfigError: it cannot; the message says why.
    """
    if publish.transport == "object_storage":
        Location.open(publish.location).check()


def wait_for_fetchers(
    store: Store, count: int, *, timeout_s: float, check: Callable[[], object], wait: OnWait
) -> None:
    """Return when `count` engines have written to the store that they answer.

    Args:
        check: called again and again; an exception from it ends the wait.
        wait: called during the wait.

    Raises:
        ArealAgentsError: some have not within `timeout_s`.
    """
    begun = time.monotonic()
    while True:
        check()
        running = {row.weights.index for row in store.engine_weights() if row.is_alive}
        missing = [str(index) for index in range(count) if index not in running]
        if not missing:
            return
        what = f"the inference engine{'s' * (len(missing) > 1)} {', '.join(missing)}"
        waited_s = time.monotonic() - begun
        if waited_s > timeout_s:
            raise ArealAgentsError(
                f"waiting for {what}: none of them has written to the store within {timeout_s:g} s that it "
                "answers; see the logs of the engines"
            )
        wait(what, waited_s, timeout_s)
        time.sleep(_LOOK_S)
