"""Which tokens each slot's keys and values stand for, and which slot a new request should take.

Invariant: positions 0..valid[s] of slot s hold keys and values of tokens[s, :valid[s]] under the current
weights, unless `mixed[s]` (it went on over a swap in place), and a mixed slot is never a source of reuse.
The first prefix_length[s] of them are bit for bit those of slot prefix_slot[s] too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from areal_agents.core.completion import TokenIds


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes: `reused` positions are valid once they are copied from slot `source`."""

    slot: int
    reused: int
    source: int


class SlotTable:
    """Tokens, valid lengths and owners of `slots` sequences of at most `max_context` tokens."""

    def __init__(self, slots: int, max_context: int) -> None:
        self.tokens = np.zeros((slots, max_context), np.int32)
        self.length = np.zeros(slots, np.int32)
        self.valid = np.zeros(slots, np.int32)
        self.mixed = np.zeros(slots, np.bool_)
        self.busy = np.zeros(slots, np.bool_)
        self.prefix_slot = np.arange(slots, dtype=np.int32)
        self.prefix_length = np.zeros(slots, np.int32)
        self._last_used = np.zeros(slots, np.int64)
        self._clock = 0

    @property
    def free(self) -> int:
        """How many slots no request owns."""
        return int(len(self.busy) - np.count_nonzero(self.busy))

    def take(self, ids: TokenIds, *, max_reuse: int) -> Placement:
        """Own a slot for `ids` [P], reusing at most `max_reuse` leading positions; a free slot must exist.

        A free slot that `ids` continues to its end is taken as it is. Otherwise the longest common prefix is
        copied into the slot that was used longest ago, so that no other history is lost to it.
        """
        shared = self._shared_prefix(ids, max_reuse)
        idle = np.flatnonzero(~self.busy)
        best = int(shared.argmax())
        continued = idle[shared[idle] == self.valid[idle]]
        continued = continued[shared[continued] == shared[best]]
        slot = (
            int(continued[0])
            if len(continued) and shared[best]
            else int(idle[self._last_used[idle].argmin()])
        )
        if shared[slot] == shared[best]:
            best = slot
        reused = int(shared[best])
        self._link_prefix(slot, best, reused, kept=int(shared[slot]))
        self.tokens[slot, : len(ids)] = ids
        self.length[slot] = len(ids)
        self.valid[slot] = reused
        self.mixed[slot] = False
        self.busy[slot] = True
        self._touch(slot)
        return Placement(slot=slot, reused=reused, source=best)

    def release(self, slot: int) -> None:
        """Give a slot back; what is valid in it stays for reuse, unless it is mixed."""
        self.busy[slot] = False
        if self.mixed[slot]:
            self.valid[slot] = 0
        self._touch(slot)

    def invalidate(self) -> None:
        """The weights changed: nothing idle may be reused, and what runs on becomes mixed."""
        self.valid[~self.busy] = 0
        self.mixed[self.busy] = True

    def forget_idle(self) -> None:
        """Drop the prefix cache."""
        self.valid[~self.busy] = 0

    def _link_prefix(self, slot: int, source: int, reused: int, *, kept: int) -> None:
        """`slot` takes `reused` positions from `source` and keeps its own first `kept` as they were.

        Prefixes point at the slot that had them first, so that many slots read one copy.
        """
        borrowers = self.prefix_slot == slot
        self.prefix_length[borrowers] = np.minimum(self.prefix_length[borrowers], kept)
        root, length = int(self.prefix_slot[source]), min(int(self.prefix_length[source]), reused)
        if root in (source, slot) or length == 0:
            root, length = source, reused
        self.prefix_slot[slot], self.prefix_length[slot] = root, 0 if root == slot else length

    def _touch(self, slot: int) -> None:
        self._clock += 1
        self._last_used[slot] = self._clock

    def _shared_prefix(self, ids: TokenIds, max_reuse: int) -> np.ndarray:
        """[slots] length of the common prefix of `ids` and each slot's valid tokens, at most `max_reuse`."""
        if max_reuse <= 0:
            return np.zeros(len(self.valid), np.int32)
        differs = self.tokens[:, :max_reuse] != ids[:max_reuse]
        common = np.where(differs.any(axis=1), differs.argmax(axis=1), max_reuse)
        return np.minimum(common, np.where(self.mixed, 0, self.valid))
