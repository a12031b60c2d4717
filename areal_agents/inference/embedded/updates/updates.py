"""Updates by tensors or broadcasts: pieces are collected from begin to end, then swapped in at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from areal_agents.errors import RequestError
from areal_agents.inference.embedded.model.architecture import Architecture
from areal_agents.inference.embedded.model.served import ServedModels
from areal_agents.inference.embedded.model.weights import Weights
from areal_agents.inference.embedded.updates.incoming import IncomingWeights, split_bucket
from areal_agents.inference.embedded.updates.joined_groups import WeightGroups
from areal_agents.inference.embedded.updates.payloads import Piece, read_payload
from areal_agents.inference.engine import WeightBucket

NOT_OPEN = "no weight-update session is open; call begin_weight_update() first"


class WeightUpdates:
    """The open update, of which there is at most one; its data is discarded however it ends."""

    def __init__(self, models: ServedModels, groups: WeightGroups, arch: Architecture) -> None:
        self._models = models
        self._groups = groups
        self._arch = arch
        self._open: IncomingWeights | None = None
        self._ready: Weights | None = None  # the weights of the open update, placed

    def begin(self) -> None:
        """Open an update; RequestError while one is open."""
        if self._open is not None:
            raise RequestError("a weight-update session is already open; call end_weight_update() first")
        self._open = IncomingWeights(self._arch)

    async def add_tensors(
        self, payloads: Sequence[object], version: str | None, *, flush_cache: bool, form: object = None
    ) -> None:
        """Add a piece to the open update; see payloads.read_payload."""
        update = self._used()
        with _noted_failure(update):
            if len(payloads) != 1:
                raise RequestError(
                    "expected one of serialized_named_tensors, for this engine's one worker, got "
                    f"{len(payloads)}"
                )
            await asyncio.to_thread(lambda: update.add(read_payload(payloads[0], form)))
        update.note(version, flush_cache=flush_cache)

    async def receive(
        self, bucket: WeightBucket, group: str, version: str | None, *, flush_cache: bool
    ) -> None:
        """Receive a piece of the open update from rank 0 of `group`."""
        update = self._used()
        with _noted_failure(update):
            update.check(bucket.names, bucket.shapes)
            flat = await self._groups.receive(group, bucket)
            await asyncio.to_thread(lambda: update.add(Piece(split_bucket(flat, bucket))))
        update.note(version, flush_cache=flush_cache)

    async def prepare(self) -> None:
        """Place the weights that arrived, so that `end` only swaps; RequestError if some are missing."""
        update = self._current()
        if update.is_used and self._ready is None:
            ready = await self._models.place(update.finish, before=update.before)
            if self._open is update:
                self._ready = ready

    async def end(self) -> None:
        """Close the update and swap in its weights. If some are missing, it raises RequestError and keeps the
        old weights; if none were announced, nothing changes."""
        update, ready = self._current(), self._ready
        self._open = self._ready = None
        if not update.is_used:
            return
        make = update.finish if ready is None else lambda _: ready
        await self._models.update(make, update.version, flush_cache=update.flush_cache, before=update.before)

    def abandon(self) -> None:
        """Close the update, and swap nothing in."""
        self._current()
        self._open = self._ready = None

    def _used(self) -> IncomingWeights:
        update = self._current()
        update.is_used, self._ready = True, None
        return update

    def _current(self) -> IncomingWeights:
        if self._open is None:
            raise RequestError(NOT_OPEN)
        return self._open


@contextmanager
def _noted_failure(update: IncomingWeights) -> Iterator[None]:
    """Note a failure within the block in the update."""
    try:
        yield
    except BaseException:
        update.has_failed = True
        raise
