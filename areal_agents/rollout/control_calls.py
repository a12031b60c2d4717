"""Repeats control calls until they are answered, because the proxy may be restarting."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from areal_agents.client import AsyncClient
from areal_agents.errors import RequestError
from areal_agents.rollout.agents.attempt import FailureStreak, abort_episodes, backoff_s

logger = logging.getLogger(__name__)


class ControlCalls:
    """What a collector asks the proxy to do about groups. Refused with a conflict there is nothing to do any
    more: the trainer has the group.

    Raises (every method):
        AgentError: too many attempts and calls in a row failed.
        RequestError: the proxy refuses.
    """

    def __init__(self, client: AsyncClient, patience: FailureStreak) -> None:
        self._client = client
        self._patience = patience

    async def drop(self, group_id: str, reason: str) -> None:
        """Drop a group."""
        await self._insist(lambda: self._client.drop_group(group_id, reason))

    async def abort(self, episodes: Iterable[str], reason: str) -> None:
        """Abort open episodes that are no longer run."""
        left = list(episodes)
        await self._insist(lambda: abort_episodes(self._client, left, reason))

    async def _insist(self, call: Callable[[], Awaitable[object]]) -> None:
        while True:
            try:
                await call()
                return
            except RequestError as error:
                if error.status == 409:
                    return
                if error.status < 500:
                    raise
                logger.warning("a control call is repeated: %s", error)
                self._patience.note(str(error))
                await asyncio.sleep(backoff_s(1))
