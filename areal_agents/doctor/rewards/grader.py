"""Calls the run's reward function in a process of its own, so that one that ends its process ends no report.

The process reads a pickled episode from each line, and answers with a line that is {"value"} or {"error"}. It
is started at the first episode, and again after it has ended; so a function keeps what it remembers between
episodes, as in a run. What the function prints goes to standard error.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
import sys

from areal_agents.core.reward_values import RewardValue
from areal_agents.errors import RewardError
from areal_agents.rewards import FinishedEpisode
from areal_agents.rollout.agents.agent_process import ChildProcess
from areal_agents.rollout.config import RewardConfig

_START_S = 120.0  # longest wait in seconds for the process to import the function
_GRACE_S = 10.0  # further seconds for an answer, after those that the function has
_EXIT_S = 10.0  # longest wait in seconds for the process to exit after the end of its output


class GraderProcess:
    """The process of a reward function; see `RewardFunction`."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._process: ChildProcess | None = None

    async def of_episode(self, episode: FinishedEpisode) -> RewardValue:
        """Return the reward of one episode. Raises RewardError, also if the function ends its process."""
        await self.start()
        assert self._process is not None
        self._process.send(base64.b64encode(pickle.dumps(episode)) + b"\n")
        answer = await self._answer(self._process, self._config.time_s + _GRACE_S)
        if "error" in answer:
            raise RewardError(answer["error"])
        return answer["value"]

    async def start(self) -> None:
        """Start the process if there is none. Raises RewardError if it cannot import the function."""
        if self._process is not None:
            return
        command = [
            sys.executable,
            "-m",
            "areal_agents.doctor.rewards.grader_worker",
            self._config.model_dump_json(),
        ]
        self._process = await ChildProcess.start(command, environment=os.environ, lines=True)
        answer = await self._answer(self._process, _START_S)
        if "error" in answer:
            await self.close()
            raise RewardError(answer["error"])

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            await process.end()

    async def _answer(self, process: ChildProcess, time_s: float) -> dict[str, RewardValue]:
        name = self._config.group or self._config.episode
        try:
            async with asyncio.timeout(time_s):
                line = await process.line()
        except TimeoutError:
            await self.close()
            raise RewardError(
                f"the reward function {name} blocked its event loop for {time_s:g} s (reward.time_s)"
            ) from None
        if line:
            return json.loads(line)
        try:
            async with asyncio.timeout(_EXIT_S):
                status = await process.wait()
        except TimeoutError:
            raise RewardError(f"the reward function {name} closed the output of its process") from None
        finally:
            await self.close()
        how = f"by signal {-status}" if status < 0 else f"with exit status {status}"
        raise RewardError(
            f"the reward function {name} ended the process in which it runs, {how}: in training that is the "
            "rollout process with all its episodes. Let it raise an error, or run what may end its process "
            "(os._exit, a crash of a library) as a program of its own"
        )
