"""Only the adapter is published, under a fresh name: engines load it beside the ones that are in use.

No engine pauses. Running generations end with what they sampled, and the proxy continues them under the
new adapter; with `drain` they go on under their own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from areal_agents.errors import EngineError, EngineRejected
from areal_agents.inference.engine import Engine, adapter_name
from areal_agents.training.publishing.config import Pause
from areal_agents.training.publishing.disk import Check
from areal_agents.training.publishing.fleet import Fleet

log = logging.getLogger(__name__)


async def deliver(fleet: Fleet, path: Path, *, pause: Pause, check: Check | None) -> float:
    """Serve the adapter at `path` everywhere; the longest change of version in seconds."""
    name = adapter_name(fleet.version)

    async def one(engine: Engine) -> float:
        if check is not None:
            await check(engine)  # of the base weights, which do not change
        await _load(engine, name, path)
        started = time.monotonic()
        await engine.set_version(fleet.version, abort_running=pause != "drain")
        return time.monotonic() - started

    return max(await fleet.each(one))


async def forget(fleet: Fleet, versions: Sequence[int]) -> None:
    """Unload the adapters of old versions where they are loaded."""

    async def one(engine: Engine) -> None:
        for version in versions:
            try:
                await engine.unload_adapter(adapter_name(version))
            except EngineError as error:  # it was restarted since, or left out then
                log.info("%s did not unload version %d: %s", engine.base_url, version, error)

    await fleet.each(one)


async def _load(engine: Engine, name: str, path: Path) -> None:
    try:
        await engine.load_adapter(name, str(path))
    except EngineRejected as error:
        # Versions are never used twice in a run, so that an adapter of this name is another run's.
        try:
            await engine.unload_adapter(name)
        except EngineError:
            raise error from None
        log.warning("%s had an adapter %s of another run, which is unloaded", engine.base_url, name)
        await engine.load_adapter(name, str(path))
