"""Adapters of versions that are no longer kept are unloaded beside the trainer, which waits for none.

An engine unloads an adapter when the generations that use it have ended, which with `drain` takes as long as
they do; a real SGLang loads no other adapter meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence

from areal_agents.errors import EngineError, EngineRejected
from areal_agents.inference.engine import Engine, adapter_name

log = logging.getLogger(__name__)

_END_S = 5.0  # longest wait, when closing, for what is under way


class OldAdapters:
    """What each engine is still to unload, one after the other. Used in the event loop.

    An engine that does not do it in its client's time, or is not there, is asked again at the next `forget`.
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
                continue  # it comes to them
            if task is not None:
                task.result()  # only a mistake of ours ends one with an error
            if due:
                self._under_way[engine] = asyncio.create_task(_unload(engine, due))

    async def aclose(self) -> None:
        """Wait a little for what is under way, and give the rest up."""
        tasks = list(self._under_way.values())
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=_END_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)


async def _unload(engine: Engine, due: deque[int]) -> None:
    """All that are due, the oldest first; what fails stays due."""
    while due:
        try:
            await engine.unload_adapter(adapter_name(due[0]))
        except EngineRejected as error:  # it was started again since, or left out then: it has none
            log.info("%s had no adapter of version %d: %s", engine.base_url, due[0], error)
        except EngineError as error:
            log.warning(
                "%s did not unload the adapter of version %d, and is asked again after the next version: %s",
                engine.base_url, due[0], error,
            )  # fmt: skip
            return
        due.popleft()
