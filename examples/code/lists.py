"""Generated problems, of which each is solved by one line of Python.

A problem names which numbers are chosen, how each is changed, and whether they are summed, listed or sorted.
Its cases tell every program apart that differs in one of these parts.
"""

from __future__ import annotations

import json
import operator
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

AGGREGATES: dict[str, tuple[str, Callable[[list[int]], int | list[int]]]] = {
    "sum": ("sum", sum),
    "list": ("list", list),
    "sorted": ("sorted list", sorted),
}
CONDITIONS: dict[str, tuple[str, Callable[[int, int], bool]]] = {
    "n > {}": ("above {}", operator.gt),
    "n < {}": ("below {}", operator.lt),
    "n >= {}": ("at least {}", operator.ge),
    "n <= {}": ("at most {}", operator.le),
    "n % {} == 0": ("divisible by {}", lambda n, bound: n % bound == 0),
    "n % {} > 0": ("not divisible by {}", lambda n, bound: n % bound > 0),
}
CHANGES: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "n + {}": ("plus {}", operator.add),
    "n - {}": ("minus {}", operator.sub),
    "n * {}": ("times {}", operator.mul),
}
BOUNDS, AMOUNTS = range(3, 10), range(2, 10)
FUNCTION = "def pick(numbers):"
HELD_OUT_OF = 5  # one combination of so many is held out
PUBLIC, HIDDEN = 2, 4  # cases that the policy may see, and further ones for the reward
DRAWS = 50  # of cases, before a problem is given up
LENGTH, LARGEST = 5, 12  # how many numbers a case has, and how large most are


@dataclass(frozen=True, slots=True)
class Problem:
    """What to do with a list of numbers: choose some, change each, and sum or list them."""

    aggregate: str
    condition: str
    bound: int
    change: str
    amount: int
    is_function: bool

    @property
    def question(self) -> str:
        chosen = CONDITIONS[self.condition][0].format(self.bound)
        changed = CHANGES[self.change][0].format(self.amount)
        what = f"the {AGGREGATES[self.aggregate][0]} of the numbers {chosen}, each {changed}."
        return f"Return {what}" if self.is_function else f"Print {what} They are on one line."

    @property
    def starter_code(self) -> str:
        return FUNCTION if self.is_function else ""

    @property
    def expression(self) -> str:
        """The Python expression of the result; `numbers` are the numbers."""
        change, condition = self.change.format(self.amount), self.condition.format(self.bound)
        return f"{self.aggregate}([{change} for n in numbers if {condition}])"

    @property
    def program(self) -> str:
        if self.is_function:
            return f"{FUNCTION}\n    return {self.expression}\n"
        return f"numbers = map(int, input().split())\nprint({self.expression})\n"

    def __call__(self, numbers: list[int]) -> int | list[int]:
        """The result."""
        satisfies, changed = CONDITIONS[self.condition][1], CHANGES[self.change][1]
        chosen = [changed(n, self.amount) for n in numbers if satisfies(n, self.bound)]
        return AGGREGATES[self.aggregate][1](chosen)

    def is_held_out(self) -> bool:
        """Whether its combination of parts is kept from training, in both of its forms."""
        parts = f"{self.aggregate} {self.condition} {self.bound} {self.change} {self.amount}"
        return zlib.crc32(parts.encode()) % HELD_OUT_OF == 0

    def mutants(self) -> Iterator[Problem]:
        """Every problem that differs in one part."""
        for part, choices in (
            ("aggregate", AGGREGATES),
            ("condition", CONDITIONS),
            ("bound", BOUNDS),
            ("change", CHANGES),
            ("amount", AMOUNTS),
        ):
            for choice in choices:
                if choice != getattr(self, part):
                    yield replace(self, **{part: choice})


def sample_problem(rng: random.Random, *, held_out: bool) -> Problem:
    """A problem of training, or a held-out one."""
    while True:
        problem = Problem(
            rng.choice(list(AGGREGATES)),
            rng.choice(list(CONDITIONS)),
            rng.choice(BOUNDS),
            rng.choice(list(CHANGES)),
            rng.choice(AMOUNTS),
            rng.random() < 0.5,
        )
        if problem.is_held_out() == held_out:
            return problem


def sample_cases(problem: Problem, rng: random.Random) -> tuple[list[list[int]], list[list[int]]] | None:
    """The numbers of public and of hidden cases; a program with one wrong part fails one of them.

    None for the few problems that a wrong part leaves as they are, such as the sum of the numbers above 6,
    each minus 6, of which 6 may be one.
    """
    mutants = list(problem.mutants())
    for _ in range(DRAWS):
        cases = [_draw_numbers(problem, rng) for _ in range(PUBLIC + HIDDEN)]
        results = [problem(numbers) for numbers in cases]
        if all(
            any(mutant(numbers) != result for numbers, result in zip(cases, results, strict=True))
            for mutant in mutants
        ):
            return cases[:PUBLIC], cases[PUBLIC:]
    return None


def _draw_numbers(problem: Problem, rng: random.Random) -> list[int]:
    """Numbers, among them some next to the bound and multiples of it, where conditions differ."""
    kinds = (
        lambda: rng.randint(1, LARGEST),
        lambda: problem.bound + rng.randint(-1, 1),
        lambda: problem.bound * rng.randint(1, 3),
    )
    return [rng.choice(kinds)() for _ in range(LENGTH)]


def train_tasks(seed: int = 0) -> list[dict[str, Any]]:
    """The tasks of training."""
    return _tasks("train", seed, count=1000)


def heldout_tasks() -> list[dict[str, Any]]:
    """The tasks of the held-out evaluation, whose combinations no task of training has; always the same."""
    return _tasks("heldout", 0, count=256)


def _tasks(split: str, seed: int, *, count: int) -> list[dict[str, Any]]:
    rng = random.Random(f"{split}/{seed}")
    tasks: dict[str, dict[str, Any]] = {}
    while len(tasks) < count:
        problem = sample_problem(rng, held_out=split == "heldout")
        if problem.question in tasks or (cases := sample_cases(problem, rng)) is None:
            continue
        tasks[problem.question] = task_of(problem, cases, f"{split}-{seed}-{len(tasks):04}")
    return list(tasks.values())


def task_of(problem: Problem, cases: tuple[list[list[int]], list[list[int]]], task_id: str) -> dict[str, Any]:
    """The task of a problem with these public and hidden cases."""
    public, hidden = cases
    return {
        "id": task_id,
        "question": problem.question,
        "starter_code": problem.starter_code,
        "func_name": "pick" if problem.is_function else "",
        "public_tests": [test_of(problem, numbers) for numbers in public],
        "tests": [test_of(problem, numbers) for numbers in (*public, *hidden)],
        "form": "functional" if problem.is_function else "stdin",
        "solution": reply_with(problem.program),
    }


def test_of(problem: Problem, numbers: list[int]) -> dict[str, str]:
    """A case in the form of LiveCodeBench."""
    form = "functional" if problem.is_function else "stdin"
    given = json.dumps(numbers) if problem.is_function else " ".join(map(str, numbers))
    return {"input": given, "output": json.dumps(problem(numbers)), "testtype": form}


def reply_with(program: str) -> str:
    """A reply of the policy that is this program."""
    return f"```python\n{program}```"
