"""Calls the user's reward function on episodes that have ended: on one at a time, or on those of a group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_agents.core.conversations import completions, conversations
from areal_agents.core.reward_values import RewardValue, checked_reward
from areal_agents.errors import AgentError, RewardError
from areal_agents.rewards import FinishedEpisode
from areal_agents.rewards.own_thread import result_of
from areal_agents.rollout.config import RewardConfig
from areal_agents.user_functions import describe, load_function


class EpisodeFunction:
    """A user's function of finished episodes, with a time limit.

    A synchronous function runs in a thread of its own. If it exceeds the time limit, its result is ignored,
    but the thread cannot be ended.

    Args:
        name: module:function or file.py:function.
        what: what it is, for messages: "reward function".
        key: the configuration key that names it.
        time_s: the time limit of a call, in seconds.

    Raises:
        RewardError: the function cannot be imported.
    """

    def __init__(self, name: str, *, what: str, key: str, time_s: float) -> None:
        self.called = f"the {what} {name}"
        self._time_s = time_s
        try:
            self._function: Callable[..., Any] = load_function(name, RewardError)
        except RewardError as error:
            raise RewardError(f"{key}: {error}") from error

    async def __call__(self, given: Any) -> Any:
        """Return what the function returns. Raises RewardError if it fails or exceeds the time limit."""
        try:
            async with asyncio.timeout(self._time_s):
                return await result_of(self._function, given)
        except RewardError:
            raise
        except TimeoutError:
            raise RewardError(
                f"{self.called} did not return within {self._time_s:g} s (reward.time_s)"
            ) from None
        except (Exception, SystemExit) as error:  # a grader that was a program calls sys.exit
            raise RewardError(f"{self.called} failed: {describe(error)}") from error


class RewardFunction:
    """The reward function of a configuration. Raises RewardError if it cannot be imported."""

    def __init__(self, config: RewardConfig) -> None:
        self.of_groups = bool(config.group)
        self._call = EpisodeFunction(
            config.group or config.episode, what="reward function", key="reward", time_s=config.time_s
        )

    async def of_episode(self, episode: FinishedEpisode) -> RewardValue:
        """Return the reward of one episode; a function of groups gets a group of one. Raises RewardError."""
        if self.of_groups:
            return (await self.of_group([episode]))[0]
        return self._checked(await self._call(episode))

    async def of_group(self, episodes: Sequence[FinishedEpisode]) -> list[RewardValue]:
        """Return the rewards of the episodes of a group, in their order. Raises RewardError."""
        values = await self._call(list(episodes))
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(episodes):
            raise RewardError(
                f"{self._call.called} must return a list of {len(episodes)} rewards, one for "
                f"each episode, got {values!r:.200}"
            )
        return [self._checked(value) for value in values]

    def _checked(self, value: Any) -> RewardValue:
        try:
            return checked_reward(value)
        except AgentError as error:
            raise RewardError(f"{self._call.called}: {error}") from None


def finished_episode(
    state: Mapping[str, Any], *, truncated: bool, workdir: Path | None = None
) -> FinishedEpisode:
    """Return what a reward function is given, from the proxy's description of an episode."""
    return FinishedEpisode(
        id=state["id"],
        task=state["task"]["input"],
        branches=tuple(conversations(state["turns"])),
        status="truncated" if truncated or state["limit_reached"] is not None else "finished",
        rewards={reward["name"]: reward["value"] for reward in state["rewards"] if not reward["target"]},
        workdir=workdir,
        completions=tuple(completions(state["turns"])),
    )
