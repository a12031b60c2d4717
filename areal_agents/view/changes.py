"""Looks at whether runs have changed: one look serves every stream of events that asks within a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from areal_agents.view.runs import Run

CHECK_S = 1.0  # time between two looks at a run


@dataclass(frozen=True, slots=True)
class Look:
    """What a look at a run has found; a mark changes with what it stands for."""

    is_running: bool
    metrics: tuple[Any, ...]
    store: tuple[Any, ...]

    @classmethod
    def at(cls, run: Run) -> Look:
        """Look at the files of a run."""
        return cls(run.is_running(), run.metrics_mark(), run.store_mark())


class Looks:
    """The latest look at each run; used by one event loop.

    Args:
        now: the time in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._latest: WeakKeyDictionary[Run, tuple[float, asyncio.Task[Look]]] = WeakKeyDictionary()

    async def at(self, run: Run) -> Look:
        """Return a look that began less than `CHECK_S` ago, or a new one."""
        began, looking = self._latest.get(run, (-CHECK_S, None))
        if looking is None or self._now() - began >= CHECK_S:
            looking = asyncio.create_task(asyncio.to_thread(Look.at, run))
            self._latest[run] = self._now(), looking
        return await asyncio.shield(looking)  # a stream that ends does not end the look of others
