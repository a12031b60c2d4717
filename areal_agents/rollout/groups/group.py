"""A training group that is not complete yet: which of its places still need an episode.

A group of size G with k places more (over-sampling) is complete with G scored episodes, whichever they
are. A place whose attempts are used up is given up: first at the cost of the surplus, then as the
config says.

What counts is in the store; this is what one runner plans to do about it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from areal_agents.core.rollout import Task
from areal_agents.store import EpisodeSummary

PlaceState = Literal["vacant", "open", "unrewarded", "scored"]
AfterFailures = Literal["retry", "lost", "drop"]


@dataclass(frozen=True, slots=True)
class Place:
    """One of a group's places, as the store has it.

    Attributes:
        state: "unrewarded" is finished without a reward, which may still come over HTTP.
        failures: attempts that failed; aborted ones do not count.
        episode: id of the attempt that holds it, None if vacant.
    """

    state: PlaceState
    failures: int
    episode: str | None


def read_places(count: int, attempts: Iterable[EpisodeSummary]) -> list[Place]:
    """The places of a group, `count` of them, from all its attempts."""
    by_index: list[list[EpisodeSummary]] = [[] for _ in range(count)]
    for attempt in attempts:
        by_index[attempt.index].append(attempt)
    return [_place(tried) for tried in by_index]


@dataclass(slots=True, eq=False)
class GroupRun:
    """A group that this runner completes.

    Attributes:
        size: episodes that make it complete; surplus: places beyond.
        order: groups with smaller numbers come first.
        registered: whether the store has a row of it.
        open: per place the episode that runs there.
        unrewarded: places that wait for a reward from outside.
        scored: places that hold a scored episode.
        lost: places that no further episode is tried at.
        failures: failed attempts per place.
    """

    id: str
    task: Task
    size: int
    surplus: int
    order: int
    registered: bool = False
    open: dict[int, str] = field(default_factory=dict)
    unrewarded: set[int] = field(default_factory=set)
    scored: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    failures: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.failures = [0] * self.places

    @property
    def places(self) -> int:
        """How many episodes may be live at the same time."""
        return self.size + self.surplus

    def note_scored(self, index: int) -> bool:
        """Note that a place holds a scored episode; whether the group is complete."""
        self.scored.add(index)
        self.unrewarded.discard(index)
        return len(self.scored) >= self.size

    def after_failures(self, index: int, *, retries: int, refill: bool) -> AfterFailures:
        """What follows from the failures of a vacant place.

        Each `retries` + 1 of them use one episode up. A fresh one takes its place with `refill`, at most
        `size` times in a group, so that a task which always fails ends.
        """
        used_up = self.failures[index] // (retries + 1)
        if not used_up:
            return "retry"
        if self.places - len(self.lost | {index}) >= self.size:
            self.lost.add(index)
            return "lost"
        fresh = sum(failures // (retries + 1) for failures in self.failures)
        return "retry" if refill and fresh <= self.size else "drop"


def _place(tried: list[EpisodeSummary]) -> Place:
    failures = sum(attempt.status == "failed" for attempt in tried)
    live = [attempt for attempt in tried if attempt.status in ("open", "finished", "truncated")]
    if not live:
        return Place("vacant", failures, None)
    holder = live[-1]
    if holder.status == "open":
        return Place("open", failures, holder.id)
    return Place("unrewarded" if holder.score is None else "scored", failures, holder.id)
