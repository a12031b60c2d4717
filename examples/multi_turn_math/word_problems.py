"""Word problems in two steps, such as "Ann has 34 pens, buys 17, then loses 8. How many pens are left?"

A fifth of the sums and differences (34+17 is one) is held out. A problem of training needs none of them, a
held-out problem consists of them, so its answer cannot be remembered.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from typing import Literal

Sign = Literal["+", "-"]
VERBS: dict[Sign, tuple[str, ...]] = {
    "+": ("buys", "finds", "wins", "gets"),
    "-": ("sells", "loses", "uses", "breaks"),
}
SIGNS: tuple[Sign, ...] = ("+", "-")
NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ida", "Jon", "Kim", "Leo")
NOUNS = (
    "pens",
    "cups",
    "nuts",
    "caps",
    "bells",
    "balls",
    "lamps",
    "coins",
    "plates",
    "stamps",
    "tiles",
    "boxes",
)
START = range(10, 90)
AMOUNT = range(3, 60)
RESULT = range(10, 100)
HELD_OUT_OF = 5  # one sum of so many is held out


@dataclass(frozen=True, slots=True)
class Step:
    """A sum or a difference."""

    before: int
    sign: Sign
    amount: int

    @property
    def result(self) -> int:
        return self.before + self.amount if self.sign == "+" else self.before - self.amount

    @property
    def text(self) -> str:
        return f"{self.before}{self.sign}{self.amount}"

    def is_held_out(self) -> bool:
        return zlib.crc32(self.text.encode()) % HELD_OUT_OF == 0


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem whose second step begins with the result of the first."""

    question: str
    verbs: tuple[str, str]  # the word for each step
    steps: tuple[Step, Step]

    @property
    def answer(self) -> int:
        return self.steps[1].result


def sample_problem(rng: random.Random, *, held_out: bool) -> Problem:
    """A problem of training, or one of which both steps are held out."""
    first = _draw_step(rng, rng.choice(START), held_out=held_out)
    second = None
    while first is None or second is None:
        first = _draw_step(rng, rng.choice(START), held_out=held_out)
        second = first and _draw_step(rng, first.result, held_out=held_out)
    name, noun = rng.choice(NAMES), rng.choice(NOUNS)
    verbs = rng.choice(VERBS[first.sign]), rng.choice(VERBS[second.sign])
    question = (
        f"{name} has {first.before} {noun}, {verbs[0]} {first.amount}, then {verbs[1]} {second.amount}. "
        f"How many {noun} are left?"
    )
    return Problem(question, verbs, (first, second))


def _draw_step(rng: random.Random, before: int, *, held_out: bool) -> Step | None:
    """A step that begins with `before`, or None if the one that was sampled is of the other split."""
    step = Step(before, rng.choice(SIGNS), rng.choice(AMOUNT))
    return step if step.result in RESULT and step.is_held_out() == held_out else None


def train_tasks(seed: int = 0) -> list[dict[str, str]]:
    """Problems of training as tasks {"id", "question", "answer"}."""
    return _tasks("train", seed, count=2000)


def heldout_tasks() -> list[dict[str, str]]:
    """Problems of sums that no problem of training needs. They never change."""
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
