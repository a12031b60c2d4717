"""Writes token ids as JSON. Of ids that begin like earlier ones, only the rest is written.

The prompts of an episode begin with one another, and writing tens of thousands of ids takes longer than
copying their JSON.
"""

from __future__ import annotations

import numpy as np
import orjson

from areal_agents.core.completion import TokenIds
from areal_agents.lru import LruCache

_MOST_BYTES = 64 * 2**20
_LEAST_IDS = 1_000  # fewer ids are written in a few microseconds


class EncodedIds:
    """The latest ids of each episode, as JSON, in at most 64 MiB. Not thread-safe."""

    def __init__(self) -> None:
        self._latest: LruCache[str, tuple[TokenIds, bytes]] = LruCache(_MOST_BYTES, _size)

    def json(self, ids: TokenIds, affinity: str) -> orjson.Fragment:
        """Return the JSON of `ids` [P], which must not be changed afterwards.

        Args:
            affinity: names the episode; without it nothing is kept.
        """
        if len(ids) < _LEAST_IDS or not affinity:
            return orjson.Fragment(_dumps(ids))
        known = self._latest.get(affinity)
        written = _dumps(ids) if known is None else _continued(ids, *known)
        self._latest.put(affinity, (ids, written))
        return orjson.Fragment(written)


def _continued(ids: TokenIds, known: TokenIds, written: bytes) -> bytes:
    """Return the JSON of `ids`; `written` is that of `known`, with which they may begin."""
    count = len(known)
    if len(ids) < count or not np.array_equal(ids[:count], known):
        return _dumps(ids)
    if len(ids) == count:
        return written
    return b"".join((memoryview(written)[:-1], b",", memoryview(_dumps(ids[count:]))[1:]))


def _dumps(ids: TokenIds) -> bytes:
    return orjson.dumps(np.ascontiguousarray(ids), option=orjson.OPT_SERIALIZE_NUMPY)


def _size(entry: tuple[TokenIds, bytes]) -> int:
    ids, written = entry
    return ids.nbytes + len(written)
