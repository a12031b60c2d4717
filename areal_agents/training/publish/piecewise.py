"""Replaces the served weights bucket by bucket; the next bucket is gathered while one is sent.

An engine is paused from before its first bucket until after its last. An engine that missed a bucket loads
the version's folder before it samples again, or stays paused; it never samples from a partial version.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from areal_agents.errors import EngineError, EngineUnavailable
from areal_agents.inference.engine import Engine, PauseMode
from areal_agents.training.publish.buckets import Packed, packed
from areal_agents.training.publish.disk import Check, resume_anyway
from areal_agents.training.publish.fleet import EventLoopThread, Fleet

logger = logging.getLogger(__name__)


class Sender(Protocol):
    """Sends buckets; implemented by `tensors.TensorSender` and `broadcast.BroadcastSender`."""

    async def open(self, engines: Mapping[Engine, int]) -> None:
        """Prepare to send to these engines, before they pause. The values are their numbers of workers."""
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
    """Delivers one version to the engines, on the first rank: `begin`, `send`, `end`.

    Args:
        path: the version's folder, complete.
        repaired: receives the URL of each engine that loaded the folder after a failure.
    """

    def __init__(
        self,
        loop: EventLoopThread,
        fleet: Fleet,
        sender: Sender,
        *,
        path: Path,
        pause: PauseMode,
        check: Check | None,
    ) -> None:
        self._loop, self._fleet, self._sender = loop, fleet, sender
        self._path, self._pause, self._check = path, pause, check
        self._broken: dict[Engine, EngineError] = {}
        self._paused_at = 0.0
        self.repaired: list[str] = []

    def begin(self, workers: Mapping[Engine, int]) -> None:
        """Pause the engines. Raise EngineError if none paused; all then continue with the old weights."""
        self._loop.run(self._begin(workers))

    def send(
        self,
        weights: Iterator[tuple[str, Tensor]],
        shapes: Mapping[str, tuple[int, ...]],
        *,
        dtype: torch.dtype,
        bucket_bytes: int,
    ) -> None:
        """Send every weight while `weights` gathers the next ones. `end` repairs engines that fail."""
        pending: Future[None] | None = None
        for bucket in packed(weights, shapes, dtype=dtype, bucket_bytes=bucket_bytes):
            if pending is not None:
                pending.result()
            pending = self._loop.start(self._send(bucket))
        if pending is not None:
            pending.result()

    def end(self) -> float:
        """Resume the engines; return how long they were paused, in seconds.

        Raises:
            EngineUnavailable: no engine took the version, and at least one does not answer.
            EngineError: no engine took the version.
        """
        self._loop.run(self._fleet.each(self._end))
        return time.monotonic() - self._paused_at

    async def _begin(self, workers: Mapping[Engine, int]) -> None:
        try:
            await self._sender.open({engine: workers[engine] for engine in self._fleet.engines})
        except EngineError as error:  # no bucket can be sent, so each available engine loads the folder
            self._broken = dict.fromkeys(self._fleet.engines, error)
        self._paused_at = time.monotonic()
        await self._fleet.each(self._open)

    async def _open(self, engine: Engine) -> None:
        try:
            await engine.pause(self._pause)
            await engine.begin_weight_update()
        except BaseException:
            await resume_anyway(engine)
            raise

    async def _send(self, bucket: Packed) -> None:
        whole = [engine for engine in self._fleet.engines if engine not in self._broken]
        if whole:
            self._broken |= await self._sender.send(whole, bucket, self._fleet.version)

    async def _end(self, engine: Engine) -> None:
        failure = self._broken.get(engine)
        if failure is None:
            try:
                await engine.end_weight_update()
            except EngineError as error:
                failure = error
        if failure is not None:
            await self._repair(engine, failure)
        if self._check is not None:
            await self._check(engine)
        await engine.resume()

    async def _repair(self, engine: Engine, failure: EngineError) -> None:
        """Load the folder into an engine that missed a bucket. Raises `failure` if that fails too."""
        # the engine refuses to end an incomplete update, but ends it nevertheless
        with suppress(EngineError):
            await engine.end_weight_update()
        try:
            await engine.update_weights_from_disk(str(self._path), self._fleet.version)
        except EngineUnavailable as error:
            raise error from failure  # the engine is unreachable, which may be why sending failed
        except EngineError as error:
            logger.warning("%s could not load %s either: %s", engine.base_url, self._path, error)
            raise failure from error
        logger.warning(
            "%s loaded %s because sending the weights failed: %s", engine.base_url, self._path, failure
        )
        self.repaired.append(engine.base_url)
