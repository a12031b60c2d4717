"""A training group on its way to completion: which of its places still need an episode.

What counts is in the store; this is what one runner plans to do about it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from areal_agents.core.rollout import Task
from areal_agents.store import EpisodeSummary

PlaceState = Literal["vacant", "open", "unrewarded", "scored"]


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


def read_places(size: int, attempts: Iterable[EpisodeSummary]) -> list[Place]:
    """The places of a group, from all its attempts."""
    by_index: list[list[EpisodeSummary]] = [[] for _ in range(size)]
    for attempt in attempts:
        by_index[attempt.index].append(attempt)
    return [_place(tried) for tried in by_index]


@dataclass(slots=True, eq=False)
class GroupRun:
    """A group that this runner completes.

    Attributes:
        order: groups with smaller numbers come first.
        registered: whether the store has a row of it.
        unrewarded: places that wait for a reward from outside.
        missing: places without a scored episode.
        failures: failed attempts per place.
    """

    id: str
    task: Task
    size: int
    order: int
    registered: bool = False
    unrewarded: set[int] = field(default_factory=set)
    missing: set[int] = field(init=False)
    failures: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.missing = set(range(self.size))
        self.failures = [0] * self.size

    def scored(self, index: int) -> bool:
        """Note that a place holds a scored episode; whether it was the last."""
        self.missing.discard(index)
        self.unrewarded.discard(index)
        return not self.missing


def _place(tried: list[EpisodeSummary]) -> Place:
    failures = sum(attempt.status == "failed" for attempt in tried)
    live = [attempt for attempt in tried if attempt.status in ("open", "finished", "truncated")]
    if not live:
        return Place("vacant", failures, None)
    holder = live[-1]
    if holder.status == "open":
        return Place("open", failures, holder.id)
    return Place("unrewarded" if holder.score is None else "scored", failures, holder.id)
