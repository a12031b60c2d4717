"""The models that the engine serves and how they change: base weights, adapters, and updates of both.

Weights are read, assembled and merged beside generation; the engine's thread only swaps. A change is whole or
not at all: whatever fails before the swap leaves the old weights served. One swap is made at a time.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from areal_agents.errors import RequestError
from areal_agents.inference.embedded.model.adapters import Adapter, merge, read_adapter
from areal_agents.inference.embedded.model.architecture import Architecture
from areal_agents.inference.embedded.model.model_set import BASE
from areal_agents.inference.embedded.model.runner import ModelRunner
from areal_agents.inference.embedded.model.weights import Weights, load_weights, stamp_of
from areal_agents.inference.embedded.scheduling.scheduler import Scheduler
from areal_agents.inference.embedded.scheduling.worker import EngineThread
from areal_agents.inference.embedded.updates.checksum import hash_weights
from areal_agents.inference.engine import MemoryKind

T = TypeVar("T")
Make = Callable[[Weights | None], Weights]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The placed weights of a folder, and the stamp of its files when they were read."""

    path: str
    stamp: tuple[tuple[str, int, int], ...]
    weights: Weights


class ServedModels:
    """The served models; used in the event loop.

    `weights` are the placed weights of the base model, None while their memory is released.
    """

    def __init__(
        self,
        thread: EngineThread,
        runner: ModelRunner,
        arch: Architecture,
        weights: Weights,
        *,
        model_path: str,
    ) -> None:
        self.model_path = model_path
        self._thread = thread
        self._runner = runner
        self._arch = arch
        self._weights: Weights | None = weights
        self._prepared: _Prepared | None = None
        self._numbers = itertools.count(BASE + 1)
        self._adapters: dict[str, tuple[int, Adapter]] = {}
        self._changing = asyncio.Lock()

    def number(self, adapter: str) -> int:
        """Return the model number of an adapter's name, "" for the base; RequestError if it is not loaded."""
        if not adapter:
            return BASE
        if adapter not in self._adapters:
            raise RequestError(
                f"adapter {adapter!r} is not loaded; loaded are {sorted(self._adapters) or 'none'}"
            )
        return self._adapters[adapter][0]

    async def prepare(self, path: str) -> None:
        """Read and place the folder at `path` for the next `update_from_disk` of the same."""
        async with self._changing:
            # freed before the new weights are read, so that three sets are never in memory
            self._prepared = None
            self._prepared = await asyncio.to_thread(self._read, path)

    async def update_from_disk(self, path: str, version: str | None, *, flush_cache: bool) -> None:
        """Serve the folder at `path`; generation stops only for the swap, whether it was prepared or not."""
        async with self._changing:
            prepared, self._prepared = self._prepared, None
            if prepared is None or not await asyncio.to_thread(_is_still, prepared, path):
                prepared = await asyncio.to_thread(self._read, path)
            await self._swap(prepared.weights, version, flush_cache=flush_cache)
            self.model_path = path

    async def place(self, make: Make, *, before: str | None) -> Weights:
        """Return the weights that `make` assembles, placed, for a later `update`; see there."""
        served = await self._served(before)
        return await asyncio.to_thread(lambda: self._runner.place(make(served)))

    async def update(
        self, make: Make, version: str | None, *, flush_cache: bool, before: str | None = None
    ) -> None:
        """Serve the weights that `make` assembles, placed or not; it is called in a thread.

        Args:
            before: the version from whose weights, which it is given, `make` assembles the new ones; None:
                it is given none. RequestError if another version is served.
        """
        async with self._changing:
            self._prepared = None
            served = await self._served(before)
            weights = await asyncio.to_thread(lambda: self._runner.place(make(served)))
            await self._swap(weights, version, flush_cache=flush_cache)

    async def load_adapter(self, name: str, path: str) -> None:
        """Merge the adapter at `path` and serve it under `name`, beside the base and the others."""
        async with self._changing:
            if not name or name in self._adapters:
                raise RequestError(
                    f"adapter {name!r} is already loaded" if name else "lora_name must name the adapter"
                )
            adapter = await asyncio.to_thread(read_adapter, Path(path), self._arch)
            weights = await asyncio.to_thread(self._merge, self._base(), adapter)
            number = next(self._numbers)
            await self._call(lambda scheduler: scheduler.models.add(number, weights))
            self._adapters[name] = number, adapter

    async def unload_adapter(self, name: str) -> None:
        """Refuse new requests for `name`, and drop it when its running requests have ended."""
        dropped: Future[None] = Future()
        async with self._changing:
            number = self.number(name)
            if number == BASE:
                raise RequestError("lora_name must name a loaded adapter")
            del self._adapters[name]
            await self._call(lambda scheduler: scheduler.retire_model(number, lambda: _finish(dropped)))
        await asyncio.wrap_future(dropped)

    async def checksum(self) -> dict[str, str]:
        """Hashes of the base weights by parameter; generation continues."""
        return await asyncio.to_thread(hash_weights, self._base(), self._arch)

    async def release_memory(self, kinds: set[MemoryKind]) -> None:
        """Release memory; sampling stops until it is allocated again."""
        async with self._changing:
            if not await self._call(lambda scheduler: scheduler.release(kinds)):
                raise RequestError(
                    "memory can be released only while nothing runs: pause with retract or abort first"
                )
            if "weights" in kinds:
                self._weights = self._prepared = None
            await asyncio.to_thread(self._runner.return_memory)

    async def resume_memory(self, kinds: set[MemoryKind]) -> None:
        """Allocate memory again. The next update brings the weights; nothing is sampled until then."""
        if "kv_cache" in kinds:
            await self._call(lambda scheduler: scheduler.models.allocate_cache())

    async def _served(self, before: str | None) -> Weights | None:
        if before is None:
            return None
        version = await self._call(lambda scheduler: scheduler.version)
        if version != before:
            raise RequestError(f"changes of version {before} cannot be applied to version {version}")
        return self._base()

    def _base(self) -> Weights:
        if self._weights is None:
            raise RequestError("the weights' memory was released: update them first")
        return self._weights

    def _read(self, path: str) -> _Prepared:
        stamp = stamp_of(Path(path))
        return _Prepared(path, stamp, self._runner.place(load_weights(Path(path), self._arch)))

    def _merge(self, base: Weights, adapter: Adapter) -> Weights:
        return self._runner.place(merge(base, adapter, self._arch))

    async def _swap(self, weights: Weights, version: str | None, *, flush_cache: bool) -> None:
        models = {BASE: weights}
        if self._adapters:
            models |= await asyncio.to_thread(self._merge_all, weights)
        await asyncio.wrap_future(
            self._thread.call_when_idle(lambda scheduler: _exchange(scheduler, models, version, flush_cache))
        )
        old = [] if self._weights is None else self._weights.tensors()
        self._weights = weights
        asyncio.get_running_loop().run_in_executor(None, _free, old)  # generation continues meanwhile

    def _merge_all(self, base: Weights) -> dict[int, Weights]:
        return {number: self._merge(base, adapter) for number, adapter in self._adapters.values()}

    async def _call(self, action: Callable[[Scheduler], T]) -> T:
        return await asyncio.wrap_future(self._thread.call(action))


def _is_still(prepared: _Prepared, path: str) -> bool:
    return prepared.path == path and prepared.stamp == stamp_of(Path(path))


def _exchange(
    scheduler: Scheduler, models: Mapping[int, Weights], version: str | None, flush_cache: bool
) -> None:
    if flush_cache and scheduler.paused == "in_place" and scheduler.load["running"]:
        raise RequestError(
            "flush_cache would drop the keys and values of requests paused in place: send flush_cache false"
        )
    scheduler.replace_models(models)
    if version is not None:
        scheduler.use_version(version)


def _free(tensors: list[Tensor]) -> None:
    """Drop tensors one by one, because freeing memory is slow and holds the interpreter's lock."""
    while tensors:
        tensors.pop()


def _finish(future: Future[None]) -> None:
    if future.set_running_or_notify_cancel():
        future.set_result(None)
