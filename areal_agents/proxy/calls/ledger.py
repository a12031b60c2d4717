"""The calls of one session, as far as retries and failures depend on them.

Only the ledger's own methods change it. It lasts as long as the process; after a restart, the undelivered
turns are read from the store, and all else is empty.
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
    """What an Idempotency-Key named: the key of the request, and the turns that answer it."""

    request: Hashable
    turn_ids: tuple[str, ...]


class CallLedger:
    """The running, refused, lost and undelivered calls of a session.

    Attributes:
        running_calls: number of calls that have begun and have not ended.
    """

    def __init__(self, undelivered: Iterable[str]) -> None:
        """Begin a ledger; `undelivered` are the ids of recorded turns whose clients disconnected."""
        self.running_calls = 0
        self._by_name: dict[Hashable, SharedReply] = {}  # by request key and by Idempotency-Key
        self._refused: Counter[Hashable] = Counter()  # by request key
        self._undelivered = set(undelivered)
        self._keys: OrderedDict[str, KnownKey] = OrderedDict()
        self._lost: set[Hashable] = set()

    # Running calls

    def begin(self, request: ModelRequest, call: SharedReply) -> None:
        """Note a call that is running, under each name by which a retry may find it."""
        key, name = request.key(), request.retry.idempotency_key
        self.running_calls += 1
        for known in (key, name) if name else (key,):
            self._by_name[known] = call
        if name:
            self._keys[name] = KnownKey(key, call.turn_ids)
            if len(self._keys) > _KEYS_KEPT:
                self._keys.popitem(last=False)

    def end(self, request: ModelRequest, call: SharedReply) -> None:
        """Note that a call is no longer running."""
        self.running_calls -= 1
        for name in (request.key(), request.retry.idempotency_key):
            if self._by_name.get(name) is call:
                del self._by_name[name]

    def running(self, name: Hashable) -> SharedReply | None:
        """The running call with a request key or an Idempotency-Key, unless its clients have disconnected."""
        call = self._by_name.get(name)
        return call if call is not None and not call.is_abandoned else None

    def key_of(self, name: str) -> KnownKey | None:
        """What an Idempotency-Key named."""
        return self._keys.get(name)

    # Refused calls: the retry of one repeats nothing

    def refuse(self, request: ModelRequest) -> None:
        """Note a call that failed in such a way that its client sends it again."""
        self._refused[request.key()] += 1

    def was_refused(self, request: ModelRequest) -> bool:
        """Whether an attempt at the request was refused and not retried yet."""
        return self._refused[request.key()] > 0

    def take_refused(self, request: ModelRequest) -> bool:
        """Take back one refused attempt at the request, for its retry; False if there is none."""
        if not self.was_refused(request):
            return False
        self._refused[request.key()] -= 1
        return True

    # Undelivered turns

    @property
    def undelivered(self) -> frozenset[str]:
        """The ids of the recorded turns whose clients had disconnected."""
        return frozenset(self._undelivered)

    @property
    def has_undelivered(self) -> bool:
        """Whether there are undelivered turns."""
        return bool(self._undelivered)

    def is_undelivered(self, turn_id: str) -> bool:
        """Whether the client of a recorded turn had disconnected."""
        return turn_id in self._undelivered

    def mark_undelivered(self, turn_id: str) -> bool:
        """Note that no client received a turn; False if that is known."""
        if turn_id in self._undelivered:
            return False
        self._undelivered.add(turn_id)
        return True

    def mark_delivered(self, turn_id: str) -> bool:
        """Note that a client receives an undelivered turn after all; False if it was delivered."""
        if turn_id not in self._undelivered:
            return False
        self._undelivered.discard(turn_id)
        return True

    # Lost calls: the engine or the store failed

    def lose(self, call: Hashable) -> None:
        """Note that a call failed, not because of the policy. Unless it is answered, the episode fails."""
        self._lost.add(call)

    def answer(self, request: ModelRequest) -> None:
        """Note that a call was answered, perhaps one that had been lost and was sent again."""
        if self._lost:
            self._lost.discard(request.key())

    @property
    def has_lost(self) -> bool:
        """Whether a call was lost and never answered."""
        return bool(self._lost)
