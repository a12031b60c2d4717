"""Simulates one engine: continuous batching in which every running request gets one token per step.

Progress is a virtual clock that counts the tokens of each running request, so that a change of the batch
costs O(log n): a request of n tokens that started at clock c ends when the clock reaches c + n.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from typing import Any

NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class StepTime:
    """The duration in seconds of a decoding step with r running requests: base_s + per_request_s · r."""

    base_s: float
    per_request_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.base_s >= 0 and self.per_request_s >= 0 and self.base_s + self.per_request_s > 0):
            raise ValueError(f"base_s and per_request_s must be at least 0 and not both 0, got {self}")

    def __call__(self, running: int) -> float:
        return self.base_s + self.per_request_s * running


@dataclass(frozen=True, slots=True)
class Generated:
    """A finished generation: its owner, and its number of tokens by the version that sampled them."""

    owner: Any
    tokens: dict[int, float]


@dataclass(slots=True)
class EngineModel:
    """An engine that runs at most `slots` requests; further requests wait in order.

    Attributes:
        busy_s: the seconds in which the engine generated.
        request_s: the same, summed over the running requests.
        retracted: the number of tokens whose keys and values were recomputed after swaps.
    """

    step_time: StepTime
    slots: int
    busy_s: float = 0.0
    request_s: float = 0.0
    retracted: float = 0.0
    _clock: float = 0.0
    _now: float = 0.0
    _stopped_until: float = 0.0
    _held: bool = False
    _running: list[tuple[float, int, float, Any]] = field(default_factory=list)  # end, order, start, owner
    _waiting: deque[tuple[float, Any]] = field(default_factory=deque)
    _swaps: list[float] = field(default_factory=list)  # the clock at the swap to version i + 1
    _order: int = 0

    @property
    def running(self) -> int:
        """The number of running requests."""
        return len(self._running)

    def advance(self, now: float) -> list[Generated]:
        """Advance the time to `now`, at most `next_end`; return the generations that ended at `now`."""
        started = max(self._now, min(self._stopped_until, now))
        if self._running and now > started:
            self._clock += (now - started) / self.step_time(len(self._running))
            self.busy_s += now - started
            self.request_s += (now - started) * len(self._running)
        self._now = now
        ended = []
        while self._running and self._running[0][0] <= self._clock + 1e-9 * max(1.0, self._clock):
            end, _, start, owner = heapq.heappop(self._running)
            ended.append(Generated(owner, self._by_version(start, end)))
        self._admit()
        return ended

    def submit(self, tokens: float, owner: Any) -> None:
        """Submit a request of `tokens` tokens, at the time of the last `advance`."""
        self._waiting.append((tokens, owner))
        self._admit()

    def next_end(self) -> float:
        """Return when the next generation ends if nothing else happens; NEVER if none is running."""
        if not self._running:
            return NEVER
        steps = max(0.0, self._running[0][0] - self._clock)
        return max(self._now, self._stopped_until) + steps * self.step_time(len(self._running))

    def hold(self, held: bool) -> None:
        """Start no new request while `held`."""
        self._held = held
        self._admit()

    def swap(self, *, pause_s: float, recompute_s_per_token: float) -> None:
        """Swap the weights at the time of the last `advance`: pause, and recompute the running requests."""
        self._swaps.append(self._clock)
        recomputed = sum(self._clock - start for _, _, start, _ in self._running)
        self.retracted += recomputed
        stop = pause_s + recompute_s_per_token * recomputed
        self._stopped_until = max(self._now, self._stopped_until) + stop

    def _admit(self) -> None:
        while self._waiting and not self._held and len(self._running) < self.slots:
            tokens, owner = self._waiting.popleft()
            heapq.heappush(self._running, (self._clock + tokens, self._order, self._clock, owner))
            self._order += 1

    def _by_version(self, start: float, end: float) -> dict[int, float]:
        """Return the number of tokens by version between two values of the clock."""
        version = bisect_right(self._swaps, start)
        out: dict[int, float] = {}
        while version < len(self._swaps) and self._swaps[version] < end:
            if self._swaps[version] > start:
                out[version] = self._swaps[version] - start
            start = self._swaps[version]
            version += 1
        out[version] = end - start
        return out
