"""Ensures that one proxy at a time may write to an open episode: its owner.

A proxy claims an episode with one compare-and-set in the store. If several find the episode of a dead owner,
exactly one of them takes it over, and the others forward requests to that one. An owner that was only cut off
learns from the store, at its next write to the episode, that it no longer is the owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from areal_agents.proxy.errors import episode_elsewhere
from areal_agents.proxy.workers.peers import Peers, homes, is_first
from areal_agents.store import EpisodeRow, OpenEpisode, Store


class Ownership:
    """Claims episodes of the store for one proxy.

    Args:
        lose: called with the id of an episode that is claimed, whose state in memory is outdated if this
            proxy had it before.
    """

    def __init__(self, store: Store, peers: Peers, lose: Callable[[str], None]) -> None:
        self._store = store
        self._peers = peers
        self._lose = lose

    @property
    def owner(self) -> str:
        """The name with which this process owns episodes."""
        return self._peers.owner

    async def claim(self, episode_id: str, owner: str | None) -> bool:
        """Claim an open episode whose owner is `owner`; False if another running proxy has it."""
        if owner == self.owner:
            return True
        if owner is not None:
            await self._peers.look_for(owner)
            if self._peers.is_alive(owner):
                return False
        if not await asyncio.wrap_future(self._store.claim_episode(episode_id, owner, self.owner)):
            return False
        self._lose(episode_id)
        return True

    async def locate(self, find: Callable[[], EpisodeRow]) -> int:
        """Return the index of the worker that has an episode.

        If no running worker has it, this worker claims it. An ended episode belongs to this worker.

        Args:
            find: reads the episode's row; called in a thread.

        Raises:
            RequestError: 503 if a worker of another run has the episode.
        """
        for _ in range(self._peers.count + 2):  # repeated only if another worker claims the episode first
            row = await asyncio.to_thread(find)
            if row.status != "open" or await self.claim(row.id, row.owner):
                return self._peers.index
            index = self._peers.index_of(row.owner)
            if row.owner is not None and self._peers.is_alive(row.owner):
                if index is None:
                    raise episode_elsewhere(
                        f"episode {row.id} is open in a proxy that was started separately on the same store"
                    )
                return index
        raise episode_elsewhere(f"episode {row.id} is being taken over by another worker")

    async def claim_at_home(self, key: bytes, episode_id: str, owner: str | None) -> bool:
        """Claim an episode if this worker is the first of its `homes` by `key`; False otherwise."""
        if homes(key, self._peers.count)[0] != self._peers.index:
            return False
        return await self.claim(episode_id, owner)

    def swept(self, found: Iterable[OpenEpisode]) -> list[OpenEpisode]:
        """Return the episodes that this worker sweeps.

        They are its own episodes and, for the first worker, those that no running worker owns.
        """
        episodes = list(found)
        owners = {episode.owner for episode in episodes} if is_first(self._peers) else set()
        dead = {owner for owner in owners if owner is None or not self._peers.is_alive(owner)}
        return [episode for episode in episodes if episode.owner == self.owner or episode.owner in dead]
