"""Decides what follows the end of an attempt: another attempt, a complete group, or a dropped one."""

from __future__ import annotations

import asyncio
import logging

from areal_agents.rollout.agents.attempt import Outcome, backoff_s
from areal_agents.rollout.config import RolloutConfig
from areal_agents.rollout.control_calls import ControlCalls
from areal_agents.rollout.groups.group import GroupRun, Place
from areal_agents.rollout.groups.in_progress import GroupsUnderWay
from areal_agents.store import Store

logger = logging.getLogger(__name__)


class PlaceSettler:
    """Ends groups, and puts places to be filled again. Raises what `ControlCalls` does."""

    def __init__(
        self, *, groups: GroupsUnderWay, calls: ControlCalls, store: Store, config: RolloutConfig
    ) -> None:
        self._groups = groups
        self._calls = calls
        self._store = store
        self._config = config

    async def settle(self, group: GroupRun, index: int, outcome: Outcome) -> None:
        """An attempt at a place has ended."""
        if outcome.status == "failed":
            logger.warning("%s[%d] failed: %s", group.id, index, outcome.error)
            group.failures[index] += 1
            pause_s = backoff_s(group.failures[index])
            await self._after_failures(group, index, str(outcome.error), pause_s=pause_s)
        elif not outcome.rewarded:
            group.unrewarded.add(index)
        elif group.note_scored(index):
            await self.let_go(group)

    async def settle_found(self, group: GroupRun, index: int, place: Place) -> None:
        """Settle a place that nothing here fills, from what the store has."""
        group.failures[index] = place.failures
        if place.state == "open":
            assert place.episode is not None
            await self._calls.abort([place.episode], "nobody runs it any more")
        if place.state == "unrewarded":
            group.unrewarded.add(index)
        elif place.state != "scored":
            await self._after_failures(group, index, "see the episodes of the group")
        elif group.note_scored(index):
            await self.let_go(group)

    async def let_go(self, group: GroupRun) -> None:
        """The group is complete, or dropped by somebody else: end what still runs for it.

        Once it is complete the store has aborted its surplus already, and takes nothing more of it.
        """
        if not self._groups.forget(group):
            return
        left = list(group.open.values())
        await self._groups.cancel(group)
        await self._calls.abort(left, "its group needs it no more")

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
            if group in self._groups:  # neither dropped nor complete meanwhile
                self._groups.put(group, index)

    async def _drop(self, group: GroupRun, reason: str) -> None:
        if not self._groups.forget(group):
            return  # another of its places was faster
        logger.error("group %s is dropped: %s", group.id, reason)
        with self._groups.ending():
            await self._groups.cancel(group)
            await self._calls.drop(group.id, reason)
            left = [episode.id for episode in self._store.episodes(group_id=group.id, status="open")]
            await self._calls.abort(left, "its group was dropped")
