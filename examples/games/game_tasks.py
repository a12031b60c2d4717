"""Tasks of the environments that `config.yaml` names, for the warm-up.

Questions and observations are those of reasoning-gym and TextArena themselves, so the starting policy is
trained on exactly what the run's environments send. The packages are imported where a task is made.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from areal_agents.environments.line import EnvironmentLine

if TYPE_CHECKING:
    from areal_agents.environments.adapters.reasoning_gym import ReasoningGym

CONFIG = Path(__file__).parent / "config.yaml"
# Far from the seeds of training, 0 to size, and from the held-out ones, 2**31 and more.
_WARM_UP_SEED = 1 << 20
_COUNTDOWN = re.compile(r"(?:equals|make|Calculate) (\d+).*?\.", re.DOTALL)
_NUMBERS = re.compile(r"numbers:? (\d+(?:, \d+)*)")
_SUM = re.compile(r"problem: (.*) =")


def line_of(name: str) -> EnvironmentLine:
    """The line of `config.yaml` whose environment has this name."""
    for source in yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["environments"]:
        line = EnvironmentLine.read(source["use"])
        if line.name.startswith(name):
            return line
    raise ValueError(f"{CONFIG} has no environment {name!r}")


@dataclass(frozen=True, slots=True)
class Countdown:
    """A task of countdown: `numbers` [3] are to make `target`."""

    question: str
    numbers: tuple[int, ...]
    target: int

    @classmethod
    def read(cls, question: str) -> Countdown:
        """Read a question of reasoning-gym."""
        target, numbers = _COUNTDOWN.search(question), _NUMBERS.search(question)
        if target is None or numbers is None:
            raise ValueError(f"this is no question of countdown: {question!r}")
        return cls(question, tuple(map(int, numbers[1].split(", "))), int(target[1]))

    @property
    def content(self) -> tuple[tuple[int, ...], int]:
        """What is asked, whatever the words and the order of the numbers."""
        return tuple(sorted(self.numbers)), self.target


@dataclass(frozen=True, slots=True)
class Sum:
    """A task of chain_sum: the signed `terms` are to be added from left to right."""

    question: str
    terms: tuple[int, ...]

    @classmethod
    def read(cls, question: str) -> Sum:
        """Read a question of reasoning-gym."""
        found = _SUM.search(question)
        if found is None:
            raise ValueError(f"this is no question of chain_sum: {question!r}")
        first, *rest = found[1].split(" ")
        signed = [int(sign + number) for sign, number in zip(rest[::2], rest[1::2], strict=True)]
        return cls(question, (int(first), *signed))


def countdown_tasks(count: int) -> list[Countdown]:
    """About `count` tasks that are not held out: neither the question nor its numbers with its target."""
    held_out = {Countdown.read(row["question"]).content for row in _opened("countdown").tasks("eval")}
    tasks = map(Countdown.read, _questions("countdown", count))
    return [task for task in tasks if task.content not in held_out]


def sums(count: int) -> list[Sum]:
    """About `count` sums that are not held out."""
    return [Sum.read(question) for question in _questions("chain_sum", count)]


def system_message(name: str) -> str:
    """What a question of a data set begins with."""
    return _opened(name).system


def _opened(name: str, **changed: int) -> ReasoningGym:
    from areal_agents.environments.adapters.reasoning_gym import ReasoningGym

    line = line_of(name)
    return ReasoningGym(EnvironmentLine(line.text, line.scheme, line.name, {**line.options, **changed}))


def _questions(name: str, count: int) -> Iterator[str]:
    rows = _opened(name).tasks("eval")
    held_out = {row["question"] for row in rows}
    for row in _opened(name, size=count, seed=_WARM_UP_SEED, held_out=1).tasks("train"):
        if row["question"] not in held_out:
            yield row["question"]


class Guessing:
    """A game of GuessTheNumber; `news` is what the player reads next, None when the game is over."""

    def __init__(self, seed: int) -> None:
        import textarena

        line = line_of("GuessTheNumber")
        self._game: Any = textarena.make(f"{line.name}-raw")
        self._game.reset(num_players=1, seed=seed)
        self.least: int = self._game.min_number
        self.most: int = self._game.max_number
        self.news: str | None = self._read()

    def guess(self, reply: str) -> None:
        """Make the move of a reply."""
        done, _ = self._game.step(action=reply)
        self.news = None if done else self._read()

    def _read(self) -> str:
        player, observed = self._game.get_observation()
        return "\n".join(str(message) for sender, message, _ in observed if sender != player)
