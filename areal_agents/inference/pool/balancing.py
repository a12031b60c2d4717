"""Chooses the replica for a request: the replica of its episode, otherwise the least loaded one."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence

from areal_agents.inference.pool.replica import Replica

_KEPT_S = 900.0  # after this idle time no cache has the episode's prefix any more
_MOST_KEPT = 100_000


class Affinities:
    """The replica of each episode. Entries that were not used for a while are removed."""

    def __init__(self) -> None:
        self._places: OrderedDict[str, tuple[Replica, float]] = OrderedDict()  # least recently used first

    def route(
        self, replicas: Sequence[Replica], affinity: str, *, newest: int = -1, avoid: Replica | None = None
    ) -> Replica | None:
        """Return a serving replica, or None if there is none.

        Args:
            replicas: all replicas of the pool.
            affinity: names the episode; "" for a call that belongs to none.
            newest: the version of the tokens that the request continues from; a replica with it is preferred
                among equally suitable ones.
            avoid: a replica that is chosen only if no other serves.
        """
        placed = self._place(affinity)
        if placed is not None and placed.is_serving and placed is not avoid:
            return placed
        serving = [replica for replica in replicas if replica.is_serving]
        serving = [replica for replica in serving if replica is not avoid] or serving
        serving = [replica for replica in serving if replica.version >= newest] or serving
        if not serving:
            return None
        chosen = min(serving, key=lambda replica: (replica.running, replica.episodes))
        if affinity:
            self._put(affinity, chosen)
        return chosen

    def _place(self, affinity: str) -> Replica | None:
        """Return the replica of the episode and restart its idle time."""
        place = self._places.get(affinity)
        if place is None:
            return None
        self._places[affinity] = place[0], time.monotonic()
        self._places.move_to_end(affinity)
        return place[0]

    def _put(self, affinity: str, replica: Replica) -> None:
        if (earlier := self._places.pop(affinity, None)) is not None:
            earlier[0].episodes -= 1
        now = time.monotonic()
        self._places[affinity] = replica, now
        replica.episodes += 1
        while self._places:
            oldest, (where, used) = next(iter(self._places.items()))
            if used > now - _KEPT_S and len(self._places) <= _MOST_KEPT:
                return
            del self._places[oldest]
            where.episodes -= 1
