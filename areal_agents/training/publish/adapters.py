"""Publishes the adapter alone, under a new name; engines load it beside the adapters that are in use.

No engine pauses. Running generations end with what they sampled, and the proxy continues them under the
new adapter; with `drain` they continue under their own.

Adapters of versions that are no longer kept are unloaded in the background; the trainer never waits for it.
An engine unloads an adapter when the generations that use it have ended; with `drain` these run to their
end, and SGLang loads no other adapter meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from areal_agents.errors import EngineError, EngineRejected
from areal_agents.inference.engine import Engine, adapter_name
from areal_agents.training.publish.config import Pause
from areal_agents.training.publish.disk import Check
from areal_agents.training.publish.fleet import Fleet

log = logging.getLogger(__name__)

_OTHERS_S = 0.5  # that another process that has loaded the adapter may take to set the version


async def deliver(
    fleet: Fleet, path: Path, *, pause: Pause, check: Check | None, may_be_there: bool = False
) -> float:
    """Serve the adapter at `path` everywhere; the longest change of version in seconds.

    Args:
        may_be_there: whether an engine that serves the version may have it from `path` already: engines were
            lost since it was recorded, and another process may load it into an engine that is back.
    """

    async def one(engine: Engine) -> float:
        if check is not None:
            await check(engine)  # of the base weights, which do not change
        await _load(engine, fleet.version, path, may_be_there=may_be_there)
        started = time.monotonic()
        await engine.set_version(fleet.version, abort_running=pause != "drain")
        return time.monotonic() - started

    return max(await fleet.each(one))


async def _load(engine: Engine, version: int, path: Path, *, may_be_there: bool) -> None:
    name = adapter_name(version)
    try:
        await engine.load_adapter(name, str(path))
    except EngineRejected as error:
        if may_be_there and await _is_served(engine, version):
            return  # its requests would miss the adapter if it were unloaded
        # Versions are never used twice in a run, so that an adapter of this name is another run's.
        try:
            await engine.unload_adapter(name)
        except EngineRejected:  # it has no such adapter, so the load was refused for another reason
            raise error from None
        log.warning("%s already had an adapter %s; it is loaded again", engine.base_url, name)
        await engine.load_adapter(name, str(path))


async def _is_served(engine: Engine, version: int) -> bool:
    """Whether the engine serves the version soon, because another process has loaded its adapter."""
    await asyncio.sleep(_OTHERS_S)
    return (await engine.model_info()).version == version


_END_S = 5.0  # longest wait, when closing, for what is under way


class OldAdapters:
    """The adapters that each engine still has to unload, one at a time. Used in the event loop.

    The request is repeated at the next `forget` for an engine that times out or does not answer.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._due: dict[Engine, deque[int]] = {engine: deque() for engine in engines}
        self._under_way: dict[Engine, asyncio.Task[None]] = {}

    def forget(self, versions: Sequence[int]) -> None:
        """Have every engine unload the adapters of `versions`, and what it did not unload before."""
        for engine, due in self._due.items():
            due.extend(version for version in versions if version not in due)
            task = self._under_way.get(engine)
            if task is not None and not task.done():
                continue  # it gets the adapter by itself
            if task is not None:
                task.result()  # only a mistake of ours ends one with an error
            if due:
                self._under_way[engine] = asyncio.create_task(_unload(engine, due))

    async def aclose(self) -> None:
        """Wait a few seconds for unloads in progress, and abandon the rest."""
        tasks = list(self._under_way.values())
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=_END_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)


async def _unload(engine: Engine, due: deque[int]) -> None:
    """Unload all adapters that are due, oldest first; one that fails stays due."""
    while due:
        try:
            await engine.unload_adapter(adapter_name(due[0]))
        except EngineRejected as error:  # it was started again since, or left out then: it has none
            log.info("%s had no adapter of version %d: %s", engine.base_url, due[0], error)
        except EngineError as error:
            log.warning(
                "%s did not unload the adapter of version %d, retrying after the next version: %s",
                engine.base_url, due[0], error,
            )  # fmt: skip
            return
        due.popleft()
