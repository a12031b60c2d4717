"""Detects changes of runs: one snapshot of a run serves every stream of events that asks within a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from areal_agents.view.runs import Run

CHECK_S = 1.0  # time between two snapshots of a run


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a run at one time.

    Attributes:
        metrics, store: marks, which differ between two snapshots if the metrics or the store have changed.
    """

    is_running: bool
    metrics: tuple[Any, ...]
    store: tuple[Any, ...]

    @classmethod
    def of(cls, run: Run) -> Snapshot:
        """Take a snapshot of a run, from its files."""
        return cls(run.is_running(), run.metrics_mark(), run.store_mark())


class Snapshots:
    """The latest snapshot of each run; used by one event loop.

    Args:
        now: the time in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._latest: WeakKeyDictionary[Run, tuple[float, asyncio.Task[Snapshot]]] = WeakKeyDictionary()

    async def of(self, run: Run) -> Snapshot:
        """Return a snapshot that was begun less than `CHECK_S` ago, or a new one."""
        began, taking = self._latest.get(run, (-CHECK_S, None))
        if taking is None or self._now() - began >= CHECK_S:
            taking = asyncio.create_task(asyncio.to_thread(Snapshot.of, run))
            self._latest[run] = self._now(), taking
        return await asyncio.shield(taking)  # a stream that ends does not cancel it for the others
