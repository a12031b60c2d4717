"""The keys by which open episodes are found: names, conversations, turns and tool calls.

Adding a key twice is the same as adding it once, two episodes may share a key, and forgetting one of them
leaves the other one's keys alone.
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
        """Every episode that is held."""
        return list(self._keys)

    def begin(self, episode_id: str) -> None:
        """Take keys of an episode from now on."""
        self._keys.setdefault(episode_id, set())

    def add(self, episode_id: str, key: Hashable) -> None:
        """Note a key of an episode, which becomes the latest that has it. KeyError if it is not held."""
        self._keys[episode_id].add(key)
        holders = self._episodes.setdefault(key, {})
        holders.pop(episode_id, None)
        holders[episode_id] = None

    def latest(self, key: Hashable) -> str | None:
        """The episode that was given a key last, None if no episode has it."""
        return next(self.latest_first(key), None)

    def latest_first(self, key: Hashable) -> Iterator[str]:
        """The episodes that have a key."""
        return reversed(self._episodes.get(key, {}))

    def forget(self, episode_id: str) -> None:
        """Let go of an episode and of its keys. Nothing happens if it is not held."""
        for key in self._keys.pop(episode_id, ()):
            holders = self._episodes[key]
            del holders[episode_id]
            if not holders:
                del self._episodes[key]
