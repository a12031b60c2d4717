"""Keeps training groups coming: as many as the gate allows, oldest first, `concurrency` episodes at a time.

Every group that is submitted ends complete or dropped; what an over-sampled one has beyond its size is
aborted as soon as it is complete. Nothing here must survive a restart: started groups, their attempts
and their failures are read back from the store.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Awaitable, Callable, Iterator

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
from areal_agents.rollout.seeds import episode_seed
from areal_agents.store import OpenGroup, Store

logger = logging.getLogger(__name__)

UNREWARDED_PERIOD_S = 1.0


class Collector:
    """Runs training episodes until cancelled.

    Args:
        steps: of the run; how many groups it needs follows.
        seed: of the run; every attempt draws from one of its own.
        lack: what the run lacks to take more on; no group is submitted while it lacks anything.
        changed: set whenever the store may have changed, and from time to time.
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
        seed: int = 0,
        lack: Callable[[], str | None] = lambda: None,
        changed: asyncio.Event,
        patience: Patience,
    ) -> None:
        self._client = client
        self._store = store
        self._agent = agent
        self._config = config
        self._steps = steps
        self._seed = seed
        self._lack = lack
        self._lacked = False
        self._changed = changed
        self._patience = patience
        self._tasks: Iterator[tuple[Task, int]] = source.stream(set(store.task_ids_started("train")))
        self._groups: dict[str, GroupRun] = {}
        self._submitted = 0
        self._dropping = 0  # groups that are forgotten here and not yet dropped in the store
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
            await self._insist(self._client.drop_group, found.id, reason)
            return
        group = self._add(found.id, found.task, found.surplus)
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
            submitted=submitted,
            groups=config.groups,
            max_staleness=config.max_staleness,
            needed=self._needed(),
        ):
            return False
        if self._lacks():
            return False
        task, epoch = next(self._tasks, (None, 0))
        if task is None:
            self._exhausted = True
            return False
        group = self._add(f"{task.id}@{epoch}", task, config.over_sample)
        for index in range(group.places):
            self._enqueue(group, index)
        return True

    def _lacks(self) -> bool:
        """Whether the run lacks something; the log says when that begins and ends."""
        lack = self._lack()
        if lack is not None and not self._lacked:
            logger.error("%s", lack)
        elif lack is None and self._lacked:
            logger.info("groups are submitted again")
        self._lacked = lack is not None
        return self._lacked

    def _needed(self) -> int:
        """How many groups the steps to come train on; looked up only where nothing else is the bound."""
        if self._config.max_staleness is not None:
            return 0
        return (self._steps - self._step()) * self._config.groups

    def _step(self) -> int:
        """The step of the newest version."""
        latest = self._store.latest_version()
        return latest.step if latest is not None else 0

    def _add(self, group_id: str, task: Task, surplus: int) -> GroupRun:
        group = GroupRun(group_id, task, self._config.group_size, surplus, self._submitted)
        self._submitted += 1
        self._groups[group_id] = group
        return group

    def _enqueue(self, group: GroupRun, index: int) -> None:
        heapq.heappush(self._queue, (group.order, index, group))
        self._changed.set()

    def _check_data(self) -> None:
        if not self._exhausted or self._groups or self._dropping:
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
            group.open.pop(index, None)
            self._changed.set()
        if lost is not None:
            await self._look_again(group, index, lost)
            return
        self._patience.note(outcome.error)
        if outcome.status == "failed":
            logger.warning("%s[%d] failed: %s", group.id, index, outcome.error)
            group.failures[index] += 1
            pause_s = backoff_s(group.failures[index])
            await self._after_failures(group, index, str(outcome.error), pause_s=pause_s)
        elif not outcome.rewarded:
            group.unrewarded.add(index)
        elif group.note_scored(index):
            await self._let_go(group)

    async def _attempt(self, group: GroupRun, index: int) -> Outcome:
        limits = self._config.limits_at(self._step())
        seed = episode_seed(self._seed, group.id, index, group.failures[index])
        sampling = {"base_seed": seed}
        attempt = Attempt(
            group.task, "train", group.id, group.size, index, group.surplus or None, sampling=sampling
        )
        opened = await open_attempt(self._client, attempt, limits=limits)
        group.registered = True
        group.open[index] = opened.id
        return await run_rollout(self._client, self._agent, group.task, opened, limits=limits)

    async def _after_failures(self, group: GroupRun, index: int, error: str, *, pause_s: float = 0.0) -> None:
        """Decide what becomes of a vacant place; `pause_s` goes before a new attempt."""
        refill = self._config.on_failed == "refill"
        follows = group.after_failures(index, retries=self._config.retries, refill=refill)
        if follows == "drop":
            times = group.failures[index]
            await self._drop(group, f"place {index} failed {times} times; the last time: {error}")
        elif follows == "retry":
            if pause_s:
                await asyncio.sleep(pause_s)
            if group.id in self._groups:  # neither dropped nor complete meanwhile
                self._enqueue(group, index)

    async def _let_go(self, group: GroupRun) -> None:
        """The group is complete, or dropped by somebody else: end what still runs for it.

        Once it is complete the store has aborted its surplus already, and takes nothing more of it.
        """
        if not self._forget(group):
            return
        left = list(group.open.values())
        await self._cancel(group)
        await self._insist(abort_episodes, self._client, left, "its group needs it no more")

    async def _cancel(self, group: GroupRun) -> None:
        others = [task for (group_id, _), task in self._running.items() if group_id == group.id]
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others)

    async def _drop(self, group: GroupRun, reason: str) -> None:
        if not self._forget(group):
            return  # another of its places was faster
        logger.error("group %s is dropped: %s", group.id, reason)
        self._dropping += 1
        try:
            await self._cancel(group)
            await self._insist(self._client.drop_group, group.id, reason)
            left = [episode.id for episode in self._store.episodes(group_id=group.id, status="open")]
            await self._insist(abort_episodes, self._client, left, "its group was dropped")
        finally:
            self._dropping -= 1
            self._changed.set()

    async def _insist(self, call: Callable[..., Awaitable[object]], *arguments: object) -> None:
        """Make a control call until it is answered: the proxy may be away for a moment.

        Refused with a conflict it has nothing to do any more: the trainer has the group.
        """
        while True:
            try:
                await call(*arguments)
                return
            except RequestError as error:
                if error.status == 409:
                    return
                if error.status < 500:
                    raise
                logger.warning("a control call is repeated: %s", error)
                self._patience.note(str(error))
                await asyncio.sleep(backoff_s(1))

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
            await self._insist(abort_episodes, self._client, [place.episode], "nobody runs it any more")
        if place.state == "unrewarded":
            group.unrewarded.add(index)
        elif place.state != "scored":
            await self._after_failures(group, index, "see the episodes of the group")
        elif group.note_scored(index):
            await self._let_go(group)

    async def _look_again(self, group: GroupRun, index: int, error: str) -> None:
        """The proxy refused, or its answer was lost: what became of the place?"""
        if group.id not in self._groups:  # a conflict with what the group came to meanwhile
            return
        logger.warning("%s[%d]: %s", group.id, index, error)
        self._patience.note(error)
        await asyncio.sleep(backoff_s(1))
        if group.id not in self._groups:
            return
        found = {pending.id: pending for pending in self._store.open_groups()}.get(group.id)
        if found is None and group.registered:  # its completion was not heard of, or it was dropped
            await self._let_go(group)
            return
        places = _places(found) if found is not None else [Place("vacant", 0, None)] * group.places
        await self._continue(group, index, places[index])

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
                await self._let_go(group)
                continue
            for index, place in enumerate(_places(pending[group.id])):
                if index in group.unrewarded and place.state != "unrewarded":
                    group.unrewarded.discard(index)
                    await self._continue(group, index, place)


def _places(found: OpenGroup) -> list[Place]:
    count = found.size + found.surplus
    return read_places(count, [attempt for tried in found.attempts.values() for attempt in tried])


def _is_ours(group: OpenGroup) -> bool:
    return any(
        attempt.metadata.get("source") == SOURCE["source"]
        for attempts in group.attempts.values()
        for attempt in attempts
    )
