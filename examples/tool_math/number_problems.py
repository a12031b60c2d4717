"""Word problems with large numbers, such as "Amy has 347 pens, buys 58 boxes of 24. How many pens are left?"

A small model cannot compute with such numbers, but it can copy them into a program. A fifth of the programs
(347+58*24 is one) is held out: none of them is the solution of a problem of training.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Sign = Literal["+", "-"]
VERBS: dict[Sign, tuple[str, ...]] = {
    "+": ("buys", "finds", "wins", "gets"),
    "-": ("sells", "loses", "uses", "breaks"),
}
SIGNS: tuple[Sign, ...] = ("+", "-")
NAMES = ("Amy", "Bob", "Cora", "Dirk", "Emma", "Fred", "Gina", "Hugo", "Ines", "Jack", "Kurt", "Lucy")
NOUNS = ("pens", "cups", "nuts", "caps", "bells", "balls", "lamps", "coins", "plates", "stamps", "tiles")
START = range(100, 10_000)
ALONE = range(100, 1_000)  # an amount in single things
BOXES, IN_A_BOX = range(11, 100), range(11, 100)
RESULT = range(100, 20_000)  # after every change
HELD_OUT_OF = 5  # one program of so many is held out


@dataclass(frozen=True, slots=True)
class Change:
    """What is added or taken away: `amount` things, or `boxes` boxes of `amount`."""

    sign: Sign
    verb: str
    amount: int
    boxes: int | None = None

    @property
    def count(self) -> int:
        return self.amount if self.boxes is None else self.boxes * self.amount

    @property
    def words(self) -> str:
        boxes = "" if self.boxes is None else f"{self.boxes} boxes of "
        return f"{self.verb} {boxes}{self.amount}"

    @property
    def expression(self) -> str:
        return str(self.amount) if self.boxes is None else f"{self.boxes}*{self.amount}"


@dataclass(frozen=True, slots=True)
class Problem:
    """A number of things, and one or two changes of it."""

    name: str
    noun: str
    start: int
    changes: tuple[Change, ...]

    @property
    def question(self) -> str:
        changes = ", then ".join(change.words for change in self.changes)
        return f"{self.name} has {self.start} {self.noun}, {changes}. How many {self.noun} are left?"

    @property
    def answer(self) -> int:
        return result(self.start, self.changes)

    @property
    def expression(self) -> str:
        return expression(self.start, self.changes)

    def is_held_out(self) -> bool:
        return zlib.crc32(self.expression.encode()) % HELD_OUT_OF == 0


def result(start: int, changes: Sequence[Change]) -> int:
    """What is left after the changes."""
    return start + sum(change.count if change.sign == "+" else -change.count for change in changes)


def expression(start: int, changes: Sequence[Change]) -> str:
    """The changes in Python."""
    return str(start) + "".join(change.sign + change.expression for change in changes)


def sample_problem(rng: random.Random, *, held_out: bool) -> Problem:
    """A problem of training, or a held-out one."""
    while True:
        changes = tuple(_draw_change(rng) for _ in range(rng.choice((1, 2))))
        problem = Problem(rng.choice(NAMES), rng.choice(NOUNS), rng.choice(START), changes)
        results = [result(problem.start, changes[: number + 1]) for number in range(len(changes))]
        if all(one in RESULT for one in results) and problem.is_held_out() == held_out:
            return problem


def _draw_change(rng: random.Random) -> Change:
    sign = rng.choice(SIGNS)
    verb = rng.choice(VERBS[sign])
    if rng.random() < 0.5:
        return Change(sign, verb, rng.choice(ALONE))
    return Change(sign, verb, rng.choice(IN_A_BOX), rng.choice(BOXES))


def train_tasks(seed: int = 0) -> list[dict[str, str]]:
    """Problems of training as tasks {"id", "question", "answer"}."""
    return _tasks("train", seed, count=2000)


def heldout_tasks() -> list[dict[str, str]]:
    """Problems whose programs solve no problem of training. They never change."""
    return _tasks("heldout", 0, count=512)


def _tasks(split: str, seed: int, *, count: int) -> list[dict[str, str]]:
    rng = random.Random(f"{split}/{seed}")
    sampled: dict[str, Problem] = {}
    while len(sampled) < count:
        problem = sample_problem(rng, held_out=split == "heldout")
        sampled.setdefault(problem.question, problem)
    return [
        {"id": f"{split}-{seed}-{number:04}", "question": problem.question, "answer": str(problem.answer)}
        for number, problem in enumerate(sampled.values())
    ]
