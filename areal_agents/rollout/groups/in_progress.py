"""The groups that a collector has begun, with the places that are waiting and those that are being filled.

Oldest group first. Nothing here must survive a restart.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterator
from contextlib import contextmanager

from areal_agents.core.rollout import Task
from areal_agents.rollout.groups.group import GroupRun


class GroupsUnderWay:
    """Plain bookkeeping. `changed` is set when there may be something new to do.

    Args:
        size: episodes that make a group complete.
    """

    def __init__(self, *, size: int, changed: asyncio.Event) -> None:
        self._size = size
        self._changed = changed
        self._groups: dict[str, GroupRun] = {}
        self._begun = 0
        self._ending = 0  # groups that are forgotten here and not yet dropped in the store
        self._queue: list[tuple[int, int, GroupRun]] = []  # places to fill: (group's order, index, group)
        self._running: dict[tuple[str, int], asyncio.Task[None]] = {}

    def __contains__(self, group: GroupRun) -> bool:
        return group.id in self._groups

    @property
    def is_idle(self) -> bool:
        """Whether every group that was begun is complete or dropped."""
        return not self._groups and not self._ending

    @property
    def running(self) -> int:
        """Places that are being filled."""
        return len(self._running)

    @property
    def first_vacant(self) -> str | None:
        """The oldest group of which a place waits to be filled."""
        return self._queue[0][2].id if self._queue else None

    @property
    def unregistered(self) -> int:
        """Groups that have no row in the store yet."""
        return sum(not group.registered for group in self._groups.values())

    def unrewarded(self) -> list[GroupRun]:
        """Groups with places that wait for a reward from outside."""
        return [group for group in self._groups.values() if group.unrewarded]

    def begin(self, group_id: str, task: Task, *, surplus: int) -> GroupRun:
        """A further group, after all others; its places are not put to be filled yet."""
        group = GroupRun(group_id, task, self._size, surplus, self._begun)
        self._begun += 1
        self._groups[group_id] = group
        return group

    def put(self, group: GroupRun, index: int) -> None:
        """A place of a group is to be filled."""
        heapq.heappush(self._queue, (group.order, index, group))
        self._changed.set()

    def take(self) -> tuple[GroupRun, int]:
        """The first place to be filled, of the oldest group."""
        _, index, group = heapq.heappop(self._queue)
        return group, index

    def note_running(self, group: GroupRun, index: int, task: asyncio.Task[None]) -> None:
        """`task` fills a place."""
        self._running[group.id, index] = task

    def note_ended(self, group: GroupRun, index: int) -> None:
        """Mark a place that is no longer being filled."""
        self._running.pop((group.id, index), None)
        group.open.pop(index, None)
        self._changed.set()

    def forget(self, group: GroupRun) -> bool:
        """Do no more for a group; whether it was one of ours until now."""
        self._queue = [entry for entry in self._queue if entry[2] is not group]
        heapq.heapify(self._queue)
        self._changed.set()
        return self._groups.pop(group.id, None) is not None

    async def cancel(self, group: GroupRun) -> None:
        """End whatever still fills a place of a group."""
        others = [task for (group_id, _), task in self._running.items() if group_id == group.id]
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """While the block ends a group that is forgotten already, this is not idle."""
        self._ending += 1
        try:
            yield
        finally:
            self._ending -= 1
            self._changed.set()
