"""Demonstrations of a careful and of a careless student, as examples for imitation."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import tokenizers
from chances import SECOND_CHANCE, opening
from warmup.batches import endless_batches
from warmup.transcripts import Example, Transcriber, as_messages
from word_problems import Problem, Sign, Step, sample_problem

from areal_agents.core.messages import Message

POOL, BATCH = 128, 32  # examples that are sorted by length, and of one batch
HARD_VERBS = ("gets", "uses")  # those that a careless student often reads as their opposites


@dataclass(frozen=True, slots=True)
class Habits:
    """How a student works; the numbers are probabilities."""

    blurt: float = 0.0  # answers without a step, and seldom rightly
    stop_early: float = 0.0  # answers with the result of the first step
    misread_hard: float = 0.0  # adds instead of subtracting, or the reverse, at one of HARD_VERBS
    misread: float = 0.0  # the same at any other verb
    stubborn: float = 0.0  # gives the same reply at the second chance
    mishap: float = 0.0  # the first reply is a careless one, which is shown and not imitated


CAREFUL = Habits(mishap=0.3)
CARELESS = Habits(blurt=0.6, stop_early=0.4, misread_hard=0.35, misread=0.05, stubborn=0.6)
# What the tokenizer is learnt from, and of which the mishaps of a careful student are.
OF_ALL_KINDS = Habits(blurt=0.3, stop_early=0.2, misread_hard=0.65, misread=0.1, stubborn=0.6)


class Student:
    """Solves problems, with the given habits."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        # The user's message after a reply extends the conversation, as with `proxy.reasoning: keep`.
        self._transcriber = Transcriber(tokenizer, [], keeps_history=True)

    @property
    def prefix(self) -> list[int]:
        """The ids that every example starts with: the system prompt."""
        return self._transcriber.prefix(as_messages(opening("a")), as_messages(opening("b")))

    def demonstrate(self, problem: Problem, habits: Habits, rng: random.Random) -> Example:
        """One episode."""
        said, untrained = replies(problem, habits, rng)
        again = [Message("user", SECOND_CHANCE)] * (len(said) - 1)
        first = as_messages(opening(problem.question))
        return self._transcriber.transcribe(first, said, again, untrained=untrained)


def replies(problem: Problem, habits: Habits, rng: random.Random) -> tuple[list[str], set[int]]:
    """What a student says, the second reply only after a wrong first one; and the numbers of mishaps."""
    if rng.random() < habits.mishap:
        return [_wrong_reply(problem, rng), worked(problem.steps)], {0}
    first = _reply(problem, habits, rng)
    if is_right(first, problem):
        return [first], set()
    return [first, first if rng.random() < habits.stubborn else _reply(problem, habits, rng)], set()


def is_right(reply: str, problem: Problem) -> bool:
    """Whether a reply ends with the right answer."""
    return reply.endswith(boxed(problem.answer))


def boxed(answer: int) -> str:
    """The form of an answer."""
    return f"\\boxed{{{answer}}}"


def worked(steps: Sequence[Step]) -> str:
    """The steps, and the result of the last one as the answer."""
    return " ".join([*(f"{step.text}={step.result}" for step in steps), boxed(steps[-1].result)])


def _reply(problem: Problem, habits: Habits, rng: random.Random) -> str:
    if rng.random() < habits.blurt:
        return boxed(_guess(problem, rng))
    steps: list[Step] = []
    for verb, step in zip(problem.verbs, problem.steps, strict=True):
        misreads = rng.random() < (habits.misread_hard if verb in HARD_VERBS else habits.misread)
        read = replace(step, sign=_other(step.sign)) if misreads else step
        steps.append(replace(read, before=steps[0].result) if steps else read)
    return worked(steps[:1] if rng.random() < habits.stop_early else steps)


def _wrong_reply(problem: Problem, rng: random.Random) -> str:
    """A careless reply that is wrong."""
    while True:
        reply = _reply(problem, OF_ALL_KINDS, rng)
        if not is_right(reply, problem):
            return reply


def _guess(problem: Problem, rng: random.Random) -> int:
    """A number near the answer."""
    return max(0, problem.answer + rng.choice((-11, -10, -9, -2, -1, 0, 1, 2, 9, 10, 11)))


def _other(sign: Sign) -> Sign:
    return "-" if sign == "+" else "+"


def batches(
    student: Student, habits: Habits, rng: random.Random, *, held_out: bool = False
) -> Iterator[list[Example]]:
    """Endless batches of examples of similar length, each of a new problem."""

    def sample_pool() -> list[Example]:
        return [student.demonstrate(sample_problem(rng, held_out=held_out), habits, rng) for _ in range(POOL)]

    return endless_batches(sample_pool, rng, size=BATCH)
