"""The groups that a collector has begun: the slots that wait for an episode, and the running episodes.

The oldest group comes first. No state here needs to survive a restart.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterator
from contextlib import contextmanager

from areal_agents.core.rollout import Task
from areal_agents.rollout.groups.group import GroupRun


class GroupsInProgress:
    """Records groups in progress; it starts nothing itself.

    Args:
        size: the number of scored episodes that complete a group.
        changed: an event that is set when there may be something to do.
    """

    def __init__(self, *, size: int, changed: asyncio.Event) -> None:
        self._size = size
        self._changed = changed
        self._groups: dict[str, GroupRun] = {}
        self._begun = 0
        self._ending = 0  # groups that are removed here and not yet dropped in the store
        self._queue: list[tuple[int, int, GroupRun]] = []  # vacant slots: (group's order, index, group)
        self._running: dict[tuple[GroupRun, int], asyncio.Task[None]] = {}

    def __contains__(self, group: GroupRun) -> bool:
        return self._groups.get(group.id) is group

    def has(self, group_id: str) -> bool:
        """Whether the group of this id is in progress."""
        return group_id in self._groups

    @property
    def is_idle(self) -> bool:
        """Whether every group that was begun is complete or dropped."""
        return not self._groups and not self._ending

    @property
    def running(self) -> int:
        """The number of slots with a running task."""
        return len(self._running)

    @property
    def first_vacant(self) -> str | None:
        """The id of the oldest group with a queued slot, or None."""
        return self._queue[0][2].id if self._queue else None

    @property
    def unregistered(self) -> int:
        """The number of groups that have no row in the store yet."""
        return sum(not group.registered for group in self._groups.values())

    def registered(self) -> list[GroupRun]:
        """Return the groups that have a row in the store."""
        return [group for group in self._groups.values() if group.registered]

    def unrewarded(self) -> list[GroupRun]:
        """Return the groups with slots that wait for a reward over HTTP."""
        return [group for group in self._groups.values() if group.unrewarded]

    def begin(self, group_id: str, task: Task, *, surplus: int, order: int | None = None) -> GroupRun:
        """Add and return a group. Its slots are not queued yet.

        Args:
            order: groups with smaller numbers come first. Give it for every group or for none; None: this one
                comes after all others.
        """
        group = GroupRun(group_id, task, self._size, surplus, self._begun if order is None else order)
        self._begun += 1
        self._groups[group_id] = group
        return group

    def put(self, group: GroupRun, index: int) -> None:
        """Queue a slot of a group for an episode."""
        heapq.heappush(self._queue, (group.order, index, group))
        self._changed.set()

    def take(self) -> tuple[GroupRun, int]:
        """Remove and return the first queued slot, which is one of the oldest group."""
        _, index, group = heapq.heappop(self._queue)
        return group, index

    def note_running(self, group: GroupRun, index: int, task: asyncio.Task[None]) -> None:
        """Record that `task` runs an episode at a slot."""
        self._running[group, index] = task

    def note_ended(self, group: GroupRun, index: int) -> None:
        """Record that the task at a slot has ended."""
        self._running.pop((group, index), None)
        group.open.pop(index, None)
        self._changed.set()

    def forget(self, group: GroupRun) -> bool:
        """Remove a group and its queued slots; return whether it was in progress."""
        self._queue = [entry for entry in self._queue if entry[2] is not group]
        heapq.heapify(self._queue)
        self._changed.set()
        if group not in self:
            return False
        del self._groups[group.id]
        return True

    async def cancel(self, group: GroupRun) -> None:
        """Cancel the running tasks of a group, and wait for them."""
        others = [task for (of_group, _), task in self._running.items() if of_group is group]
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Make `is_idle` false inside the block, which ends a group that is already removed."""
        self._ending += 1
        try:
            yield
        finally:
            self._ending -= 1
            self._changed.set()
