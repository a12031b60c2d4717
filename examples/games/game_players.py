"""Demonstrations of playing, careful or careless: the replies of one game each."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

from game_tasks import Countdown, Guessing, Sum

MOST_TRIES = 10  # at countdown
_LARGEST = 99  # no number that is written is larger, so each is one token


@dataclass(frozen=True, slots=True)
class Habits:
    """How a demonstrator behaves; the numbers are probabilities.

    Attributes:
        hasty: tries any expression, and not one whose value is near the target, at each try.
        gives_up: answers in this game with the first expression that it tries, whatever its value; otherwise
            it tries until it finds one that is right.
        leaves_out: leaves out the last term of a sum.
        creeps: guesses the next number, in place of one in the middle of those that are left.
    """

    hasty: float = 0.0
    gives_up: float = 0.0
    leaves_out: float = 0.0
    creeps: float = 0.0


CAREFUL = Habits()
CARELESS = Habits(hasty=0.9, gives_up=0.7, leaves_out=0.6, creeps=0.85)
MIXED = Habits(gives_up=0.65, leaves_out=0.6, creeps=0.65)  # what the tokenizer reads, whatever CARELESS is


@dataclass(frozen=True, slots=True)
class Try:
    """An expression of three numbers: how it is computed in two steps, how it is written, and its value."""

    steps: str
    expression: str
    value: int

    def line(self, target: int) -> str:
        """The steps, and whether their value is less than the target, equal to it, or more."""
        sign = "<" if self.value < target else "=" if self.value == target else ">"
        return f"{self.steps}{sign}{target}\n"


@cache
def tries(numbers: tuple[int, ...]) -> tuple[Try, ...]:
    """Every sum and difference of three numbers whose two results are from 1 to 99."""
    found = []
    for first in range(3):
        for second in range(3):
            if first == second:
                continue
            a, b, c = numbers[first], numbers[second], numbers[3 - first - second]
            for operator, result in (("+", a + b), ("-", a - b)):
                if (operator == "+" and first > second) or not 0 < result <= _LARGEST:
                    continue
                inner = f"({a}{operator}{b})"
                for then, outer, value in (
                    (f"{result}+{c}", f"{inner}+{c}", result + c),
                    (f"{result}-{c}", f"{inner}-{c}", result - c),
                    (f"{c}-{result}", f"{c}-{inner}", c - result),
                ):
                    if 0 < value <= _LARGEST:
                        steps = f"{a}{operator}{b}={result} {then}={value}"
                        found.append(Try(steps, outer, value))
    return tuple(found)


def countdown_reply(task: Countdown, habits: Habits, rng: random.Random) -> str:
    """Try expressions, those near the target first, and answer with the one that is right."""
    left = list(tries(task.numbers))
    written = ""
    most = 1 if rng.random() < habits.gives_up else MOST_TRIES
    for _ in range(most):
        if habits.hasty and rng.random() < habits.hasty:
            chosen = rng.choice(left)
        else:
            chosen = rng.choices(left, [1 / (3 + abs(one.value - task.target)) for one in left])[0]
        left.remove(chosen)
        written += chosen.line(task.target)
        if chosen.value == task.target or not left:
            break
    return f"{written}{_answer(chosen.expression)}"


def sum_reply(task: Sum, habits: Habits, rng: random.Random) -> str:
    """Add the terms one by one."""
    terms = task.terms[:-1] if rng.random() < habits.leaves_out else task.terms
    total, steps = terms[0], []
    for term in terms[1:]:
        steps.append(f"{total}{term:+}={total + term}")
        total += term
    return f"{' '.join(steps)}\n{_answer(str(total))}"


def guessing_game(game: Guessing, habits: Habits, rng: random.Random) -> tuple[list[str], list[str]]:
    """The replies of a game, and what is read after each but the last."""
    low, high = game.least, game.most
    guess = low - 1
    replies: list[str] = []
    read: list[str] = []
    while True:
        if rng.random() < habits.creeps:
            guess = min(max(guess + 1, low), high)
        else:
            third = (high - low) // 3
            guess = rng.randint(low + third, high - third)
        replies.append(f"{low} to {high} [{guess}]")
        game.guess(replies[-1])
        if game.news is None:
            return replies, read
        read.append(game.news)
        if "higher" in game.news:
            low = guess + 1
        elif "lower" in game.news:
            high = guess - 1


@dataclass(frozen=True, slots=True)
class Block:
    """Lines of arithmetic as replies have them.

    Attributes:
        determined: which of the numbers, counted from 0, follow from what is written before them.
        given: the characters that a task gives; what follows them is written by the player.
    """

    text: str
    determined: frozenset[int]
    given: int


def random_block(rng: random.Random) -> Block:
    """Three numbers with some expressions of them, or a sum."""
    if rng.random() < 0.25:
        terms = tuple(rng.randint(1, 9) * rng.choice((1, -1)) for _ in range(4))
        written = sum_reply(Sum("", (abs(terms[0]), *terms[1:])), CAREFUL, rng)
        text = written[: written.index("\n") + 1]
        return Block(text, frozenset(range(2, 3 * (len(terms) - 1), 3)), len(text))
    while True:
        numbers = tuple(rng.randint(1, 20) for _ in range(3))
        if known := tries(numbers):
            target = rng.choice(known).value if rng.random() < 0.8 else rng.randint(1, 30)
            lines = [rng.choice(known).line(target) for _ in range(rng.randint(1, 4))]
            head = f"{target}: {', '.join(map(str, numbers))}\n"
            return Block(
                head + "".join(lines),
                frozenset(4 + number for number in determined_in(len(lines))),
                len(head),
            )


def determined_in(lines: int) -> list[int]:
    """Which of the seven numbers in each line of countdown follow: both results, the fifth, which is either
    the number that is left or the result, whichever the fourth is not, and the target."""
    return [7 * line + number for line in range(lines) for number in (2, 4, 5, 6)]


def _answer(text: str) -> str:
    return f"<answer>{text}</answer>"
