"""Publishes versions through an object storage, for engines that the trainer does not reach.

The folder of a version is complete in the storage before its row is recorded, and the row has its name and
the checksum of its manifest. Each engine's process then reads it and has the engine load it
(`launch/weight_fetcher.py`); the trainer waits until the engines' rows in the store say that they have it.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from areal_agents.errors import EngineError, EngineUnavailable, StorageError, TrainingError
from areal_agents.object_storage.location import Location
from areal_agents.object_storage.uploads import Uploaded, Uploads
from areal_agents.store import Store
from areal_agents.store.engine_weights import EngineWeights
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.folder import remove_unfinished
from areal_agents.training.model.model import Policy
from areal_agents.training.publish.config import PublishConfig, versions_folder
from areal_agents.training.publish.publisher import Published
from areal_agents.training.publish.rank_failures import on_every_rank
from areal_agents.training.publish.version_folder import (
    WrittenVersion,
    forget_before,
    version_folder,
    write_version,
)

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0  # between two attempts to write to the storage


class StoragePublisher:
    """Publishes the versions of one run. Every rank has a publisher; only the first rank's uses the store and
    the storage.

    Args:
        store: given only on the first rank.
        run_dir: the run's folder. model_path: the folder of the initial model.
        keep: number of versions to keep, here and in the storage.
        adapters: whether versions are adapters of the initial model.
        engines: the number of engines.

    Raises:
        ConfigError: no installed package opens the location.
    """

    def __init__(
        self,
        config: PublishConfig,
        policy: Policy,
        ranks: Ranks,
        *,
        store: Store | None,
        run_dir: Path,
        model_path: Path,
        keep: int,
        adapters: bool,
        engines: int,
    ) -> None:
        if (store is None) == ranks.is_first:
            raise ValueError("expected a store on the first rank, and none on any other rank")
        self._config, self._policy, self._ranks, self._store = config, policy, ranks, store
        self._model_path, self._keep, self._adapters, self._engines = model_path, keep, adapters, engines
        self._weights = versions_folder(config.folder, run_dir)
        self._uploads: Uploads | None = None
        if store is not None:
            remove_unfinished(self._weights, "v*")
            location = Location.open(config.location).child(store.run_id())
            self._uploads = Uploads(location, whole_every=1 if adapters else config.whole_every, keep=keep)

    def publish(self, *, version: int, step: int) -> Published | None:
        """Write a version to the storage, record it, and wait until the engines have it; return None on all
        ranks except the first. Collective.

        Raises:
            EngineError: no engine has the version in time. It stays recorded; a resumed run publishes the
                weights again under a later version.
            TrainingError: the version cannot be written; nothing is recorded.
            Conflict: another process is the trainer now; nothing is recorded.
        """
        started = time.monotonic()
        path = version_folder(self._weights, version)
        written = on_every_rank(self._ranks, lambda: self._write(version))
        uploaded = on_every_rank(self._ranks, lambda: self._upload(path, version))
        assemble_s = time.monotonic() - started

        def record() -> None:
            if self._store is not None and uploaded is not None:
                stored = uploaded.stored
                self._store.publish_version(
                    version, step=step, path=str(path), checksum=stored.checksum, object_folder=stored.folder
                )

        on_every_rank(self._ranks, record)
        have = on_every_rank(self._ranks, lambda: self._wait(version))
        if self._uploads is None or written is None or have is None:
            return None
        forget_before(self._weights, version, keep=self._keep)
        self._uploads.forget_before(version)
        compared = [one.agreement for one in have if one.agreement is not None]
        busy = [one.busy_s for one in have if one.busy_s is not None]
        return Published(
            version=version,
            path=path,
            publish_s=time.monotonic() - started,
            assemble_s=assemble_s,
            pause_s=max(one.pause_s for one in have),
            nbytes=written.nbytes,
            sent_bytes=max(one.received_bytes for one in have),
            density=written.density,
            agreement=min(compared, default=None),
            left_out=self._engines - len(have),
            repaired=0,
            busy_s=sum(busy) / len(busy) if len(busy) == self._engines else None,
        )

    def finish(self) -> None:
        """There is nothing to complete: every version is in the storage before its row."""

    def close(self) -> None:
        """There is nothing to release."""

    def _write(self, version: int) -> WrittenVersion | None:
        return write_version(
            self._policy,
            self._weights,
            version,
            base=self._model_path,
            adapter=self._adapters,
            writes=self._ranks.is_first,
        )

    def _upload(self, path: Path, version: int) -> Uploaded | None:
        """Write a version to the storage, again and again until it takes it or the time is over.

        Before each attempt the store says whether this process is still the trainer.
        """
        if self._uploads is None or self._store is None:
            return None
        deadline, pause_s = time.monotonic() + self._config.timeout_s, _FIRST_PAUSE_S
        while True:
            began = time.monotonic()
            self._store.check_trainer()
            try:
                self._uploads.find_earlier(self._store.object_folders)
                uploaded = self._uploads.write(path, version)
            except StorageError as error:
                if time.monotonic() + pause_s > deadline:
                    raise TrainingError(
                        f"version {version} cannot be written to {self._config.location}: {error}"
                    ) from error
                logger.warning("version %d is written again in %.0f s: %s", version, pause_s, error)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                logger.info(
                    "version %d is in the storage: %.1f MB in %.2f s", version,
                    uploaded.manifest.stored_bytes / 1e6, time.monotonic() - began,
                )  # fmt: skip
                return uploaded

    def _wait(self, version: int) -> list[EngineWeights] | None:
        """Wait until every engine that is running has the version, and return what these have.

        Engines that do not have it within `timeout_s`, from when the first one is running, are left out. An
        engine that was serving keeps serving its old version until the next one is published; from then on
        the proxies send it nothing until it has the newest one.

        Raises:
            EngineUnavailable: no engine is running for `engine_wait_s`.
            EngineError: none has it within `timeout_s`.
        """
        if self._store is None:
            return None
        alone_since = time.monotonic()
        began: float | None = None  # when the first engine was running
        said: dict[int, str] = {}
        while True:
            alive = [row.weights for row in self._store.engine_weights() if row.is_alive]
            have = [one for one in alive if one.version is not None and one.version >= version]
            late = [one for one in alive if one not in have]
            now = time.monotonic()
            if have and not late:
                return have
            if alive:
                alone_since, began = now, now if began is None else began
            for one in late:
                if one.problem is not None and said.get(one.index) != one.problem:
                    said[one.index] = one.problem
                    logger.warning("engine %d has not loaded version %d: %s", one.index, version, one.problem)
            if now - alone_since >= self._config.engine_wait_s:
                raise EngineUnavailable(
                    f"no engine has written to the store what it serves for {self._config.engine_wait_s:g} "
                    f"s, so none took version {version}"
                )
            if alive and began is not None and now - began >= self._config.timeout_s:
                why = "; ".join(f"engine {one.index}: {one.problem or 'it is not done'}" for one in late)
                if not have:
                    raise EngineError(
                        f"no engine has loaded version {version} within {self._config.timeout_s:g} s: {why}"
                    )
                logger.warning("version %d is published without some engines: %s", version, why)
                return have
            time.sleep(_POLL_S)
