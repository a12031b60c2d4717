"""A cache of bounded size that drops the least recently used entry."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """Keeps the entries that were used last, as many as fit. Not thread-safe.

    Args:
        most: the largest sum of the sizes of the entries.
        size: the size of an entry; by default each counts 1, so that `most` is a number of entries.
    """

    def __init__(self, most: int, size: Callable[[V], int] = lambda value: 1) -> None:
        self._most = most
        self._size = size
        self._kept = 0  # the sum of the sizes
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()  # with the size when it was added

    def get(self, key: K) -> V | None:
        """Return the entry of a key, or None."""
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def put(self, key: K, value: V) -> V:
        """Add an entry, and return its value; one that is larger than the cache is not kept."""
        self.remove(key)
        size = self._size(value)
        self._entries[key] = value, size
        self._kept += size
        while self._kept > self._most:
            _, (_, dropped) = self._entries.popitem(last=False)
            self._kept -= dropped
        return value

    def remove(self, key: K) -> None:
        """Remove the entry of a key, if there is one."""
        if key in self._entries:
            self._kept -= self._entries.pop(key)[1]
