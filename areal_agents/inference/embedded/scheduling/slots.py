"""The tokens whose keys and values each slot holds, and the choice of a slot for a new request.

Invariant: positions 0..valid[s] of slot s hold keys and values of tokens[s, :valid[s]] under the current
weights of model[s] (an adapter's or the base's), unless `mixed[s]` (it continued over an in-place swap). A
mixed slot is never a source of reuse, and no model reuses what another one computed.
The first prefix_length[s] of them equal those of slot prefix_slot[s], bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from areal_agents.core.completion import TokenIds

WORTH_WAITING = 32  # number of positions that must be in progress before a request waits for them


@dataclass(frozen=True, slots=True)
class SlotAssignment:
    """The slot of a request: `reused` positions are valid once they are copied from slot `source`."""

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
        self.model = np.zeros(slots, np.int64)
        self.busy = np.zeros(slots, np.bool_)
        self.prefix_slot = np.arange(slots, dtype=np.int32)
        self.prefix_length = np.zeros(slots, np.int32)
        self._last_used = np.zeros(slots, np.int64)
        self._clock = 0

    @property
    def free(self) -> int:
        """The number of slots that no request owns."""
        return int(len(self.busy) - np.count_nonzero(self.busy))

    def take(self, ids: TokenIds, *, max_reuse: int, model: int = 0) -> SlotAssignment | None:
        """Assign a slot to `ids` [P] under `model`, reusing at most `max_reuse` leading positions.

        A free slot must exist. If `ids` continues all of a free slot, that slot is taken. Otherwise the
        longest common prefix is copied into the slot that was used longest ago, so that the source stays
        reusable. Returns None, and assigns nothing, if a running request is computing much more of the
        prefix: the prompts of a group, and all requests after a swap, compute what they share only once.
        """
        common = self._common_prefix(ids, max_reuse, model)
        shared = np.minimum(common, self.valid)
        best = int(shared.argmax())
        coming = np.minimum(common, self.length)[self.busy].max(initial=0)
        if coming - shared[best] >= WORTH_WAITING:
            return None
        slot = self._choose(shared, best)
        if shared[slot] == shared[best]:
            best = slot
        reused = int(shared[best])
        self._link_prefix(slot, best, reused, kept=int(shared[slot]))
        self.tokens[slot, : len(ids)] = ids
        self.length[slot] = len(ids)
        self.valid[slot] = reused
        self.mixed[slot] = False
        self.model[slot] = model
        self.busy[slot] = True
        self._touch(slot)
        return SlotAssignment(slot=slot, reused=reused, source=best)

    def release(self, slot: int) -> None:
        """Free a slot; its valid positions stay for reuse, unless it is mixed."""
        self.busy[slot] = False
        if self.mixed[slot]:
            self.valid[slot] = 0
        self._touch(slot)

    def invalidate(self) -> None:
        """Note a change of weights: idle slots are not reused, and slots that continue become mixed."""
        self.valid[~self.busy] = 0
        self.mixed[self.busy] = True

    def forget_idle(self) -> None:
        """Drop the prefix cache."""
        self.valid[~self.busy] = 0

    def _link_prefix(self, slot: int, source: int, reused: int, *, kept: int) -> None:
        """Note that `slot` has the first `reused` positions of `source`, and keeps its own first `kept`.

        The prefix of a slot refers to the slot that computed it, so that many slots read one copy.
        """
        borrowers = self.prefix_slot == slot
        self.prefix_length[borrowers] = np.minimum(self.prefix_length[borrowers], kept)
        root, length = int(self.prefix_slot[source]), min(int(self.prefix_length[source]), reused)
        if length == 0 or root == slot:
            root, length = source, reused
        self.prefix_slot[slot], self.prefix_length[slot] = root, 0 if root == slot else length

    def _touch(self, slot: int) -> None:
        self._clock += 1
        self._last_used[slot] = self._clock

    def _choose(self, shared: np.ndarray, best: int) -> int:
        """Return the free slot to take: one that is continued, else the one used longest ago."""
        idle = np.flatnonzero(~self.busy)
        continued = idle[(shared[idle] == self.valid[idle]) & (shared[idle] == shared[best])]
        if len(continued) and shared[best]:
            return int(continued[0])
        return int(idle[self._last_used[idle].argmin()])

    def _common_prefix(self, ids: TokenIds, max_reuse: int, model: int) -> np.ndarray:
        """Return [slots] the length of the common prefix of `ids` and each slot, at most `max_reuse`.

        It is 0 for a slot that is mixed or of another model.
        """
        if max_reuse <= 0:
            return np.zeros(len(self.valid), np.int32)
        differs = self.tokens[:, :max_reuse] != ids[:max_reuse]
        common = np.where(differs.any(axis=1), differs.argmax(axis=1), max_reuse)
        return np.where(self.mixed | (self.model != model), 0, common).astype(np.int32)
