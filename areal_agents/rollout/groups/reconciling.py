"""Reconciles a collector with the store: groups from before a restart, lost answers, and late rewards.

Of several rollout processes, each takes over the groups of those that have ended. The store lets one of them
have a group, and then refuses episodes of its former owner, which may only have been slow to answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from areal_agents.core.rollout import FINGERPRINT, OPENED_BY_RUNNER
from areal_agents.rollout.agents.attempt import FailureStreak, backoff_s
from areal_agents.rollout.config import RolloutConfig
from areal_agents.rollout.control_calls import ControlCalls
from areal_agents.rollout.groups.group import GroupRun, Slot, read_slots
from areal_agents.rollout.groups.in_progress import GroupsInProgress
from areal_agents.rollout.groups.settling import SlotSettler
from areal_agents.rollout.worker_share import WorkerShare
from areal_agents.store import OpenGroup, Store

logger = logging.getLogger(__name__)

LOOK_PERIOD_S = 1.0


class Reconciler:
    """Updates a collector's groups to their state in the store. Raises what `ControlCalls` raises.

    Args:
        fingerprint, worker: see `Collector`.
    """

    def __init__(
        self,
        *,
        groups: GroupsInProgress,
        settler: SlotSettler,
        calls: ControlCalls,
        patience: FailureStreak,
        store: Store,
        config: RolloutConfig,
        fingerprint: str,
        worker: WorkerShare | None,
    ) -> None:
        self._fingerprint = fingerprint
        self._worker = worker
        self._name = worker.name if worker is not None else None
        self._groups = groups
        self._settler = settler
        self._calls = calls
        self._patience = patience
        self._store = store
        self._config = config
        self._next_look_s = 0.0

    async def resume(self) -> None:
        """Take over the groups that runners left unfinished when they ended. Call this before any other."""
        worker = self._worker
        await self._take_over_if(lambda runner: worker is None or worker.has_left(runner))

    async def _take_over_if(self, is_left: Callable[[str | None], bool]) -> None:
        for group in self._store.open_groups():
            if group.split != "train" or not _is_of_a_runner(group) or not is_left(group.runner):
                continue
            if self._groups.has(group.id):  # another process took it over, and this one has not noticed yet
                continue
            if group.runner == self._name or await self._claim(group):
                await self._take_over(group)

    async def _claim(self, group: OpenGroup) -> bool:
        claimed = await self._calls.claim(group.id, expected=group.runner, runner=self._name)
        if claimed:
            logger.info("group %s of %s is taken over", group.id, group.runner or "an earlier process")
        return claimed

    async def look_again(self, group: GroupRun, index: int, error: str) -> None:
        """Read the state of a slot from the store, after the proxy refused a call or its answer was lost."""
        if group not in self._groups:  # the refusal was due to a change of the group's state
            return
        logger.warning("%s[%d]: %s", group.id, index, error)
        self._patience.note(error)
        await asyncio.sleep(backoff_s(1))
        if group not in self._groups:
            return
        found = self._open_groups().get(group.id)
        # It was completed, or dropped or taken over by another process.
        if (found is None and group.registered) or (found is not None and found.runner != self._name):
            await self._settler.release(group)
            return
        slots = _slots(found) if found is not None else [Slot("vacant", 0, None)] * group.slots
        await self._settler.settle_found(group, index, slots[index])

    async def look_for_changes(self) -> None:
        """Look, at most once a second, for what others did to groups in progress over HTTP.

        The agents of a dropped group are ended, and rewards are noted; the proxy fails episodes that get none
        in time. Groups of other processes that have ended are taken over.
        """
        now = asyncio.get_running_loop().time()
        if now < self._next_look_s or (self._groups.is_idle and self._worker is None):
            return
        self._next_look_s = now + LOOK_PERIOD_S
        registered = self._groups.registered()  # read before the store, which has a row of each
        runners = {group.id: group.runner for group in self._store.untrained_groups()}
        for group in registered:
            if group.id not in runners or runners[group.id] != self._name:
                logger.warning("another process has completed, dropped or taken over group %s", group.id)
                await self._settler.release(group)
        if waiting := self._groups.unrewarded():
            await self._look_at_unrewarded(waiting)
        if self._worker is not None and any(map(self._worker.may_take, self._store.runners())):
            await self._take_over_if(self._worker.may_take)

    async def _look_at_unrewarded(self, waiting: Iterable[GroupRun]) -> None:
        pending = self._open_groups()
        for group in waiting:
            if group.id not in pending:  # complete, or dropped by another process
                await self._settler.release(group)
                continue
            for index, slot in enumerate(_slots(pending[group.id])):
                if index in group.unrewarded and slot.state != "unrewarded":
                    group.unrewarded.discard(index)
                    await self._settler.settle_found(group, index, slot)

    async def _take_over(self, found: OpenGroup) -> None:
        if found.size != self._config.group_size:
            reason = f"group_size changed from {found.size} to {self._config.group_size}"
            await self._calls.drop(found.id, reason)
            return
        if self._fingerprint and _fingerprints(found) - {self._fingerprint}:
            await self._calls.drop(found.id, "the agent, its reward or its limits changed since it was begun")
            return
        order = found.seq if self._worker is not None else None
        group = self._groups.begin(found.id, found.task, surplus=found.surplus, order=order)
        group.registered = True
        for index, slot in enumerate(_slots(found)):
            await self._settler.settle_found(group, index, slot)

    def _open_groups(self) -> dict[str, OpenGroup]:
        return {group.id: group for group in self._store.open_groups()}


def _slots(found: OpenGroup) -> list[Slot]:
    count = found.size + found.surplus
    return read_slots(count, [attempt for tried in found.attempts.values() for attempt in tried])


def _fingerprints(group: OpenGroup) -> set[str]:
    """Return what its episodes were played with, as far as that was recorded."""
    played = [attempt.metadata.get(FINGERPRINT) for tried in group.attempts.values() for attempt in tried]
    return {fingerprint for fingerprint in played if fingerprint is not None}


def _is_of_a_runner(group: OpenGroup) -> bool:
    return group.runner is not None or any(
        attempt.metadata.items() >= OPENED_BY_RUNNER.items()
        for attempts in group.attempts.values()
        for attempt in attempts
    )
