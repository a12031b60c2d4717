"""Helpers that the tests of environments share."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from integration_support import Stack

from areal_agents.environments.config import EnvironmentConfig
from areal_agents.environments.environment import Split
from areal_agents.episode import Episode
from areal_agents.rollout.agents.environment_agent import environment_agent, environment_tasks
from areal_agents.testing import Script, ScriptedCall, ScriptedReply

REQUEST_S = 300.0  # of all episodes of a test, and of the start of the interpreters that play them


def handle(stack: Stack, replies: Sequence[str | ScriptedReply] | Script) -> Episode:
    """Open an episode on an engine that gives these replies."""
    opened = stack.open_episode(replies)
    return Episode(opened["id"], opened["base_url"], opened["key"])


def played(
    stack: Stack,
    use: str,
    task: Mapping[str, Any],
    replies: Sequence[str | ScriptedReply] | Script,
    *,
    python: str = "",
) -> Any:
    """Play one episode of an environment, and return its reward."""

    async def play() -> Any:
        agent = environment_agent(EnvironmentConfig(use=use, python=python))
        try:
            async with asyncio.timeout(REQUEST_S):
                return await agent.run(task, handle(stack, replies))
        finally:
            await agent.close()

    return asyncio.run(play())


def tasks(use: str, python: str, split: Split = "train") -> list[dict[str, Any]]:
    """Return the tasks of a split of an environment in another interpreter."""
    return environment_tasks(EnvironmentConfig(use=use, python=python), split)


class Heard:
    """A script that gives replies in their order and records each prompt."""

    def __init__(self, *replies: str) -> None:
        self._replies = iter(replies)
        self.prompts: list[str] = []

    def __call__(self, call: ScriptedCall) -> str | ScriptedReply:
        self.prompts.append(call.prompt_text)
        return next(self._replies, ScriptedReply(error="unexpected call", error_status=400))

    @property
    def news(self) -> list[str]:
        """The text that each prompt adds to the one before."""
        return [
            now.removeprefix(before) for before, now in zip(["", *self.prompts], self.prompts, strict=False)
        ]
