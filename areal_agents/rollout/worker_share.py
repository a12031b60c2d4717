"""The part of one of several rollout processes of a run, on one machine or many.

The processes have no contact but the store: a group belongs to the process that began it, the proxy admits a
group for whoever asks first, and what a dead process had is taken over by any other. Episodes say in their
metadata which process opened them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from areal_agents.store import Store


@dataclass(frozen=True, slots=True)
class WorkerShare:
    """One of several rollout processes.

    Attributes:
        index, count: this is process `index` of 0 … `count` - 1. The first one decides when there is an
            evaluation beside training.
        name: names this process in the store. No other process that runs has this name.
        is_alive: whether the process of a name is running. One that is held for dead although it runs on
            loses its groups and evaluation episodes, and nothing else.
    """

    index: int
    count: int
    name: str
    is_alive: Callable[[str], bool]

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count or not self.name:
            raise ValueError(
                f"expected an index from 0 to count - 1 and a name, got {self.index}, {self.count} and "
                f"{self.name!r}"
            )

    @classmethod
    def of_place(cls, store: Store, *, index: int, count: int, epoch: int) -> WorkerShare:
        """Return the part of the process that has the place `index` of the role rollout, in its `epoch`."""

        def is_alive(name: str) -> bool:
            rows = store.role_rows("rollout")
            return any(row.is_alive and name == f"rollout-{row.index}-{row.epoch}" for row in rows)

        return cls(index, count, f"rollout-{index}-{epoch}", is_alive)

    def part_of(self, total: int) -> int:
        """Return this process's part of `total` episodes that run at the same time; at least 1."""
        return max(1, total // self.count + (self.index < total % self.count))

    def may_take(self, runner: str | None) -> bool:
        """Whether this process may take over the groups of `runner`: another process that is not running."""
        return runner is None or (runner != self.name and not self.is_alive(runner))

    def has_left(self, runner: str | None) -> bool:
        """As `may_take`, at the start of this process: groups under its own name are from an earlier one."""
        return runner == self.name or self.may_take(runner)
