"""Publishes only the adapter, under a new name; engines load it in addition to the adapters that are in use.

No engine pauses. Running generations end and return the tokens sampled so far, and the proxy continues them
under the new adapter; with `drain` they continue under the old one.

Adapters of versions that are no longer kept are unloaded in the background; the trainer never waits for it.
An engine unloads an adapter when the generations that use it have ended; with `drain` they run to completion,
and SGLang loads no other adapter meanwhile.
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

logger = logging.getLogger(__name__)

_OTHERS_S = 0.5  # time allowed for another process that has loaded the adapter to set the version


async def deliver(
    fleet: Fleet, path: Path, *, pause: Pause, check: Check | None, may_be_there: bool = False
) -> float:
    """Serve the adapter at `path` on all engines; return the longest time that an engine took to change
    versions, in seconds.

    Args:
        may_be_there: whether an engine may already serve the version from `path`, because engines were lost
            since the version was recorded and another process may have loaded it into an engine that came
            back.
    """

    async def one(engine: Engine) -> float:
        if check is not None:
            await check(engine)  # checks the base weights, which do not change
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
            return  # running requests would fail if their adapter were unloaded
        # A run never reuses a version, so an adapter of this name belongs to another run.
        try:
            await engine.unload_adapter(name)
        except EngineRejected:  # the engine has no such adapter, so the load was refused for another reason
            raise error from None
        logger.warning("%s already had an adapter %s; loading it again", engine.base_url, name)
        await engine.load_adapter(name, str(path))


async def _is_served(engine: Engine, version: int) -> bool:
    """Whether the engine serves the version within a few seconds, because another process has loaded its
    adapter."""
    await asyncio.sleep(_OTHERS_S)
    return (await engine.model_info()).version == version


_END_S = 5.0  # longest wait for unloads in progress when closing


class OldAdapters:
    """Adapters that each engine still has to unload, one at a time. Used only on the event loop.

    The request is repeated at the next `forget` for an engine that times out or does not answer.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._due: dict[Engine, deque[int]] = {engine: deque() for engine in engines}
        self._under_way: dict[Engine, asyncio.Task[None]] = {}

    def forget(self, versions: Sequence[int]) -> None:
        """Unload the adapters of `versions` from every engine, and those that it failed to unload before."""
        for engine, due in self._due.items():
            due.extend(version for version in versions if version not in due)
            task = self._under_way.get(engine)
            if task is not None and not task.done():
                continue  # the running task also unloads what was just added
            if task is not None:
                task.result()  # an exception here is a bug
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
    """Unload all pending adapters, oldest first; an adapter whose unload fails stays pending."""
    while due:
        try:
            await engine.unload_adapter(adapter_name(due[0]))
        except EngineRejected as error:
            # the engine does not have the adapter, because it restarted or did not load this version
            logger.info("%s had no adapter of version %d: %s", engine.base_url, due[0], error)
        except EngineError as error:
            logger.warning(
                "%s did not unload the adapter of version %d, retrying after the next version: %s",
                engine.base_url, due[0], error,
            )  # fmt: skip
            return
        due.popleft()
