"""Publishes a version by any transport, on every rank.

The row of a version is recorded before any engine has its weights, so a number is never used for two sets of
weights, whenever the trainer dies. With `disk` and `lora` the folder is complete before the row. With the
other transports the row says that the folder is pending; the engines are swapped, and then the folder is
written in the background (docs/decisions/weights-first.md).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal, TypeVar

from areal_agents.errors import EngineError
from areal_agents.inference.engine import Engine, MemoryKind
from areal_agents.store import Store, VersionRow
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.folder import remove_unfinished
from areal_agents.training.model.gathering import published_shapes
from areal_agents.training.model.model import Policy
from areal_agents.training.publish.adapters import OldAdapters
from areal_agents.training.publish.checksums import EngineComparison, FolderWeights
from areal_agents.training.publish.config import PublishConfig, versions_folder
from areal_agents.training.publish.direct_folders import DirectFolders
from areal_agents.training.publish.fleet import EventLoopThread, Fleet
from areal_agents.training.publish.host_copy import HostCopy
from areal_agents.training.publish.rank_failures import on_every_rank
from areal_agents.training.publish.sleep import fall_asleep, wake
from areal_agents.training.publish.swapping import Swapper
from areal_agents.training.publish.transports import Delivered, make_transport
from areal_agents.training.publish.version_folder import (
    WrittenVersion,
    forget_before,
    version_folder,
    write_version,
)

T = TypeVar("T")
_ANSWER_S = 5.0  # longest wait for an answer of an engine that missed the version before
_Outcome = tuple[Fleet, EngineComparison | None, Delivered, WrittenVersion | None]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Published:
    """A version that engines now serve.

    Attributes:
        path: its folder, which may still be being written.
        publish_s: total time in seconds. assemble_s: the part of it spent gathering the weights and writing
            the folder, or sending them. pause_s: the longest time that an engine did not sample.
        nbytes: size of the weights. sent_bytes: size of what the engine that received most was sent; 0 if
            engines read the folder.
        density: the share of weights that changed since the previous version; None if there is none, or it
            was not kept.
        agreement: the share of the weights held by the engines that were compared and equal those published;
            None if nothing was compared.
        left_out: engines that did not take the version. repaired: engines that loaded the folder after
            another transport failed.
        busy_s: mean time in seconds that the engines have spent sampling since they started; None if an
            engine does not report it.
    """

    version: int
    path: Path
    publish_s: float
    assemble_s: float
    pause_s: float
    nbytes: int
    sent_bytes: int
    density: float | None
    agreement: float | None
    left_out: int
    repaired: int
    busy_s: float | None


class Publisher:
    """Publishes the versions of one run. Every rank has a publisher; only the first rank's uses the store and
    the engines.

    Args:
        store, engines: given only on the first rank.
        run_dir: the run's folder. model_path: the folder of the initial model.
        keep: number of version folders to keep.
        engine_gpus: the GPUs of each engine, on the machine whose GPU r is that of rank r; empty if they are
            not known.
        canary: the URLs of the engines that serve candidates; empty without a canary, which needs a
            transport that writes the folder first.
    """

    def __init__(
        self,
        config: PublishConfig,
        policy: Policy,
        ranks: Ranks,
        *,
        store: Store | None,
        engines: Sequence[Engine],
        run_dir: Path,
        model_path: Path,
        keep: int,
        engine_gpus: Sequence[Sequence[int]] = (),
        canary: Collection[str] = (),
    ) -> None:
        if (store is None) == ranks.is_first or bool(engines) != ranks.is_first:
            raise ValueError(
                "expected a store and at least one engine on the first rank, and neither on any other rank"
            )
        self._config, self._policy, self._ranks = config, policy, ranks
        self._store, self._engines = store, tuple(engines)
        self._of_canary = tuple(engine for engine in engines if engine.base_url in canary)
        self._of_stable = tuple(engine for engine in engines if engine.base_url not in canary)
        self._model_path, self._keep = model_path, keep
        self._weights = versions_folder(config.folder, run_dir)
        self._verified: set[str] = set()  # engines, by base URL
        # for each engine that missed the last version, how many times in a row it answered since
        self._answered: dict[str, int] = {}
        self._count = 0  # versions since the start
        weights = sum(map(prod, published_shapes(policy.model).values()))
        self._nbytes = weights * policy.saved_dtype.itemsize
        self._loop = EventLoopThread() if engines else None
        self._folders = DirectFolders(
            policy,
            ranks,
            self._weights,
            like=model_path,
            every=config.folder_every,
            keep=keep,
            written=self._folder_written,
        )
        self._transport = make_transport(
            config, policy, ranks, self._loop, self._folders, engines=engines, engine_gpus=engine_gpus
        )
        self._swapper = Swapper(
            self._transport,
            ranks,
            self._loop,
            self._engines,
            policy.model.config,
            wait_s=config.engine_wait_s,
        )
        self._old_adapters = OldAdapters(self._engines)
        if engines:
            remove_unfinished(self._weights, "v*")

    def publish(self, *, version: int, step: int) -> Published | None:
        """Write, record and swap in a version; return None on all ranks except the first. Collective.

        Raises:
            EngineError: no engine took the version, or the weights of an engine differ from those published
                and the engine stays paused. The version stays recorded; a resumed run publishes the weights
                again under a later version.
            TrainingError: the folder cannot be written; nothing is recorded, and the old version stays
                served.
        """
        started = time.monotonic()
        path = version_folder(self._weights, version)
        self._count += 1
        if self._transport.folder_first:
            outcome = self._from_folder(version, path, lambda store: self._record(store, version, step, path))
        else:
            outcome = self._directly(version, step, path)
        fleet, checks, delivered, size = outcome
        self._note(fleet, checks)
        if self._loop is None or size is None:
            return None
        return Published(
            version=version,
            path=path,
            assemble_s=delivered.assemble_s,
            pause_s=delivered.pause_s,
            nbytes=size.nbytes,
            sent_bytes=delivered.sent_bytes,
            density=size.density,
            agreement=checks.share if checks is not None else None,
            left_out=len(fleet.left_out),
            repaired=delivered.repaired,
            busy_s=self._loop.run(self._busy_s(fleet)),
            publish_s=time.monotonic() - started,
        )

    def publish_candidate(self, *, version: int, step: int, share: float) -> None:
        """Write and record a version as candidate, and swap it into the engines of the canary. Collective.

        Raises what `publish` raises.
        """
        path = version_folder(self._weights, version)

        def record(store: Store) -> None:
            store.publish_candidate(version, step=step, path=str(path), share=share)

        self._count += 1
        fleet, checks, *_ = self._from_folder(version, path, record, self._of_canary)
        self._note(fleet, checks)

    def promote(self, candidate: VersionRow, verdict: Mapping[str, Any]) -> None:
        """Make the candidate the version of all engines, and swap it into the others. Collective.

        Raises what `publish` raises.
        """

        def record() -> None:
            if self._store is not None:
                self._store.promote_candidate(candidate.version, verdict)

        self._on_every_rank(record)
        self._deliver(candidate, self._of_stable, again=False)

    def roll_back(
        self, candidate: VersionRow, verdict: Mapping[str, Any], *, version: int, step: int
    ) -> None:
        """End the candidate, publish the policy's weights, which are those before it, and swap them into all
        engines. Collective.

        Raises what `publish` raises.
        """
        path = version_folder(self._weights, version)

        def record(store: Store) -> None:
            store.roll_back_candidate(candidate.version, verdict, restored=version, step=step, path=str(path))

        self._count += 1
        fleet, checks, *_ = self._from_folder(version, path, record)
        self._note(fleet, checks)

    def deliver_again(self, row: VersionRow, to: Literal["all", "stable", "canary"]) -> None:
        """Swap a recorded version into engines that may have it already. Collective.

        Raises what `publish` raises.
        """
        engines = {"all": self._engines, "stable": self._of_stable, "canary": self._of_canary}[to]
        self._deliver(row, engines, again=True)

    def finish(self) -> None:
        """Make the folder of the last version complete, so that engines can be restarted when no trainer is
        running. Collective.

        Raises:
            TrainingError: a folder cannot be written.
        """
        if not self._transport.folder_first:
            self._folders.complete()

    @contextmanager
    def engines_asleep(
        self, kinds: Sequence[MemoryKind], *, together: tuple[type[Exception], ...] = ()
    ) -> Iterator[None]:
        """Context manager that keeps the memory of `kinds` released on every engine. Collective.

        The engines wake when every rank has left the block, and so has freed its memory. Raises EngineError
        if an engine refuses; paused generations continue after the block in any case.

        Args:
            together: the errors of the block that every rank raises if one does. After any other error the
                engines wake without waiting for the other ranks, which may never leave the block.
        """
        if not kinds:
            yield
            return
        try:
            self._on_every_rank(lambda: self._sleep_or_wake(fall_asleep, kinds))
            yield
        except together:
            self._ranks.barrier()
            self._wake_anyway(kinds)
            raise
        except BaseException:
            self._wake_anyway(kinds)
            raise
        self._ranks.barrier()
        self._on_every_rank(lambda: self._sleep_or_wake(wake, kinds))

    def close(self) -> None:
        """Leave the process group, if any, wait for the folder that is being written, and close the clients
        of the engines. Only on the first rank is there anything to do."""
        if self._loop is None:
            return
        self._transport.close()
        self._folders.close()
        self._loop.run(self._old_adapters.aclose())
        self._loop.run(_close(self._engines))
        self._loop.close()

    def _deliver(self, row: VersionRow, engines: Sequence[Engine], *, again: bool) -> None:
        path = Path(row.path)
        checks = self._on_every_rank(lambda: self._comparison(path))
        fleet, _ = self._swapper.swap(row.version, path, checks, engines=engines, again=again)
        self._note(fleet, checks)

    def _from_folder(
        self,
        version: int,
        path: Path,
        record: Callable[[Store], None],
        engines: Sequence[Engine] | None = None,
    ) -> _Outcome:
        """Write the folder, record the row, and have `engines`, by default all, load the folder."""

        def record_once() -> None:
            if self._store is not None:
                record(self._store)

        started = time.monotonic()
        written = self._on_every_rank(lambda: self._write(version))
        assemble_s = time.monotonic() - started
        checks = self._on_every_rank(lambda: self._comparison(path))
        self._on_every_rank(record_once)
        fleet, delivered = self._swapper.swap(version, path, checks, engines=engines)
        if self._loop is not None:
            forgotten = forget_before(self._weights, version, keep=self._keep)
            self._loop.run(self._forget_adapters(forgotten))
        return fleet, checks, replace(delivered, assemble_s=assemble_s), written

    def _directly(self, version: int, step: int, path: Path) -> _Outcome:
        """Record the row, send the weights to the engines, and start to write the folder."""

        def record() -> None:
            if self._store is not None:
                self._record(self._store, version, step, path, folder_pending=True)

        copied = self._on_every_rank(self._needs_copy)
        copy = self._on_every_rank(lambda: self._folders.begin(version, copied=copied))
        checks = self._on_every_rank(lambda: self._comparison(copy) if copy is not None else None)
        self._on_every_rank(record)
        fleet, delivered = self._swapper.swap(version, path, checks, copy)
        self._on_every_rank(self._folders.start)
        if self._loop is None:
            return fleet, checks, delivered, None
        return (
            fleet,
            checks,
            delivered,
            WrittenVersion(self._nbytes, copy.density if copy is not None else None),
        )

    def _needs_copy(self) -> bool:
        """Whether a copy of the next version is needed for more than its folder: for changes, or for an
        engine to be compared.

        It is made once for an engine that missed the version before: when that answers again. An engine that
        is lost for good, or answers and takes no weights, is no reason to copy every version.
        """
        if self._loop is None:
            return False
        if self._config.transport == "delta":
            return True
        self._loop.run(self._look_for_missing())
        lost = {url for url, times in self._answered.items() if times != 1}
        return bool(self._urls() - self._known() - lost)

    async def _look_for_missing(self) -> None:
        """Find out which of the engines that missed the version before answer now."""

        async def one(engine: Engine) -> None:
            try:
                async with asyncio.timeout(_ANSWER_S):
                    await engine.model_info()
            except (EngineError, TimeoutError):
                self._answered[engine.base_url] = 0
            else:
                self._answered[engine.base_url] += 1

        await asyncio.gather(*(one(engine) for engine in self._engines if engine.base_url in self._answered))

    def _note(self, fleet: Fleet, checks: EngineComparison | None) -> None:
        """Record which engines missed a version, and which need no comparison with the next one."""
        compared = checks.compared if checks is not None else set()
        earlier = set() if fleet.were_lost else self._verified
        self._verified = (earlier | compared) - {*fleet.left_out}
        self._answered = {url: self._answered.get(url, 0) for url in fleet.left_out}

    def _known(self) -> set[str]:
        """The engines that need no comparison with the next version."""
        is_due = self._config.transport == "delta" and self._count % self._config.delta_check_every == 0
        if is_due or self._config.verify == "every":
            return set()
        return self._urls() if self._config.verify == "off" else self._verified

    def _urls(self) -> set[str]:
        return {engine.base_url for engine in self._engines}

    def _comparison(self, weights: Path | HostCopy) -> EngineComparison | None:
        """Return the comparison of all engines, or those not compared yet, with a version's folder or
        copy."""
        if not self._urls() - self._known():
            return None
        if isinstance(weights, Path):
            # an engine's checksum covers the base weights, without adapters
            weights = self._model_path if self._config.transport == "lora" else weights
        published = FolderWeights(weights) if isinstance(weights, Path) else weights
        return EngineComparison(published, known=self._known())

    def _write(self, version: int) -> WrittenVersion | None:
        return write_version(
            self._policy,
            self._weights,
            version,
            base=self._model_path,
            adapter=self._config.transport == "lora",
            writes=self._ranks.is_first,
        )

    def _record(
        self, store: Store, version: int, step: int, path: Path, *, folder_pending: bool = False
    ) -> None:
        """Record the current version. From then on, engines that come back are updated to it."""
        store.publish_version(version, step=step, path=str(path), folder_pending=folder_pending)

    def _folder_written(self, version: int) -> None:
        if self._store is not None:
            self._store.mark_folder_written(version)

    async def _forget_adapters(self, versions: Sequence[int]) -> None:
        if self._config.transport == "lora":
            self._old_adapters.forget(versions)

    async def _busy_s(self, fleet: Fleet) -> float | None:
        """Return the mean time in seconds that the engines have spent sampling."""
        try:
            busy = await fleet.each(lambda engine: engine.busy_s())
        # the version is already served; an engine lost now is handled by the next publication
        except EngineError as error:
            logger.warning("no engine answers after version %d was published: %s", fleet.version, error)
            return None
        known = [seconds for seconds in busy if seconds is not None]
        return sum(known) / len(known) if len(known) == len(self._engines) else None

    def _sleep_or_wake(
        self,
        change: Callable[[Sequence[Engine], Sequence[MemoryKind]], Coroutine[Any, Any, None]],
        kinds: Sequence[MemoryKind],
    ) -> None:
        if self._loop is not None:
            self._loop.run(change(self._engines, kinds))

    def _wake_anyway(self, kinds: Sequence[MemoryKind]) -> None:
        """Wake the engines after an error; another error here is only logged."""
        try:
            self._sleep_or_wake(wake, kinds)
        except EngineError as error:
            logger.warning("an engine did not wake and take its memory back: %s", error)

    def _on_every_rank(self, call: Callable[[], T]) -> T:
        return on_every_rank(self._ranks, call)


async def _close(engines: Sequence[Engine]) -> None:
    for engine in engines:
        await engine.aclose()
