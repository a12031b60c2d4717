"""Keeps training groups coming: as many as the gate allows, oldest first, `concurrency` episodes at a time.

Every group that is submitted ends complete or dropped. Nothing here must survive a restart: started
groups, their attempts and their failures are read back from the store.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Iterator

from areal_agents.client import AsyncClient
from areal_agents.core.rollout import Task
from areal_agents.errors import DataError, RequestError
from areal_agents.rollout.agent import Agent
from areal_agents.rollout.attempt import (
    SOURCE,
    Attempt,
    Outcome,
    Patience,
    abort_episodes,
    backoff_s,
    open_attempt,
    run_rollout,
)
from areal_agents.rollout.config import RolloutConfig
from areal_agents.rollout.data import TaskSource
from areal_agents.rollout.gate import admissible_groups
from areal_agents.rollout.groups import GroupRun, Place, read_places
from areal_agents.store import OpenGroup, Store

logger = logging.getLogger(__name__)

UNREWARDED_PERIOD_S = 1.0


class Collector:
    """Runs training episodes until cancelled.

    Args:
        steps: of the run; how many groups it needs follows.
        changed: set whenever the store may have changed.
        patience: shared with evaluations; ends the run when everything fails.
    """

    def __init__(
        self,
        *,
        client: AsyncClient,
        store: Store,
        agent: Agent,
        source: TaskSource,
        config: RolloutConfig,
        steps: int,
        changed: asyncio.Event,
        patience: Patience,
    ) -> None:
        self._client = client
        self._store = store
        self._agent = agent
        self._config = config
        self._steps = steps
        self._changed = changed
        self._patience = patience
        self._tasks: Iterator[tuple[Task, int]] = source.stream(set(store.task_ids_started("train")))
        self._groups: dict[str, GroupRun] = {}
        self._submitted = 0
        self._queue: list[tuple[int, int, GroupRun]] = []  # places to fill: (group's order, index, group)
        self._running: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._capacity = min(config.concurrency, agent.capacity or config.concurrency)
        self._exhausted = False
        self._next_look_s = 0.0

    async def run(self) -> None:
        """Collect until cancelled.

        Raises (in an exception group):
            AgentError: too many attempts in a row failed.
            DataError: the data ended before the trainer had enough.
            RequestError: the proxy refuses or cannot be reached.
        """
        await self._resume()
        async with asyncio.TaskGroup() as members:
            while True:
                self._changed.clear()
                await self._look_at_unrewarded()
                while len(self._running) < self._capacity and (self._queue or self._admit()):
                    _, index, group = heapq.heappop(self._queue)
                    task = members.create_task(self._fill(group, index), name=f"{group.id}[{index}]")
                    self._running[group.id, index] = task
                self._check_data()
                await self._changed.wait()

    # -- submitting ---------------------------------------------------------------------------

    async def _resume(self) -> None:
        """Take over the groups that an earlier life of this runner left unfinished."""
        for group in self._store.open_groups():
            if group.split == "train" and _is_ours(group):
                await self._take_over(group)

    async def _take_over(self, found: OpenGroup) -> None:
        if found.size != self._config.group_size:
            reason = f"group_size changed from {found.size} to {self._config.group_size}"
            await self._client.drop_group(found.id, reason)
            return
        group = self._add(found.id, found.task)
        group.registered = True
        for index, place in enumerate(_places(found)):
            await self._continue(group, index, place)

    def _admit(self) -> bool:
        """Submit one more group if the gate allows it; whether it did."""
        counts = self._store.group_counts("train")
        unregistered = sum(not group.registered for group in self._groups.values())
        submitted = counts["pending"] + counts["complete"] + counts["leased"] + unregistered
        config = self._config
        if not admissible_groups(
            submitted=submitted, groups=config.groups, max_staleness=config.max_staleness
        ):
            return False
        task, epoch = next(self._tasks, (None, 0))
        if task is None:
            self._exhausted = True
            return False
        group = self._add(f"{task.id}@{epoch}", task)
        for index in range(group.size):
            self._enqueue(group, index)
        return True

    def _add(self, group_id: str, task: Task) -> GroupRun:
        group = GroupRun(group_id, task, self._config.group_size, self._submitted)
        self._submitted += 1
        self._groups[group_id] = group
        return group

    def _enqueue(self, group: GroupRun, index: int) -> None:
        heapq.heappush(self._queue, (group.order, index, group))
        self._changed.set()

    def _check_data(self) -> None:
        if not self._exhausted or self._groups:
            return
        counts = self._store.group_counts("train")
        left = counts["pending"] + counts["complete"] + counts["leased"]
        if left < self._config.groups and counts["trained"] + left < self._steps * self._config.groups:
            raise DataError(
                f"the data ended: {counts['trained']} groups were trained and {counts['dropped']} dropped, "
                f"and the {left} left make no batch of {self._config.groups}; raise data.epochs"
            )

    # -- one place ----------------------------------------------------------------------------

    async def _fill(self, group: GroupRun, index: int) -> None:
        """Attempt one place of a group, and decide what follows."""
        lost: str | None = None
        try:
            outcome = await self._attempt(group, index)
        except RequestError as error:
            lost = str(error)
        finally:
            self._running.pop((group.id, index), None)
            self._changed.set()
        if lost is not None:
            await self._look_again(group, index, lost)
            return
        self._patience.note(outcome.error)
        if outcome.status == "failed":
            logger.warning("%s[%d] failed: %s", group.id, index, outcome.error)
            group.failures[index] += 1
            if group.failures[index] <= self._config.retries:
                await asyncio.sleep(backoff_s(group.failures[index]))
            await self._retry_or_drop(group, index, str(outcome.error))
        elif not outcome.rewarded:
            group.unrewarded.add(index)
        elif group.scored(index):
            self._groups.pop(group.id, None)

    async def _attempt(self, group: GroupRun, index: int) -> Outcome:
        latest = self._store.latest_version()
        limits = self._config.limits_at(latest.step if latest is not None else 0)
        attempt = Attempt(group.task, "train", group.id, group.size, index)
        opened = await open_attempt(self._client, attempt, limits=limits)
        group.registered = True
        return await run_rollout(self._client, self._agent, group.task, opened, limits=limits)

    async def _retry_or_drop(self, group: GroupRun, index: int, error: str) -> None:
        failures = group.failures[index]
        if failures > self._config.retries:
            await self._drop(group, f"place {index} failed {failures} times; the last time: {error}")
        elif group.id in self._groups:  # not dropped meanwhile
            self._enqueue(group, index)

    async def _drop(self, group: GroupRun, reason: str) -> None:
        if not self._forget(group):
            return  # another of its places was faster
        logger.error("group %s is dropped: %s", group.id, reason)
        others = [task for (group_id, _), task in self._running.items() if group_id == group.id]
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others)
        await self._client.drop_group(group.id, reason)
        left = self._store.episodes(group_id=group.id, status="open")
        await abort_episodes(self._client, [episode.id for episode in left], "its group was dropped")

    def _forget(self, group: GroupRun) -> bool:
        """Do no more for a group; whether it was one of ours until now."""
        self._queue = [entry for entry in self._queue if entry[2] is not group]
        heapq.heapify(self._queue)
        self._changed.set()
        return self._groups.pop(group.id, None) is not None

    # -- what the store knows better ----------------------------------------------------------

    async def _continue(self, group: GroupRun, index: int, place: Place) -> None:
        """Go on with a place that nobody here runs, from what the store has."""
        group.failures[index] = place.failures
        if place.state == "open":
            assert place.episode is not None
            await abort_episodes(self._client, [place.episode], "nobody runs it any more")
        if place.state == "unrewarded":
            group.unrewarded.add(index)
        elif place.state != "scored":
            await self._retry_or_drop(group, index, "see the episodes of the group")
        elif group.scored(index):
            self._groups.pop(group.id, None)

    async def _look_again(self, group: GroupRun, index: int, error: str | None) -> None:
        """The proxy refused, or its answer was lost: what became of the place?"""
        while error is not None:
            logger.warning("%s[%d]: %s", group.id, index, error)
            self._patience.note(error)
            await asyncio.sleep(backoff_s(1))
            if group.id not in self._groups:
                return
            found = {pending.id: pending for pending in self._store.open_groups()}.get(group.id)
            if found is None and group.registered:  # dropped by somebody else
                self._forget(group)
                return
            places = _places(found) if found is not None else [Place("vacant", 0, None)] * group.size
            try:
                await self._continue(group, index, places[index])
                error = None
            except RequestError as refused:
                error = str(refused)

    async def _look_at_unrewarded(self) -> None:
        """Rewards may come over HTTP; the proxy fails the episodes for which none does."""
        now = asyncio.get_running_loop().time()
        waiting = [group for group in self._groups.values() if group.unrewarded]
        if not waiting or now < self._next_look_s:
            return
        self._next_look_s = now + UNREWARDED_PERIOD_S
        pending = {found.id: found for found in self._store.open_groups()}
        for group in waiting:
            if group.id not in pending:  # complete, or dropped by somebody else
                self._forget(group)
                continue
            for index, place in enumerate(_places(pending[group.id])):
                if index in group.unrewarded and place.state != "unrewarded":
                    group.unrewarded.discard(index)
                    await self._continue(group, index, place)


def _places(found: OpenGroup) -> list[Place]:
    return read_places(found.size, [attempt for tried in found.attempts.values() for attempt in tried])


def _is_ours(group: OpenGroup) -> bool:
    return any(
        attempt.metadata.get("source") == SOURCE["source"]
        for attempts in group.attempts.values()
        for attempt in attempts
    )
