"""Ensures that at most one running worker has an open episode in memory.

A worker claims an episode with one compare-and-set in the store. If several workers find the episode of a
dead owner, exactly one of them takes it over, and the others forward requests to that one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from areal_agents.proxy.errors import episode_elsewhere
from areal_agents.proxy.workers.identity import Workers
from areal_agents.store import EpisodeRow, OpenEpisode, Store


class Ownership:
    """Claims episodes of the store for one worker."""

    def __init__(self, store: Store, workers: Workers) -> None:
        self._store = store
        self._workers = workers

    @property
    def owner(self) -> str:
        """The name with which this process owns episodes."""
        return self._workers.owner

    async def claim(self, episode_id: str, owner: str | None) -> bool:
        """Claim an open episode whose owner is `owner`; False if another running worker has it."""
        if owner == self.owner:
            return True
        if owner is not None and self._workers.is_alive(owner):
            return False
        return await asyncio.wrap_future(self._store.claim_episode(episode_id, owner, self.owner))

    async def locate(self, find: Callable[[], EpisodeRow]) -> int:
        """Return the index of the worker that has an episode.

        If no running worker has it, this worker claims it. An ended episode belongs to this worker.

        Args:
            find: reads the episode's row; called in a thread.

        Raises:
            RequestError: 503 if a worker of another run has the episode.
        """
        for _ in range(self._workers.count + 2):  # repeated only if another worker claims the episode first
            row = await asyncio.to_thread(find)
            if row.status != "open" or await self.claim(row.id, row.owner):
                return self._workers.index
            index = self._workers.index_of(row.owner)
            if row.owner is not None and self._workers.is_alive(row.owner):
                if index is None:
                    raise episode_elsewhere(
                        f"episode {row.id} is open in a proxy that was started separately on the same store"
                    )
                return index
        raise episode_elsewhere(f"episode {row.id} is being taken over by another worker")

    async def claim_at_home(self, key: bytes, episode_id: str, owner: str | None) -> bool:
        """Claim an episode if this worker is the first of its `homes` by `key`; False otherwise."""
        return self._workers.homes(key)[0] == self._workers.index and await self.claim(episode_id, owner)

    def swept(self, found: Iterable[OpenEpisode]) -> list[OpenEpisode]:
        """Return the episodes that this worker sweeps.

        They are its own episodes and, for the first worker, those that no running worker owns.
        """
        episodes = list(found)
        owners = {episode.owner for episode in episodes} if self._workers.is_first() else set()
        dead = {owner for owner in owners if owner is None or not self._workers.is_alive(owner)}
        return [episode for episode in episodes if episode.owner == self.owner or episode.owner in dead]
