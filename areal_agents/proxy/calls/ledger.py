"""Keeps the calls of one session that retries and the outcome of the episode depend on.

The ledger is in memory. After a restart the undelivered turns are read from the store, and the rest is empty.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from areal_agents.proxy.calls.request import ModelRequest
from areal_agents.proxy.calls.shared_reply import SharedReply

_KEYS_KEPT = 256


@dataclass(frozen=True, slots=True)
class KnownKey:
    """A call that has an Idempotency-Key.

    Attributes:
        request: the key of the request, `ModelRequest.key`.
        turn_ids: the ids of the turns that answer it.
    """

    request: Hashable
    turn_ids: tuple[str, ...]


class CallLedger:
    """The running, refused, lost and undelivered calls of a session.

    Attributes:
        running_calls: number of calls that have begun and have not ended.
    """

    def __init__(self, undelivered: Iterable[str]) -> None:
        """Create a ledger; `undelivered` has the ids of the recorded turns whose clients disconnected."""
        self.running_calls = 0
        self._by_name: dict[Hashable, SharedReply] = {}  # by request key and by Idempotency-Key
        self._refused: Counter[Hashable] = Counter()  # by request key
        self._undelivered = set(undelivered)
        self._keys: OrderedDict[str, KnownKey] = OrderedDict()
        self._lost: set[Hashable] = set()

    # Running calls

    def begin(self, request: ModelRequest, call: SharedReply) -> None:
        """Add a running call under its request key and, if it has one, its Idempotency-Key."""
        key, name = request.key(), request.retry.idempotency_key
        self.running_calls += 1
        for known in (key, name) if name else (key,):
            self._by_name[known] = call
        if name:
            self._keys[name] = KnownKey(key, call.turn_ids)
            if len(self._keys) > _KEYS_KEPT:
                self._keys.popitem(last=False)

    def end(self, request: ModelRequest, call: SharedReply) -> None:
        """Remove a running call that has ended."""
        self.running_calls -= 1
        for name in (request.key(), request.retry.idempotency_key):
            if self._by_name.get(name) is call:
                del self._by_name[name]

    def running(self, name: Hashable) -> SharedReply | None:
        """Return the running call with a request key or an Idempotency-Key, unless it is abandoned."""
        call = self._by_name.get(name)
        return call if call is not None and not call.is_abandoned else None

    def key_of(self, name: str) -> KnownKey | None:
        """Return the call with an Idempotency-Key, if it is among the latest."""
        return self._keys.get(name)

    # Refused calls, whose retries repeat nothing

    def refuse(self, request: ModelRequest) -> None:
        """Add a call that failed with a status after which clients retry."""
        self._refused[request.key()] += 1

    def was_refused(self, request: ModelRequest) -> bool:
        """Whether an attempt at the request was refused and has not been retried yet."""
        return self._refused[request.key()] > 0

    def take_refused(self, request: ModelRequest) -> bool:
        """Remove one refused attempt at the request, which is being retried; False if there is none."""
        if not self.was_refused(request):
            return False
        self._refused[request.key()] -= 1
        return True

    # Undelivered turns

    @property
    def undelivered(self) -> frozenset[str]:
        """The ids of the undelivered turns: the recorded ones whose clients had disconnected."""
        return frozenset(self._undelivered)

    @property
    def has_undelivered(self) -> bool:
        """Whether there are undelivered turns."""
        return bool(self._undelivered)

    def is_undelivered(self, turn_id: str) -> bool:
        """Whether the client of a recorded turn had disconnected."""
        return turn_id in self._undelivered

    def mark_undelivered(self, turn_id: str) -> bool:
        """Mark a turn as received by no client; False if it was marked already."""
        if turn_id in self._undelivered:
            return False
        self._undelivered.add(turn_id)
        return True

    def mark_delivered(self, turn_id: str) -> bool:
        """Mark an undelivered turn as delivered; False if it was not undelivered."""
        if turn_id not in self._undelivered:
            return False
        self._undelivered.discard(turn_id)
        return True

    # Lost calls, which failed because the engine or the store failed

    def lose(self, call: Hashable) -> None:
        """Add a call that failed, not because of the policy. If no retry is answered, the episode fails."""
        self._lost.add(call)

    def answer(self, request: ModelRequest) -> None:
        """Remove a lost call whose retry was answered."""
        if self._lost:
            self._lost.discard(request.key())

    @property
    def has_lost(self) -> bool:
        """Whether a call was lost and no retry of it was answered."""
        return bool(self._lost)
