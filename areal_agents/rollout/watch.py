"""Wakes coroutines when any process has committed to the store."""

from __future__ import annotations

import asyncio

from areal_agents.store import Store

# The store changes with every model call; a few checks per second are enough for gate and versions.
PERIOD_S = 0.2
LONGEST_WAIT_S = 1.0


class StoreWatch:
    """Sets every listener's event after a change, at most every `PERIOD_S`, and at least every second."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._listeners: list[asyncio.Event] = []

    def listen(self) -> asyncio.Event:
        """Return an event that is set now and after changes; the listener clears it before reading."""
        event = asyncio.Event()
        event.set()
        self._listeners.append(event)
        return event

    async def run(self) -> None:
        """Watch until cancelled."""
        cursor = self._store.cursor()
        while True:
            for event in self._listeners:
                event.set()
            cursor = await asyncio.to_thread(self._store.wait, cursor, LONGEST_WAIT_S)
            await asyncio.sleep(PERIOD_S)
