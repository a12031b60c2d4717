"""Lets engines that share the trainer's GPUs release their memory while a step is trained.

Generation is paused meanwhile and continues on recomputed keys and values, so nothing is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from areal_agents.errors import EngineUnavailable
from areal_agents.inference.engine import Engine, MemoryKind

logger = logging.getLogger(__name__)


async def fall_asleep(engines: Sequence[Engine], kinds: Sequence[MemoryKind]) -> None:
    """Pause generation and release the memory of `kinds`. Raise EngineError if an engine refuses."""

    async def one(engine: Engine) -> None:
        await engine.pause("retract")
        await engine.release_memory(kinds)

    await _each(engines, one)


async def wake(engines: Sequence[Engine], kinds: Sequence[MemoryKind]) -> None:
    """Reclaim the memory and continue generating. Raise EngineError if an engine refuses."""

    async def one(engine: Engine) -> None:
        await engine.resume_memory(kinds)
        await engine.resume()

    await _each(engines, one)


async def _each(engines: Sequence[Engine], call: Callable[[Engine], Awaitable[None]]) -> None:
    """Call all engines concurrently. An engine that does not answer holds no memory; it is updated when it
    comes back."""

    async def tolerant(engine: Engine) -> None:
        try:
            await call(engine)
        except EngineUnavailable as error:
            logger.warning("an engine does not answer, so it keeps its memory as it is: %s", error)

    # Wait for every call even if one fails: no engine may still be going to sleep when the caller wakes them
    # after an error.
    results = await asyncio.gather(*(tolerant(engine) for engine in engines), return_exceptions=True)
    for failure in (result for result in results if isinstance(result, BaseException)):
        raise failure
