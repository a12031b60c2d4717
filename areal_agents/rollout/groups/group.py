"""A training group in progress: which of its slots still need an episode.

A slot is an index in the group. A group of size G with a surplus of k (over-sampling) has G + k slots, and
is complete with any G scored episodes. A slot whose attempts are used up is abandoned: first at the expense
of the surplus, then as the configuration says.

The store has the state of the group; this module plans what one runner does about it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from areal_agents.core.rollout import Task
from areal_agents.store import EpisodeSummary

SlotState = Literal["vacant", "open", "unrewarded", "scored"]
AfterFailures = Literal["retry", "lost", "drop"]


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot of a group, as the store has it.

    Attributes:
        state: "unrewarded" means finished without a reward, which may still be posted over HTTP.
        failures: the number of failed attempts; aborted ones do not count.
        episode: the id of the attempt that occupies the slot; None if it is vacant.
    """

    state: SlotState
    failures: int
    episode: str | None


def read_slots(count: int, attempts: Iterable[EpisodeSummary]) -> list[Slot]:
    """Return the `count` slots of a group, from all its attempts."""
    by_index: list[list[EpisodeSummary]] = [[] for _ in range(count)]
    for attempt in attempts:
        by_index[attempt.index].append(attempt)
    return [_slot(tried) for tried in by_index]


@dataclass(slots=True, eq=False)
class GroupRun:
    """A group that this runner completes.

    Attributes:
        size: the number of scored episodes that complete the group.
        surplus: the number of slots beyond `size`.
        order: groups with smaller numbers come first.
        registered: whether the store has a row of the group.
        open: the id of the running episode, by slot.
        unrewarded: the slots that wait for a reward over HTTP.
        scored: the slots with a scored episode.
        lost: the slots that get no further attempt.
        is_ranked: whether the reward function of groups was called for it.
        failures: the number of failed attempts, by slot.
        not_begun: the number of attempts since the last one that began, by slot.
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
    is_ranked: bool = False
    failures: list[int] = field(init=False)
    not_begun: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.failures = [0] * self.slots
        self.not_begun = [0] * self.slots

    @property
    def slots(self) -> int:
        """The number of slots, `size` + `surplus`."""
        return self.size + self.surplus

    def note_scored(self, index: int) -> bool:
        """Record that a slot has a scored episode; return whether the group is complete."""
        self.scored.add(index)
        self.unrewarded.discard(index)
        return len(self.scored) >= self.size

    def after_failures(self, index: int, *, retries: int, refill: bool) -> AfterFailures:
        """Return what follows from the failures of a vacant slot.

        An episode is used up after `retries` + 1 failures. With `refill`, a new episode replaces it, at most
        `size` times in a group, so that a task that always fails ends.
        """
        used_up = self.failures[index] // (retries + 1)
        if not used_up:
            return "retry"
        if self.slots - len(self.lost | {index}) >= self.size:
            self.lost.add(index)
            return "lost"
        fresh = sum(failures // (retries + 1) for failures in self.failures)
        return "retry" if refill and fresh <= self.size else "drop"


def _slot(tried: list[EpisodeSummary]) -> Slot:
    failures = sum(attempt.status == "failed" for attempt in tried)
    live = [attempt for attempt in tried if attempt.status in ("open", "finished", "truncated")]
    if not live:
        return Slot("vacant", failures, None)
    holder = live[-1]
    if holder.status == "open":
        return Slot("open", failures, holder.id)
    return Slot("unrewarded" if holder.score is None else "scored", failures, holder.id)
