"""Keeps the sandbox that an episode was given before its run, until the run takes it.

The owner of each sandbox is certain: `take` hands it to the run, and `release` ends what no run has taken.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable

from areal_agents.errors import AgentError, SandboxError
from areal_agents.sandbox.sandbox import Sandbox

logger = logging.getLogger(__name__)


class PreparedSandboxes:
    """Started sandboxes by episode, of the episodes whose run has not begun."""

    def __init__(self) -> None:
        self._sandboxes: dict[str, Sandbox] = {}

    async def prepare(self, episode: str, starting: Awaitable[Sandbox]) -> None:
        """Wait for the sandbox of an episode. Raises AgentError if it cannot be started."""
        try:
            self._sandboxes[episode] = await starting
        except SandboxError as error:
            raise AgentError(f"the agent's sandbox: {error}") from error

    def take(self, episode: str) -> Sandbox | None:
        """Return the sandbox of an episode, which the caller ends; None if none was prepared."""
        return self._sandboxes.pop(episode, None)

    async def release(self, episode: str) -> None:
        """End the sandbox of an episode, unless it was taken. A failure is logged: the run continues."""
        sandbox = self.take(episode)
        if sandbox is None:
            return
        try:
            await sandbox.end()
        except SandboxError as error:
            logger.error("the sandbox of the episode %s cannot be ended: %s", episode, error)
