"""Demonstrations of a careful and of a careless programmer, as examples for imitation.

They solve the problems of lists.py in the conversations of coder.py, with its own messages. Their programs
are known to be harmless, so what a program does on a test is found by running it in this process.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import tokenizers
from coder import NO_PROGRAM, PROGRAMS, opening, report
from lists import Problem, reply_with, sample_cases, sample_problem, task_of
from warmup.batches import endless_batches
from warmup.transcripts import Example, Transcriber, as_messages

from areal_agents.core.messages import Message
from areal_agents.rewards import fenced, read_tests
from areal_agents.rewards.code import CodeTest, ProgramRun

POOL, BATCH = 128, 16  # examples that are sorted by length, and of one batch
NEIGHBOURS = {
    "n >= {}": "n > {}",
    "n <= {}": "n < {}",
    "n % {} > 0": "n % {} == 0",
}  # how conditions are misread
UNCHANGED = "n"  # the change that is forgotten


@dataclass(frozen=True, slots=True)
class Habits:
    """How a programmer works; the numbers are probabilities."""

    misread: float = 0.0  # reads a condition of NEIGHBOURS as its neighbour
    forget_change: float = 0.0  # takes the numbers as they are
    leave_unsorted: float = 0.0  # lists where a sorted list is asked for
    no_block: float = 0.0  # writes the program without a block
    stubborn: float = 0.0  # gives the same reply after a failure
    mishap: float = 0.0  # a program before the last is a wrong one, which is shown and not imitated


CAREFUL = Habits(mishap=0.3)
CARELESS = Habits(misread=0.6, forget_change=0.6, leave_unsorted=0.6, no_block=0.1, stubborn=0.6)
# What the tokenizer is learnt from, and of which half of the mishaps of a careful programmer are.
OF_ALL_KINDS = replace(CARELESS, forget_change=0.3, stubborn=0.0)


@dataclass(frozen=True, slots=True)
class Played:
    """What is said in an episode.

    Attributes:
        replies: the replies of the programmer.
        reports: what each reply but the last is answered with.
        untrained: the numbers of the replies that are mishaps.
    """

    replies: list[str]
    reports: list[str]
    untrained: set[int]


class Programmer:
    """Solves problems, with the given habits."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        # The user's message after a reply extends the conversation, as with `proxy.reasoning: keep`.
        self._transcriber = Transcriber(tokenizer, [], keeps_history=True)

    @property
    def prefix(self) -> list[int]:
        """The ids that every example starts with: the system prompt."""
        tasks = ({"question": letter, "starter_code": ""} for letter in "ab")
        return self._transcriber.prefix(*(as_messages(opening(task)) for task in tasks))

    def demonstrate(
        self, problem: Problem, task: dict[str, Any], habits: Habits, rng: random.Random
    ) -> Example:
        """One episode."""
        played = play(problem, task, habits, rng)
        turns = [Message("user", text) for text in played.reports]
        first = as_messages(opening(task))
        return self._transcriber.transcribe(first, played.replies, turns, untrained=played.untrained)


def sample_task(rng: random.Random, *, held_out: bool) -> tuple[Problem, dict[str, Any]]:
    """A problem, and the task with it."""
    while True:
        problem = sample_problem(rng, held_out=held_out)
        if (cases := sample_cases(problem, rng)) is not None:
            return problem, task_of(problem, cases, "demonstrated")


def play(problem: Problem, task: dict[str, Any], habits: Habits, rng: random.Random) -> Played:
    """An episode of a programmer with these habits."""
    replies: list[str] = []
    reports: list[str] = []
    untrained: set[int] = set()
    while True:
        if len(replies) < PROGRAMS - 1 and rng.random() < habits.mishap:
            untrained.add(len(replies))
            replies.append(_wrong_reply(problem, task, rng))
        elif replies and rng.random() < habits.stubborn:
            replies.append(replies[-1])
        else:
            replies.append(_reply(problem, habits, rng))
        if len(replies) == PROGRAMS or (seen := told(task, replies[-1])) is None:
            return Played(replies, reports, untrained)
        reports.append(seen)


def told(task: dict[str, Any], reply: str) -> str | None:
    """What `coder.tried` says of a reply of a programmer, without a sandbox."""
    program = fenced(reply)
    if program is None:
        return NO_PROGRAM
    for number, test in enumerate(read_tests(task, "public_tests"), start=1):
        run = run_here(program, test)
        if not run.passed:
            return report(number, test, run)
    return None


def run_here(program: str, test: CodeTest) -> ProgramRun:
    """What a program of a programmer does on a test."""
    printed: list[Any] = []
    names: dict[str, Any] = {"input": lambda: test.input, "print": printed.append}
    exec(program, names)
    if test.function:
        printed.append(names[test.function](json.loads(test.input)))
    output = json.dumps(printed[-1])
    return ProgramRun(test.passes(output), output, "")


def _reply(problem: Problem, habits: Habits, rng: random.Random) -> str:
    written = problem
    if problem.condition in NEIGHBOURS and rng.random() < habits.misread:
        written = replace(written, condition=NEIGHBOURS[problem.condition])
    if rng.random() < habits.forget_change:
        written = replace(written, change=UNCHANGED)
    if problem.aggregate == "sorted" and rng.random() < habits.leave_unsorted:
        written = replace(written, aggregate="list")
    return written.program if rng.random() < habits.no_block else reply_with(written.program)


def _wrong_reply(problem: Problem, task: dict[str, Any], rng: random.Random) -> str:
    """A reply that fails a public test: of a careless programmer, or with any one part wrong."""
    mutants = list(problem.mutants())
    while True:
        is_careless = rng.random() < 0.5
        reply = _reply(problem, OF_ALL_KINDS, rng) if is_careless else reply_with(rng.choice(mutants).program)
        if told(task, reply) is not None:
            return reply


def batches(
    programmer: Programmer, habits: Habits, rng: random.Random, *, held_out: bool = False
) -> Iterator[list[Example]]:
    """Endless batches of examples of similar length, each of a new problem."""

    def sample_pool() -> list[Example]:
        sampled = (sample_task(rng, held_out=held_out) for _ in range(POOL))
        return [programmer.demonstrate(problem, task, habits, rng) for problem, task in sampled]

    return endless_batches(sample_pool, rng, size=BATCH)
