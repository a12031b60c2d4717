"""A worker process that calls a user's function on finished episodes, and can be killed at any time.

It exchanges one JSON object per line over its standard streams: first {"ready"} or {"error"}; then, for each
list of episodes that it reads, {"values"} or {"error", "last"}. After a function that exceeded its time
limit, whose thread cannot be ended, the process exits, and says that with "last". What the function prints
goes to standard error.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from areal_agents.errors import RewardError
from areal_agents.rewards import FinishedEpisode
from areal_agents.rollout.agents.worker import own_streams, until_the_parent_ends
from areal_agents.rollout.config import RewardConfig
from areal_agents.rollout.rewarding import EpisodeFunction, RewardFunction


def main(kind: str, given: str) -> None:
    """Serve calls of a function until standard input ends.

    Args:
        kind: "reward", with a RewardConfig as JSON in `given`; or "answer", with {"function", "time_s"}.
    """
    requests, answers = own_streams()

    def send(message: Mapping[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    settings = json.loads(given)
    try:
        function = _Rewards(settings) if kind == "reward" else _Answers(settings)
    except RewardError as error:
        send({"error": str(error)})
        return
    send({"ready": True})
    with asyncio.Runner() as runner:  # one loop for all calls: a function may keep what belongs to it
        _answer(function, until_the_parent_ends(requests), send, runner)


def _answer(
    function: _Rewards | _Answers,
    requests: Iterable[Mapping[str, Any]],
    send: Callable[[Mapping[str, Any]], None],
    runner: asyncio.Runner,
) -> None:
    for request in requests:
        episodes = [FinishedEpisode(**{**episode, "workdir": None}) for episode in request["episodes"]]
        begun = time.monotonic()
        try:
            send({"values": runner.run(function.values(episodes))})
        except RewardError as error:
            is_last = time.monotonic() - begun >= function.time_s
            send({"error": str(error), "last": is_last})
            if is_last:
                os._exit(0)


class _Rewards:
    def __init__(self, settings: Mapping[str, Any]) -> None:
        config = RewardConfig.model_validate(settings)
        self.time_s = config.time_s
        self._function = RewardFunction(config)

    async def values(self, episodes: Sequence[FinishedEpisode]) -> list[Any]:
        """Return the rewards of the episodes of a group, or of a single one."""
        if self._function.of_groups:
            return list(await self._function.of_group(episodes))
        return [await self._function.of_episode(episode) for episode in episodes]


class _Answers:
    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.time_s = float(settings["time_s"])
        self._function = EpisodeFunction(
            settings["function"], what="answer function", key="eval.answer", time_s=self.time_s
        )

    async def values(self, episodes: Sequence[FinishedEpisode]) -> list[Any]:
        """Return the answer of each episode: a string, or None."""
        answers = [await self._function(episode) for episode in episodes]
        for answer in answers:
            if answer is not None and not isinstance(answer, str):
                raise RewardError(
                    f"{self._function.called} must return a string or None, got {answer!r:.200}"
                )
        return answers


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
