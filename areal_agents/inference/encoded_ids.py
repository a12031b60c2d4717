"""Writes token ids as JSON. Of ids that begin like earlier ones, only the rest is written.

The prompts of an episode begin with one another, and writing tens of thousands of ids takes longer than
copying their JSON.
"""

from __future__ import annotations

import numpy as np
import orjson

from areal_agents.core.completion import TokenIds
from areal_agents.lru import LruCache

_MOST_BYTES = 64 * 2**20  # of ids and their JSON
_LEAST_IDS = 16_000  # fewer ids are written in a tenth of a millisecond, and take no memory here


class EncodedIds:
    """The latest ids of each episode with their JSON, in at most 64 MiB. Not thread-safe."""

    def __init__(self) -> None:
        self._latest: LruCache[str, _Written] = LruCache(_MOST_BYTES, _Written.size)

    def json(self, ids: TokenIds, affinity: str) -> orjson.Fragment:
        """Return the JSON of `ids` [P].

        Args:
            affinity: names the episode; without it nothing is kept.
        """
        if len(ids) < _LEAST_IDS or not affinity:
            return orjson.Fragment(_dumps(ids))
        written = self._latest.get(affinity)
        if written is None or not written.extend(ids):
            written = _Written(ids)
        self._latest.put(affinity, written)
        return orjson.Fragment(bytes(written.json))


class _Written:
    """Ids and their JSON. Both grow in place, because replaced blocks of many sizes would scatter the memory.

    Attributes:
        json: the JSON of the ids.
    """

    def __init__(self, ids: TokenIds) -> None:
        self._ids = ids.copy()  # may have room for more
        self._count = len(ids)
        self.json = bytearray(_dumps(ids))

    def size(self) -> int:
        """Return the memory in bytes."""
        return self._ids.nbytes + len(self.json)

    def extend(self, ids: TokenIds) -> bool:
        """Hold `ids` from now on, which must begin with those held so far; False if they do not."""
        count, total = self._count, len(ids)
        same_type = ids.dtype == self._ids.dtype
        if total < count or not same_type or not np.array_equal(ids[:count], self._ids[:count]):
            return False
        if total > count:
            if total > len(self._ids):
                room = np.empty(total + total // 8, self._ids.dtype)
                room[:count] = self._ids[:count]
                self._ids = room
            self._ids[count:total] = ids[count:]
            self._count = total
            self.json[-1:] = b","
            self.json += memoryview(_dumps(ids[count:]))[1:]
        return True


def _dumps(ids: TokenIds) -> bytes:
    return orjson.dumps(np.ascontiguousarray(ids), option=orjson.OPT_SERIALIZE_NUMPY)
