"""Runs an async agent function in this process, as one task for each episode."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from areal_agents.episode import Episode, running
from areal_agents.errors import AgentError

logger = logging.getLogger(__name__)

CANCEL_GRACE_S = 2.0  # wait after each attempt to cancel a coroutine that catches its cancellation
CANCEL_ATTEMPTS = 3


class CoroutineAgent:
    """An async function that runs in this process, as one task per episode."""

    capacity: int | None = None
    must_reward = True

    def __init__(self, function: Callable[..., Awaitable[Any]]) -> None:
        self._function = function
        self._uncancelled: set[asyncio.Task[Any]] = set()

    async def run(self, task: Mapping[str, Any], ep: Episode) -> Any:
        """Run one episode in its own task, so that an agent that ignores cancellation blocks no other."""
        episode = asyncio.create_task(self._call(task, ep), name=f"episode {ep.id}")
        try:
            return await asyncio.shield(episode)
        except asyncio.CancelledError:
            ours = asyncio.current_task()
            if episode.cancelled() and ours is not None and not ours.cancelling():
                raise AgentError("the agent cancelled itself (it raised asyncio.CancelledError)") from None
            await self._end(episode)
            raise

    async def close(self) -> None:
        """Cancel the tasks again that ignored their cancellation."""
        for episode in tuple(self._uncancelled):
            await self._end(episode)

    async def _call(self, task: Mapping[str, Any], ep: Episode) -> Any:
        with running(ep):
            try:
                return await self._function(dict(task), ep)
            except SystemExit as error:  # it would end the event loop, and the run with it
                raise AgentError(f"the agent called sys.exit({error.code!r})") from error

    async def _end(self, episode: asyncio.Task[Any]) -> None:
        for _ in range(CANCEL_ATTEMPTS):
            if episode.done():
                break
            episode.cancel()
            await asyncio.wait({episode}, timeout=CANCEL_GRACE_S)
        if not episode.done():
            self._uncancelled.add(episode)
            episode.add_done_callback(self._uncancelled.discard)
            logger.error(
                "%s ignores its cancellation; an agent must not catch asyncio.CancelledError",
                episode.get_name(),
            )
        elif not episode.cancelled():
            episode.exception()  # retrieved, so that asyncio does not log it: the task was ended on purpose
