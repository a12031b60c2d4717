"""Loads the user's agent and runs it: as a coroutine in this process, in a worker process, or as a command.

In every case, cancelling `run` ends the agent: a coroutine is cancelled, and a process is killed.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import shlex
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from areal_agents.episode import Episode, check_signature, running
from areal_agents.errors import AgentError
from areal_agents.rollout.agents.command import CommandAgent
from areal_agents.rollout.agents.loading import load_function
from areal_agents.rollout.agents.worker_pool import WorkerAgent

logger = logging.getLogger(__name__)

CANCEL_GRACE_S = 2.0  # wait after each attempt to cancel a coroutine that catches its cancellation
CANCEL_ATTEMPTS = 3


class Agent(Protocol):
    """Something that attempts tasks.

    Attributes:
        capacity: the most episodes that it can run at the same time; None: no limit.
        must_reward: whether it gives its rewards before an episode ends, so that one without has failed. A
            command's reward may also be posted later.
    """

    capacity: int | None
    must_reward: bool

    async def run(self, task: Mapping[str, Any], ep: Episode) -> Any:
        """Run one episode and return what the agent returned. Raises what the agent raises, or AgentError."""
        ...

    async def close(self) -> None:
        """End every remaining process."""
        ...


def load_agent(spec: str | Mapping[str, str], *, workers: int = 8, logs: Path | None = None) -> Agent:
    """Load the agent that a configuration names.

    Args:
        spec: "module:function", "path/to/file.py:function", or {"command": "python my_agent.py"}. The
            function need not be decorated; it must take (task, ep).
        workers: the most processes for a synchronous function.
        logs: a folder for the output of commands; None: the output is discarded.

    Raises:
        AgentError: the agent cannot be imported, is not a function of (task, ep), or the command is empty.
    """
    if isinstance(spec, Mapping):
        if set(spec) != {"command"} or not spec["command"].strip():
            raise AgentError(
                f"an agent must be module:function, file.py:function or {{command: …}}, got {dict(spec)}"
            )
        try:
            return CommandAgent(shlex.split(spec["command"]), logs=logs)
        except ValueError as error:
            raise AgentError(f"the agent's command {spec['command']!r} cannot be read: {error}") from None
    function = load_function(spec, AgentError)
    check_signature(function)
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return CoroutineAgent(function)
    return WorkerAgent(spec, size=workers)


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
