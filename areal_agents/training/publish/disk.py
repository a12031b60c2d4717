"""Engines load the version's folder, while serving if they can, so that they pause only for the swap."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from areal_agents.errors import EngineError
from areal_agents.inference.engine import Engine
from areal_agents.training.publish.config import Pause
from areal_agents.training.publish.fleet import Fleet

logger = logging.getLogger(__name__)

Check = Callable[[Engine], Awaitable[None]]


async def deliver(fleet: Fleet, path: Path, *, pause: Pause, check: Check | None) -> float:
    """Swap the folder's weights into all engines; return the longest pause in seconds."""

    async def one(engine: Engine) -> float:
        await engine.prepare_weights_from_disk(str(path))
        return await swap(engine, str(path), fleet.version, pause=pause, check=check)

    return max(await fleet.each(one))


async def swap(
    engine: Engine, path: str, version: int, *, pause: Pause = "retract", check: Check | None = None
) -> float:
    """Replace the served weights; return how many seconds it took.

    The engine resumes after any failure; if it refuses the weights, it resumes with the old ones. Only after
    a failed `check` does it stay paused, so that nothing is sampled from unknown weights.
    """
    started = time.monotonic()
    # without a pause, the update waits for running requests, and new requests wait for the update
    if pause == "drain":
        await engine.update_weights_from_disk(path, version)
        if check is not None:
            await check(engine)
        return time.monotonic() - started
    try:
        await engine.pause(
            pause
        )  # inside the try block, because an engine whose answer was lost has nevertheless paused
        await engine.update_weights_from_disk(path, version)
    except BaseException:
        await resume_anyway(engine)
        raise
    if check is not None:
        await check(engine)
    await engine.resume()
    return time.monotonic() - started


async def resume_anyway(engine: Engine) -> None:
    """Resume after a failure. An error while resuming is only logged, since the first error says more."""
    try:
        await engine.resume()
    except EngineError as error:
        logger.warning("%s did not resume after a failed swap: %s", engine.base_url, error)
