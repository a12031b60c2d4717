"""Games in text of TextArena that one player plays: `textarena:GuessTheNumber-v0?size=500`.

The model reads what is new in each observation and its reply is its move. The reward is what the game gives
its player at the end. The options `size` and `held_out` are the numbers of training and held-out games, which
begin with seeds that count from `seed`, and `max_turns` is the largest number of moves. All other options are
settings of the game.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import textarena

from areal_agents.environments.environment import Split
from areal_agents.environments.line import EnvironmentLine
from areal_agents.environments.own_thread import OwnThread
from areal_agents.environments.players import Model, play_text_game
from areal_agents.environments.schemes import SCHEMES
from areal_agents.environments.seeds import SeededTasks
from areal_agents.episode import Episode
from areal_agents.errors import TaskEnvironmentError

_STARTING = threading.Lock()  # a game seeds the global generator of `random`, and uses it while it begins


def open(line: EnvironmentLine) -> TextArena:
    """Open a game. Raises TaskEnvironmentError if there is none, or it is not for one player."""
    return TextArena(line)


class TextArena:
    """A game of TextArena."""

    def __init__(self, line: EnvironmentLine) -> None:
        own, self._settings = SCHEMES["textarena"].take(line)
        self._line, self._max_turns = line, own["max_turns"]
        self._tasks = SeededTasks(line, own)
        known = textarena.envs.registration.ENV_REGISTRY
        self._id = next((name for name in (f"{line.name}-raw", line.name) if name in known), "")
        if not self._id:
            raise TaskEnvironmentError(
                f"TextArena has no game {line.name!r}; a name is one of textarena.envs.registration, such as "
                "GuessTheNumber-v0"
            )
        self._model = Model()
        self._begin(0)

    def tasks(self, split: Split) -> list[dict[str, Any]]:
        """Return one task for each seed."""
        return self._tasks.of(split)

    async def play(self, task: Mapping[str, Any], ep: Episode) -> float:
        """Play a game, and return the reward of the player."""
        thread = OwnThread(f"game of episode {ep.id}")
        try:
            game = await thread.run(self._begin, task["seed"])
            opening = [{"role": "user", "content": await thread.run(_news, game)}]

            def move(text: str) -> str | None:
                done, _ = game.step(action=text)
                return None if done else _news(game)

            async def step(text: str) -> str | None:
                return await thread.run(move, text)

            await play_text_game(self._model, ep, opening, step, max_turns=self._max_turns)
            rewards, _ = await thread.run(game.close)
            return float((rewards or {}).get(0, 0.0))
        finally:
            thread.close()

    async def close(self) -> None:
        """Close the connections to the model."""
        await self._model.close()

    def _begin(self, seed: int) -> Any:
        try:
            with _STARTING:
                game = textarena.make(self._id, **self._settings)
                game.reset(num_players=1, seed=seed)
        except Exception as error:  # a game raises anything for settings that it refuses
            raise TaskEnvironmentError(
                f"{self._line.text!r} cannot be begun by one player: {type(error).__name__}: {error}"
            ) from error
        return game


def _news(game: Any) -> str:
    """Return what the player has not read yet, without the moves that it has made itself."""
    player, observed = game.get_observation()
    if isinstance(observed, str):  # a game without a raw form repeats everything
        return observed
    return "\n".join(str(message) for sender, message, _ in observed if sender != player)
