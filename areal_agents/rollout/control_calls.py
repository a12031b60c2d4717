"""Control calls that are repeated until the proxy answers, because it may be restarting."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from areal_agents.client import AsyncClient
from areal_agents.core.reward_values import RewardValue
from areal_agents.core.rollout import Task
from areal_agents.errors import RequestError
from areal_agents.rollout.agents.attempt import FailureStreak, abort_episodes, backoff_s

T = TypeVar("T")
logger = logging.getLogger(__name__)


class ControlCalls:
    """The calls of a collector to the proxy about groups.

    A call that is refused with a conflict is ignored, because then the trainer has the group.

    Raises (every method):
        AgentError: too many attempts and calls in a row failed.
        RequestError: the proxy refused the call for another reason.
    """

    def __init__(self, client: AsyncClient, patience: FailureStreak) -> None:
        self._client = client
        self._patience = patience

    async def drop(self, group_id: str, reason: str) -> None:
        """Drop a group."""
        await self._repeat(lambda: self._client.drop_group(group_id, reason))

    async def begin(self, group_id: str, task: Task, **how: Any) -> dict[str, Any]:
        """Have the store admit a group for this process; arguments and answer of `Client.begin_group`."""
        body = {"id": task.id, "input": dict(task.input)}
        answer = await self._repeat(lambda: self._client.begin_group(group_id, body, **how))
        assert answer is not None, "the answer says whether there is a conflict"
        return answer

    async def claim(self, group_id: str, *, expected: str | None, runner: str | None) -> bool:
        """Take a group over from a process that has ended; return whether this process has it now."""
        call = self._client.claim_group
        return bool(await self._repeat(lambda: call(group_id, expected=expected, runner=runner)))

    async def abort(self, episodes: Iterable[str], reason: str) -> None:
        """Abort open episodes that no runner runs."""
        left = list(episodes)
        await self._repeat(lambda: abort_episodes(self._client, left, reason))

    def note_failure(self, error: str) -> None:
        """Count a failure that is not one of a call. Raises AgentError after too many in a row."""
        self._patience.note(error)

    async def reward(self, episode: str, value: RewardValue) -> None:
        """Reward an episode that has ended."""
        await self._repeat(lambda: self._client.reward(episode, value))

    async def read(self, episode: str) -> dict[str, Any]:
        """Return the proxy's description of an episode."""
        found = await self._repeat(lambda: self._client.get_episode(episode))
        assert found is not None, "reading contradicts no state"
        return found

    async def _repeat(self, call: Callable[[], Awaitable[T]]) -> T | None:
        while True:
            try:
                return await call()
            except RequestError as error:
                if error.status == 409:
                    return None
                if error.status < 500:
                    raise
                logger.warning("repeating a control call that failed: %s", error)
                self._patience.note(str(error))
                await asyncio.sleep(backoff_s(1))
