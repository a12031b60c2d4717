"""A seed for every draw to which nobody gave one, so that an episode can be drawn again.

An episode may be opened with a `base_seed`. The seed of a draw then follows from it and from what is drawn
after: the turn that it continues, by that turn's own seed, and the tokens that are added. So it depends
neither on the order in which calls arrive nor on what else the engine does; and a second draw after the
same tokens gets another seed than the first.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable

import numpy as np

from areal_agents.core.completion import MAX_SEED, TokenIds
from areal_agents.core.trajectory import Turn

BASE_SEED = "base_seed"  # among the sampling parameters of an episode


class Draws:
    """Counts the draws of one episode after equal tokens, those that are under way included."""

    def __init__(self, turns: Iterable[Turn]) -> None:
        self._counts = Counter(_key(turn.parent, turn.new_prompt_ids) for turn in turns)

    def next_seed(self, base: int, parent: Turn | None, new_ids: TokenIds) -> int:
        """The seed of one more draw after the tokens of `parent` and `new_ids`."""
        key = _key(parent.id if parent is not None else None, new_ids)
        earlier = self._counts[key]
        self._counts[key] += 1
        before = parent.sampling.seed if parent is not None else None
        drawn = hashlib.blake2b(f"{base}/{before}/{earlier}/".encode() + key[1], digest_size=8)
        return int.from_bytes(drawn.digest(), "little") & MAX_SEED


def _key(parent: str | None, new_ids: TokenIds) -> tuple[str | None, bytes]:
    return parent, hashlib.blake2b(np.ascontiguousarray(new_ids, "<i4").data, digest_size=16).digest()
