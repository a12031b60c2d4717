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
        is_hasty: tries any expression, and not one whose value is near the target.
        gives_up: answers with an expression although it has just found that the value is wrong.
        leaves_out: leaves out the last term of a sum.
        creeps: guesses the next number, in place of one in the middle of those that are left.
    """

    is_hasty: float = 0.0
    gives_up: float = 0.0
    leaves_out: float = 0.0
    creeps: float = 0.0


CAREFUL = Habits()
CARELESS = Habits(is_hasty=0.9, gives_up=0.8, leaves_out=0.6, creeps=0.65)
MIXED = Habits(gives_up=0.65, leaves_out=0.6, creeps=0.65)  # what the tokenizer reads, whatever CARELESS is


@dataclass(frozen=True, slots=True)
class Try:
    """An expression of three numbers: how it is computed in two steps, how it is written, and its value."""

    steps: str
    expression: str
    value: int


@cache
def tries(numbers: tuple[int, ...]) -> tuple[Try, ...]:
    """Every expression of three numbers whose two results are from 1 to 99."""
    found = []
    for first in range(3):
        for second in range(3):
            if first == second:
                continue
            a, b, c = numbers[first], numbers[second], numbers[3 - first - second]
            for operator, result in (("+", a + b), ("*", a * b), ("-", a - b)):
                if (operator != "-" and first > second) or not 0 < result <= _LARGEST:
                    continue
                inner = f"({a}{operator}{b})"
                for then, outer, value in (
                    (f"{result}+{c}", f"{inner}+{c}", result + c),
                    (f"{result}*{c}", f"{inner}*{c}", result * c),
                    (f"{result}-{c}", f"{inner}-{c}", result - c),
                    (f"{c}-{result}", f"{c}-{inner}", c - result),
                ):
                    if 0 < value <= _LARGEST:
                        steps = f"{a}{operator}{b}={result} {then}={value}\n"
                        found.append(Try(steps, outer, value))
    return tuple(found)


def countdown_reply(task: Countdown, habits: Habits, rng: random.Random) -> str:
    """Try expressions, those near the target first, and answer with the one that is right."""
    left = list(tries(task.numbers))
    written = ""
    for number in range(MOST_TRIES):
        if habits.is_hasty and rng.random() < habits.is_hasty:
            chosen = rng.choice(left)
        else:
            chosen = rng.choices(left, [1 / (3 + abs(one.value - task.target)) for one in left])[0]
        left.remove(chosen)
        written += chosen.steps
        ends = chosen.value == task.target or not left or number == MOST_TRIES - 1
        if ends or rng.random() < habits.gives_up:
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
    """

    text: str
    determined: frozenset[int]


def random_block(rng: random.Random) -> Block:
    """Three numbers with some expressions of them, or a sum."""
    if rng.random() < 0.25:
        terms = tuple(rng.randint(1, 9) * rng.choice((1, -1)) for _ in range(4))
        written = sum_reply(Sum("", (abs(terms[0]), *terms[1:])), CAREFUL, rng)
        return Block(written[: written.index("\n") + 1], frozenset(range(2, 3 * (len(terms) - 1), 3)))
    while True:
        numbers = tuple(rng.randint(1, 20) for _ in range(3))
        if known := tries(numbers):
            lines = [rng.choice(known).steps for _ in range(rng.randint(1, 4))]
            return Block(
                f"{', '.join(map(str, numbers))}\n{''.join(lines)}",
                frozenset(3 + number for number in determined_in(len(lines))),
            )


def determined_in(lines: int) -> list[int]:
    """Which of the six numbers in each line of countdown follow: both results, and the fifth, which is either
    the number that is left or the result, whichever the fourth is not."""
    return [6 * line + number for line in range(lines) for number in (2, 4, 5)]


def _answer(text: str) -> str:
    return f"<answer>{text}</answer>"
