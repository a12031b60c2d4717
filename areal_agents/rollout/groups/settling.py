"""Acts on the outcome of an attempt at a slot: another attempt, a complete group, or a dropped one."""

from __future__ import annotations

import asyncio
import logging

from areal_agents.errors import RewardError
from areal_agents.rollout.agents.attempt import Outcome, backoff_s
from areal_agents.rollout.config import RolloutConfig
from areal_agents.rollout.control_calls import ControlCalls
from areal_agents.rollout.groups.group import GroupRun, Slot
from areal_agents.rollout.groups.in_progress import GroupsInProgress
from areal_agents.rollout.rewarding import RewardFunction, finished_episode
from areal_agents.store import Store

logger = logging.getLogger(__name__)


class SlotSettler:
    """Ends groups, and queues slots for further attempts. Raises what `ControlCalls` raises."""

    def __init__(
        self,
        *,
        groups: GroupsInProgress,
        calls: ControlCalls,
        store: Store,
        config: RolloutConfig,
        function: RewardFunction | None = None,
    ) -> None:
        self._groups = groups
        self._calls = calls
        self._store = store
        self._config = config
        self._rank = function if function is not None and function.of_groups else None

    async def settle(self, group: GroupRun, index: int, outcome: Outcome) -> None:
        """Act on the outcome of an attempt at a slot."""
        group.not_begun[index] = group.not_begun[index] + 1 if outcome.status == "aborted" else 0
        if outcome.status == "aborted":
            logger.warning("%s[%d] has not begun, and is tried again: %s", group.id, index, outcome.error)
            await self._put(group, index, pause_s=backoff_s(group.not_begun[index]))
        elif outcome.status == "failed":
            logger.warning("%s[%d] failed: %s", group.id, index, outcome.error)
            group.failures[index] += 1
            pause_s = backoff_s(group.failures[index])
            await self._after_failures(group, index, str(outcome.error), pause_s=pause_s)
        elif not outcome.rewarded:
            group.unrewarded.add(index)
            await self._reward_group(group)
        elif group.note_scored(index):
            await self.release(group)
        else:
            await self._reward_group(group)

    async def settle_found(self, group: GroupRun, index: int, slot: Slot) -> None:
        """Act on the state that the store has of a slot without a running task."""
        group.failures[index] = slot.failures
        if slot.state == "open":
            assert slot.episode is not None
            await self._calls.abort([slot.episode], "its runner no longer runs it")
        if slot.state == "unrewarded":
            group.unrewarded.add(index)
            await self._reward_group(group)
        elif slot.state != "scored":
            await self._after_failures(group, index, "see the episodes of the group")
        elif group.note_scored(index):
            await self.release(group)
        else:
            await self._reward_group(group)

    async def release(self, group: GroupRun) -> None:
        """End the running episodes of a group that is complete, or that another process dropped.

        When a group is complete, the store has already aborted its surplus, and accepts no more episodes of
        it.
        """
        if not self._groups.forget(group):
            return
        left = list(group.open.values())
        await self._groups.cancel(group)
        await self._calls.abort(left, "its group no longer needs it")

    async def _reward_group(self, group: GroupRun) -> None:
        """Reward the episodes of a group when all have ended; `Reconciler` then finds it complete.

        A group whose reward function fails is dropped. Rewards are posted again after a restart of this
        process if not all had arrived.
        """
        ended = group.unrewarded | group.scored
        if self._rank is None or group.is_ranked or not group.unrewarded or len(ended) < group.size:
            return
        stored = self._store.episodes(group_id=group.id)
        if sum(episode.status in ("finished", "truncated") for episode in stored) < len(ended):
            return  # one has failed since, for want of a reward; it is played again
        group.is_ranked = True
        found = [episode for episode in stored if episode.status == "finished"]
        episodes = [finished_episode(await self._calls.read(e.id), truncated=False) for e in found]
        try:
            values = await self._rank.of_group(episodes)
        except RewardError as error:
            await self._drop(group, str(error))
            self._calls.note_failure(str(error))
            return
        for episode, value in zip(episodes, values, strict=True):
            await self._calls.reward(episode.id, value)

    async def _after_failures(self, group: GroupRun, index: int, error: str, *, pause_s: float = 0.0) -> None:
        """Retry, abandon the slot, or drop the group; wait `pause_s` seconds before a new attempt."""
        refill = self._config.on_failed == "refill"
        follows = group.after_failures(index, retries=self._config.retries, refill=refill)
        if follows == "drop":
            times = group.failures[index]
            await self._drop(
                group, f"the episode at index {index} failed {times} times; the last error: {error}"
            )
        elif follows == "retry":
            group.is_ranked = False  # the new attempt is to be rewarded with the others
            await self._put(group, index, pause_s=pause_s)

    async def _put(self, group: GroupRun, index: int, *, pause_s: float) -> None:
        """Queue a slot for another attempt after a pause in seconds."""
        if pause_s:
            await asyncio.sleep(pause_s)
        if group in self._groups:  # it was neither dropped nor completed during the pause
            self._groups.put(group, index)

    async def _drop(self, group: GroupRun, reason: str) -> None:
        if not self._groups.forget(group):
            return  # another of its slots ended the group first
        logger.error("group %s is dropped: %s", group.id, reason)
        with self._groups.ending():
            await self._groups.cancel(group)
            await self._calls.drop(group.id, reason)
            left = [episode.id for episode in self._store.episodes(group_id=group.id, status="open")]
            await self._calls.abort(left, "its group was dropped")
