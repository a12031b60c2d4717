"""A user's agent, and the three ways to run it: as a coroutine, in a worker process, or as a command.

Whichever it is, cancelling `run` ends the agent: a coroutine is cancelled, a process is killed.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import shlex
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from areal_agents.episode import Episode, check_signature, running
from areal_agents.errors import AgentError
from areal_agents.rollout.agents.command import CommandAgent
from areal_agents.rollout.agents.loading import load_function
from areal_agents.rollout.agents.worker_pool import WorkerAgent

logger = logging.getLogger(__name__)

CANCEL_GRACE_S = 2.0  # per attempt to cancel a coroutine that catches its cancellation
CANCEL_ATTEMPTS = 3


class Agent(Protocol):
    """Something that attempts tasks.

    Attributes:
        capacity: episodes that it can run at the same time, None without a limit.
    """

    capacity: int | None

    async def run(self, task: Mapping[str, Any], ep: Episode) -> Any:
        """One episode; what the agent returned. Whatever the agent raises, or AgentError."""
        ...

    async def close(self) -> None:
        """End every process that is left."""
        ...


def load_agent(spec: str | Mapping[str, str], *, workers: int = 8) -> Agent:
    """The agent that a config names.

    Args:
        spec: "module:function", "path/to/file.py:function", or {"command": "python my_agent.py"}. The
            function need not be decorated; it must take (task, ep).
        workers: processes for a synchronous function.

    Raises:
        AgentError: it does not import, is no function of (task, ep), or the command is empty.
    """
    if isinstance(spec, Mapping):
        if set(spec) != {"command"} or not spec["command"].strip():
            raise AgentError(
                f"an agent is module:function, file.py:function or {{command: …}}, got {dict(spec)}"
            )
        return CommandAgent(shlex.split(spec["command"]))
    function = load_function(spec, AgentError)
    check_signature(function)
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return CoroutineAgent(function)
    return WorkerAgent(spec, size=workers)


class CoroutineAgent:
    """An async function that runs in this process, as one task per episode."""

    capacity: int | None = None

    def __init__(self, function: Callable[..., Awaitable[Any]]) -> None:
        self._function = function
        self._undead: set[asyncio.Task[Any]] = set()

    async def run(self, task: Mapping[str, Any], ep: Episode) -> Any:
        """One episode, in a task of its own, so that an agent that resists cancellation delays nothing."""
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
        """Cancel once more what resisted."""
        for episode in tuple(self._undead):
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
            self._undead.add(episode)
            episode.add_done_callback(self._undead.discard)
            logger.error(
                "%s ignores its cancellation and continues; an agent must let it pass", episode.get_name()
            )
        elif not episode.cancelled():
            episode.exception()  # seen: it was ended on purpose
