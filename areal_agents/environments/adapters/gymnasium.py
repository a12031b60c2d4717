"""Environments of Gymnasium that can be played in text: `gymnasium:FrozenLake-v1?is_slippery=false`.

The model reads each observation, as a string: the observation itself where it is one, the environment's
`ansi` rendering where it has one, else the value. Its reply is the action: a string, or the last integer in
the reply where actions are numbered. The reward is the sum of all rewards. The options `size` and `held_out`
are the numbers of training and held-out tasks, which begin with seeds that count from `seed`; `max_turns` is
the largest number of actions; `instructions` takes the place of the environment's own description, which the
model reads first. All other options are settings of the environment.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium.spaces import Discrete, Text

from areal_agents.environments.environment import Split
from areal_agents.environments.line import EnvironmentLine
from areal_agents.environments.own_thread import OwnThread
from areal_agents.environments.players import Model, play_text_game
from areal_agents.environments.schemes import SCHEMES
from areal_agents.environments.seeds import SeededTasks
from areal_agents.episode import Episode
from areal_agents.errors import TaskEnvironmentError

_INTEGER = re.compile(r"-?\d+")


def open(line: EnvironmentLine) -> Gymnasium:
    """Open an environment. Raises TaskEnvironmentError if there is none, or its actions are no text."""
    return Gymnasium(line)


class Gymnasium:
    """An environment of Gymnasium."""

    def __init__(self, line: EnvironmentLine) -> None:
        own, self._settings = SCHEMES["gymnasium"].take(line)
        self._line, self._max_turns, self._instructions = line, own["max_turns"], own["instructions"]
        self._tasks = SeededTasks(line, own)
        try:
            specification = gymnasium.spec(line.name)
            renders_text = "ansi" in gymnasium.envs.registration.load_env_creator(
                str(specification.entry_point)
            ).metadata.get("render_modes", ())
        except (AttributeError, ImportError, gymnasium.error.Error) as error:
            raise TaskEnvironmentError(f"{line.text!r}: {error}") from error
        if renders_text:
            self._settings.setdefault("render_mode", "ansi")
        self._model = Model()
        self._make().close()

    def tasks(self, split: Split) -> list[dict[str, Any]]:
        """Return one task for each seed."""
        return self._tasks.of(split)

    async def play(self, task: Mapping[str, Any], ep: Episode) -> float:
        """Play an episode, and return the sum of its rewards."""
        thread, played = OwnThread(f"environment of episode {ep.id}"), None
        try:
            played = await thread.run(lambda: _Played(self._make(), task["seed"]))
            first = f"{self._instructions or played.description()}\n\n{played.observation}".strip()
            opening = [{"role": "user", "content": first}]

            async def step(text: str) -> str | None:
                return await thread.run(played.step, text)

            await play_text_game(self._model, ep, opening, step, max_turns=self._max_turns)
            return played.reward
        finally:
            thread.close(None if played is None else played.close)

    async def close(self) -> None:
        """Close the connections to the model."""
        await self._model.close()

    def _make(self) -> Any:
        try:
            made = gymnasium.make(self._line.name, **self._settings)
        except Exception as error:  # an environment raises anything for settings that it refuses
            raise TaskEnvironmentError(f"{self._line.text!r}: {type(error).__name__}: {error}") from error
        if not isinstance(made.action_space, Discrete | Text):
            raise TaskEnvironmentError(
                f"{self._line.text!r} has actions of {made.action_space}; a model can give numbered actions "
                "(Discrete) or strings (Text)"
            )
        return made


class _Played:
    """An environment in the middle of an episode."""

    def __init__(self, environment: Any, seed: int) -> None:
        self._environment = environment
        self.reward = 0.0
        self.observation = self._shown(environment.reset(seed=seed)[0])

    def description(self) -> str:
        """Return what the environment says of itself, and which actions there are."""
        about = inspect.getdoc(self._environment.unwrapped) or ""
        return f"{about}\n\n{self._asked()}".strip()

    def step(self, reply: str) -> str | None:
        """Take an action, and return what the model reads next; None at the end."""
        space = self._environment.action_space
        action: Any = reply.strip()
        if isinstance(space, Discrete):
            numbers = _INTEGER.findall(reply)
            if not numbers or not space.start <= int(numbers[-1]) < space.start + space.n:
                return self._asked()
            action = int(numbers[-1])
        observation, reward, terminated, truncated, _ = self._environment.step(action)
        self.reward += float(reward)
        return None if terminated or truncated else self._shown(observation)

    def close(self) -> None:
        """Close the environment."""
        self._environment.close()

    def _asked(self) -> str:
        space = self._environment.action_space
        if isinstance(space, Discrete):
            return f"Reply with the number of one action, from {space.start} to {space.start + space.n - 1}."
        return "Reply with one action."

    def _shown(self, observation: Any) -> str:
        if isinstance(observation, str):
            return observation
        if self._environment.render_mode == "ansi":
            return str(self._environment.render())
        return str(observation)
