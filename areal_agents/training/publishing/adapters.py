"""Only the adapter is published, under a fresh name: engines load it beside the ones that are in use.

No engine pauses. Running generations end with what they sampled, and the proxy continues them under the
new adapter; with `drain` they go on under their own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from areal_agents.errors import EngineRejected
from areal_agents.inference.engine import Engine, adapter_name
from areal_agents.training.publishing.config import Pause
from areal_agents.training.publishing.disk import Check
from areal_agents.training.publishing.fleet import Fleet

log = logging.getLogger(__name__)

_OTHERS_S = 0.5  # that whoever else has loaded an adapter may take to name the version


async def deliver(
    fleet: Fleet, path: Path, *, pause: Pause, check: Check | None, may_be_there: bool = False
) -> float:
    """Serve the adapter at `path` everywhere; the longest change of version in seconds.

    Args:
        may_be_there: whether an engine that serves the version may have it from `path` already: engines were
            lost since it was recorded, and whoever finds one that is back loads it.
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
        except EngineRejected:  # it has no such adapter: that was not what it minded
            raise error from None
        log.warning("%s had an adapter %s already, which is loaded anew", engine.base_url, name)
        await engine.load_adapter(name, str(path))


async def _is_served(engine: Engine, version: int) -> bool:
    """Whether the version is named, or is soon, by whoever has loaded its adapter."""
    await asyncio.sleep(_OTHERS_S)
    return (await engine.model_info()).version == version
