"""An index of open episodes by the keys that identify them: session names, conversations, turns, tool calls.

Adding a key twice is the same as adding it once. Two episodes may share a key, and forgetting one of them
does not change the keys of the other.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator


class EpisodeIndex:
    """Maps keys to the episodes that have them. An episode has keys from `begin` until `forget`."""

    def __init__(self) -> None:
        self._episodes: dict[Hashable, dict[str, None]] = {}  # by key, the latest last
        self._keys: dict[str, set[Hashable]] = {}  # by episode

    def __contains__(self, episode_id: str) -> bool:
        return episode_id in self._keys

    def episodes(self) -> list[str]:
        """The ids of all indexed episodes."""
        return list(self._keys)

    def begin(self, episode_id: str) -> None:
        """Index an episode, without keys at first."""
        self._keys.setdefault(episode_id, set())

    def add(self, episode_id: str, key: Hashable) -> None:
        """Add a key to an episode, which becomes the latest with that key. KeyError if it is not indexed."""
        self._keys[episode_id].add(key)
        holders = self._episodes.setdefault(key, {})
        holders.pop(episode_id, None)
        holders[episode_id] = None

    def latest(self, key: Hashable) -> str | None:
        """The episode to which a key was added last; None if no episode has it."""
        return next(self.latest_first(key), None)

    def latest_first(self, key: Hashable) -> Iterator[str]:
        """The episodes that have a key, the one to which it was added last first."""
        return reversed(self._episodes.get(key, {}))

    def forget(self, episode_id: str) -> None:
        """Remove an episode and its keys. Does nothing if it is not indexed."""
        for key in self._keys.pop(episode_id, ()):
            holders = self._episodes[key]
            del holders[episode_id]
            if not holders:
                del self._episodes[key]
