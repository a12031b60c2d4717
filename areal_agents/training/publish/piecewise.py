"""Sends the weights to the engines bucket by bucket; the next bucket is gathered while one is sent.

An engine that stages weights samples until all buckets are there, and is paused for the swap; any other is
paused from before its first bucket until after its last. An engine that missed a bucket loads the version's
folder before it samples from the version, or stays with what it had, paused if that is a part of the version;
it never samples from a partial version.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from areal_agents.errors import EngineError, EngineUnavailable
from areal_agents.inference.engine import Engine, ModelInfo, PauseMode
from areal_agents.training.publish.buckets import Packed
from areal_agents.training.publish.disk import Check, resume_anyway
from areal_agents.training.publish.fleet import EventLoopThread, Fleet

logger = logging.getLogger(__name__)


class Sender(Protocol):
    """Sends buckets; implemented by `tensors.TensorSender`, `broadcast.BroadcastSender`, `ipc.IpcSender` and
    `delta.DeltaSender`.

    Attributes:
        sent_bytes: weights sent since `open`, in bytes, to the engine that received most.
    """

    sent_bytes: int

    async def open(self, engines: Mapping[Engine, ModelInfo], version: int) -> None:
        """Prepare to send a version to these engines, before they pause."""
        ...

    async def send(
        self, engines: Sequence[Engine], bucket: Packed, version: int
    ) -> dict[Engine, EngineError]:
        """Send a bucket; return the engines that did not receive it, with the reason."""
        ...

    async def aclose(self) -> None:
        """Release the resources that `open` created."""
        ...


class Delivery:
    """Delivers one version to the engines, on the first rank: `begin`, `send`, `end`, and `repair` if an
    engine is broken.

    Attributes:
        broken: the engines that missed a part of the version, with the reason.
        sent: the number of buckets that at least one engine received.
        repaired: the URL of each engine that loaded the folder after a failure.
        pause_s: the longest time that an engine was paused, in seconds.
    """

    def __init__(
        self,
        loop: EventLoopThread,
        fleet: Fleet,
        sender: Sender,
        *,
        infos: Mapping[Engine, ModelInfo],
        pause: PauseMode,
        check: Check | None,
    ) -> None:
        self._loop, self._fleet, self._sender = loop, fleet, sender
        self._infos, self._pause, self._check = infos, pause, check
        self._opened: set[Engine] = set()
        self._paused_at: dict[Engine, float] = {}
        self.broken: dict[Engine, EngineError] = {}
        self.sent = 0
        self.repaired: list[str] = []
        self.pause_s = 0.0

    @property
    def needs_folder(self) -> bool:
        """Whether a broken engine is left that can load the version's folder; one that is lost is not, and
        gets the folder when it is back."""
        return any(engine in self.broken for engine in self._fleet.engines)

    @property
    def is_broken_everywhere(self) -> bool:
        """Whether no engine that is left received the version."""
        return all(engine in self.broken for engine in self._fleet.engines)

    def begin(self) -> None:
        """Open an update on every engine. Raise EngineError if none could; all then continue with the old
        weights."""
        self._loop.run(self._begin())

    def send(self, buckets: Iterable[Packed]) -> None:
        """Send every bucket while the next one is made. Engines that fail become `broken`."""
        pending: Future[None] | None = None
        for bucket in buckets:
            if pending is not None:
                pending.result()
            pending = self._loop.start(self._send(bucket))
        if pending is not None:
            pending.result()

    def end(self) -> None:
        """Have the engines that received everything serve the version.

        Raises:
            EngineUnavailable: no engine took the version or can be repaired, and at least one does not
                answer.
            EngineError: no engine took the version or can be repaired.
        """
        self._loop.run(self._fleet.each(self._end))

    def repair(self, path: Path) -> None:
        """Have the broken engines load the version's folder, which is complete. Raises as `end`."""
        self._loop.run(self._fleet.each(lambda engine: self._repair(engine, path)))

    async def _begin(self) -> None:
        infos = {engine: self._infos[engine] for engine in self._fleet.engines}
        try:
            await self._sender.open(infos, self._fleet.version)
        except EngineError as error:  # no bucket can be sent
            self.broken = dict.fromkeys(self._fleet.engines, error)
        await self._fleet.each(self._open)

    async def _open(self, engine: Engine) -> None:
        if engine in self.broken:
            return
        self._opened.add(engine)
        if self._infos[engine].stages_weights:
            await engine.begin_weight_update(self._pause)
            return
        try:
            await self._stop(engine)
            await engine.begin_weight_update()
        except BaseException:
            await resume_anyway(engine)
            raise

    async def _send(self, bucket: Packed) -> None:
        whole = [engine for engine in self._fleet.engines if engine not in self.broken]
        if whole:
            failed = await self._sender.send(whole, bucket, self._fleet.version)
            self.broken |= failed
            self.sent += len(failed) < len(whole)

    async def _end(self, engine: Engine) -> None:
        if engine in self.broken:
            if engine not in self._opened:
                return
            try:
                # The last bucket may arrive after its time limit, and complete the update with bytes of a
                # buffer that was overwritten meanwhile.
                await engine.abandon_weight_update()
            except EngineUnavailable as error:
                raise error from self.broken[engine]  # it is lost, which may be why sending failed
            except EngineError as error:  # the folder replaces whatever the engine has of the update
                logger.warning("%s did not close the update: %s", engine.base_url, error)
            return
        try:
            if self._infos[engine].stages_weights:
                await engine.prepare_weight_update()
        except EngineError as error:
            self.broken[engine] = error
            await self._end(engine)
            return
        await self._stop_or_resume(engine)
        try:
            await engine.end_weight_update()
        except EngineError as error:
            self.broken[engine] = error
            return
        await self._go_on(engine)

    async def _repair(self, engine: Engine, path: Path) -> None:
        """Load the folder into a broken engine. Raises why it is broken if the engine refuses that too."""
        failure = self.broken.get(engine)
        if failure is None:
            return
        may_be_partial = engine in self._opened and not self._infos[engine].stages_weights
        try:
            if not may_be_partial:
                await engine.prepare_weights_from_disk(str(path))
            await self._stop_or_resume(engine)
            await engine.update_weights_from_disk(str(path), self._fleet.version)
        except EngineUnavailable as error:
            raise error from failure
        except EngineError as error:
            logger.warning("%s could not load %s either: %s", engine.base_url, path, error)
            if not may_be_partial:
                await resume_anyway(engine)  # it still has the old weights
            raise failure from error
        logger.warning("%s loaded %s because sending the weights failed: %s", engine.base_url, path, failure)
        self.repaired.append(engine.base_url)
        await self._go_on(engine)

    async def _stop_or_resume(self, engine: Engine) -> None:
        """Pause an engine, unless it is paused. Resume it if that fails, because it may nevertheless have
        paused."""
        if engine in self._paused_at:
            return
        try:
            await self._stop(engine)
        except BaseException:
            await resume_anyway(engine)
            raise

    async def _stop(self, engine: Engine) -> None:
        self._paused_at[engine] = time.monotonic()
        await engine.pause(self._pause)

    async def _go_on(self, engine: Engine) -> None:
        if self._check is not None:
            await self._check(engine)
        await engine.resume()
        self.pause_s = max(self.pause_s, time.monotonic() - self._paused_at[engine])
