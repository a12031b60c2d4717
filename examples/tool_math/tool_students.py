"""Demonstrations of a careful student, who computes with Python, and of a careless one."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import tokenizers
from calculating import opening
from number_problems import Change, Problem, Sign, expression, result, sample_problem
from python_tool import PRINTED_NOTHING, PYTHON_TOOL
from warmup.batches import endless_batches
from warmup.transcripts import Example, Transcriber, as_messages, call_text

from areal_agents.core.messages import Message

POOL, BATCH = 128, 32  # examples that are sorted by length, and of one batch
HARD_VERBS = ("gets", "uses")  # those that a careless student often reads as their opposites


@dataclass(frozen=True, slots=True)
class Habits:
    """How a student works: probabilities, and what it guesses."""

    blurt: float = 0.0  # answers without a step, and seldom rightly
    in_head: float = 0.0  # writes the steps instead of a program, with a wrong carry
    picks: bool = False  # a guess is a number of the problem, and not one near the answer
    misread_hard: float = 0.0  # adds instead of subtracting, or the reverse, at one of HARD_VERBS
    misread: float = 0.0  # the same at any other verb
    forget_print: float = 0.0  # writes a program that prints nothing, and then answers without another one
    miscopy: float = 0.0  # gets a digit of the printed number wrong
    mishap: float = 0.0  # the first program prints nothing, which is shown and not imitated; then a right one


CAREFUL = Habits(mishap=0.2)
CARELESS = Habits(
    blurt=0.5, in_head=0.15, picks=True, misread_hard=0.4, misread=0.05, forget_print=0.25, miscopy=0.1
)
# What the tokenizer is learnt from.
OF_ALL_KINDS = Habits(blurt=0.2, in_head=0.2, misread_hard=0.4, misread=0.05, forget_print=0.25, miscopy=0.15)


@dataclass(slots=True)
class Work:
    """What a student writes, what the tool says to each reply but the last, and which replies are mishaps."""

    replies: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    mishaps: set[int] = field(default_factory=set)


class Student:
    """Solves problems, with the given habits."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._transcriber = Transcriber(tokenizer, [PYTHON_TOOL])

    @property
    def prefix(self) -> list[int]:
        """The ids that every example starts with: the instructions and the tool."""
        return self._transcriber.prefix(as_messages(opening("a")), as_messages(opening("b")))

    def demonstrate(self, problem: Problem, habits: Habits, rng: random.Random) -> Example:
        """One episode."""
        done = work(problem, habits, rng)
        told = [Message("tool", text) for text in done.told]
        first = as_messages(opening(problem.question))
        return self._transcriber.transcribe(first, done.replies, told, untrained=done.mishaps)


def work(problem: Problem, habits: Habits, rng: random.Random) -> Work:
    """How a student solves a problem."""
    chance = rng.random()
    if chance < habits.blurt:
        return Work([boxed(_guess(problem, habits, rng))])
    if chance < habits.blurt + habits.in_head:
        return Work([_in_head(problem, rng)])
    changes = [_read(change, habits, rng) for change in problem.changes]
    if rng.random() < habits.forget_print:
        answer = boxed(_guess(problem, habits, rng))
        return Work([call(expression(problem.start, changes)), answer], [PRINTED_NOTHING])
    done = Work()
    if rng.random() < habits.mishap:
        done = Work([call(problem.expression)], [PRINTED_NOTHING], {0})
    printed = result(problem.start, changes)
    copied = _miscopied(printed, rng) if rng.random() < habits.miscopy else printed
    done.replies += [call(f"print({expression(problem.start, changes)})"), boxed(copied)]
    done.told.append(str(printed))
    return done


def call(code: str) -> str:
    """How the model calls the tool."""
    return call_text(PYTHON_TOOL["function"]["name"], {"code": code})


def boxed(answer: int) -> str:
    """The form of an answer."""
    return f"\\boxed{{{answer}}}"


def _in_head(problem: Problem, rng: random.Random) -> str:
    """The steps, with a wrong carry in the last one."""
    steps = []
    value = problem.start
    for number, change in enumerate(problem.changes, start=1):
        if change.boxes is not None:
            steps.append(f"{change.expression}={change.count}")
        after = result(problem.start, problem.changes[:number])
        if number == len(problem.changes):
            after += rng.choice((-100, -10, 10, 100))
        steps.append(f"{value}{change.sign}{change.count}={after}")
        value = after
    return " ".join([*steps, boxed(value)])


def _read(change: Change, habits: Habits, rng: random.Random) -> Change:
    misreads = rng.random() < (habits.misread_hard if change.verb in HARD_VERBS else habits.misread)
    return replace(change, sign=_other(change.sign)) if misreads else change


def _other(sign: Sign) -> Sign:
    return "-" if sign == "+" else "+"


def _guess(problem: Problem, habits: Habits, rng: random.Random) -> int:
    if habits.picks:
        return rng.choice([problem.start, *(change.amount for change in problem.changes)])
    return problem.answer + rng.choice((-90, -11, -10, -9, -1, 1, 9, 10, 11, 90))


def _miscopied(number: int, rng: random.Random) -> int:
    """The number with one of its last two digits changed."""
    return number + rng.choice((-1, 1)) * rng.choice((1, 10))


def batches(
    student: Student, habits: Habits, rng: random.Random, *, held_out: bool = False, by_length: bool = True
) -> Iterator[list[Example]]:
    """Endless batches of examples, each of a new problem; `by_length` as in `endless_batches`."""

    def sample_pool() -> list[Example]:
        return [student.demonstrate(sample_problem(rng, held_out=held_out), habits, rng) for _ in range(POOL)]

    return endless_batches(sample_pool, rng, size=BATCH, by_length=by_length)


def texts(problem: Problem, habits: Habits, rng: random.Random) -> Sequence[str]:
    """What the policy reads and writes in an episode."""
    done = work(problem, habits, rng)
    return [problem.question, *done.replies, *done.told]
