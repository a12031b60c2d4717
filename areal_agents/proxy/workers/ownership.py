"""The worker that has an open episode in memory: at most one running worker at any time.

A claim is one compare-and-set in the store, so of several workers that find the episode of a dead owner,
exactly one takes it over; the others forward to that one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from areal_agents.proxy.errors import episode_elsewhere
from areal_agents.proxy.workers.identity import Workers
from areal_agents.store import EpisodeRow, OpenEpisode, Store


class Ownership:
    """The episodes of the store as one worker may take them."""

    def __init__(self, store: Store, workers: Workers) -> None:
        self._store = store
        self._workers = workers

    @property
    def owner(self) -> str:
        """The name under which this process owns episodes."""
        return self._workers.owner

    async def claim(self, episode_id: str, owner: str | None) -> bool:
        """Whether an open episode of `owner` is this worker's now: it was, or no running worker had it."""
        if owner == self.owner:
            return True
        if owner is not None and self._workers.is_living(owner):
            return False
        return await asyncio.wrap_future(self._store.claim_episode(episode_id, owner, self.owner))

    async def locate(self, find: Callable[[], EpisodeRow]) -> int:
        """The worker that has an episode: this one, if no running worker had it or if it has ended.

        `find` reads the episode in a thread; what it raises is raised. RequestError 503 if a living worker
        of another run has it.
        """
        for _ in range(self._workers.count + 2):  # another try only after somebody else's claim
            row = await asyncio.to_thread(find)
            if row.status != "open" or await self.claim(row.id, row.owner):
                return self._workers.index
            index = self._workers.index_of(row.owner)
            if row.owner is not None and self._workers.is_living(row.owner):
                if index is None:
                    raise episode_elsewhere(
                        f"episode {row.id} is open in a proxy that was started separately"
                    )
                return index
        raise episode_elsewhere(f"episode {row.id} is changing hands")

    async def claim_at_home(self, key: bytes, episode_id: str, owner: str | None) -> bool:
        """`claim`, if this is the worker that the episode falls to by `key`."""
        return self._workers.homes(key)[0] == self._workers.index and await self.claim(episode_id, owner)

    def swept(self, found: Iterable[OpenEpisode]) -> list[OpenEpisode]:
        """The episodes that this worker sweeps: its own; for the first worker also those without an owner."""
        episodes = list(found)
        owners = {episode.owner for episode in episodes} if self._workers.is_first() else set()
        dead = {owner for owner in owners if owner is None or not self._workers.is_living(owner)}
        return [episode for episode in episodes if episode.owner == self.owner or episode.owner in dead]
