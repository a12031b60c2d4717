"""Comparisons of mathematical answers per second, alone and beside one that hangs."""

from __future__ import annotations

import json as jsonlib
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TypeAlias

from rich.console import Console

from areal_agents.errors import RewardError
from areal_agents.rewards.mathematics import MathChecks

PROCESSES, LIMIT_S = 2, 5.0  # the defaults of `math_answer`
COUNT = 4000
HANGS = r"\boxed{9^{9^{9^{9^9}}}}"
GROUP = 8  # attempts at each task; the first half is right, and the others are wrong in different ways
# Answers as models write them, and the expected ones; {n} is a number.
Forms: TypeAlias = Sequence[tuple[str, str]]
NUMBERS: Forms = [
    (r"So the answer is \boxed{{{n}}}.", "{n}"),
    ("The answer is {n}", "{n}"),
    (r"Hence \boxed{{\frac{{{n}}}{{8}}}}", r"\frac{{{n}}}{{8}}"),
    (r"We get \boxed{{{n}.50}} dollars", "{n}.5"),
    (r"\boxed{{\${n}}}", "{n}"),
]
EXPRESSIONS: Forms = [
    (r"\boxed{{{n}\sqrt{{3}}}}", r"{n}\sqrt{{3}}"),
    (r"\boxed{{({n}, 7)}}", r"({n},7)"),
    (r"\boxed{{x^2+{n}x+1}}", r"x^2+{n}x+1"),
]


@dataclass(frozen=True, slots=True)
class MathFigures:
    """Figures of `MathChecks` with PROCESSES processes and a limit of LIMIT_S seconds.

    Attributes:
        count: how many comparisons each speed is measured with.
        numbers_per_s: comparisons of NUMBERS per second.
        expressions_per_s: the same of EXPRESSIONS.
        beside_hanging_per_s: the same of NUMBERS while one comparison hangs, from its start to the end of the
            others.
        hanging_s: the time until the one that hangs was answered with False.
    """

    count: int
    numbers_per_s: float
    expressions_per_s: float
    beside_hanging_per_s: float
    hanging_s: float


def measure_math(count: int = COUNT, *, limit_s: float = LIMIT_S) -> MathFigures:
    """Compare answers, first alone and then beside one that hangs.

    Raises:
        RewardError: an answer was judged wrongly.
    """
    checks = MathChecks(processes=PROCESSES, time_s=limit_s)
    numbers, expressions = ([_pair(forms, n) for n in range(count)] for forms in (NUMBERS, EXPRESSIONS))
    again = [
        _pair(NUMBERS, count + n) for n in range(count)
    ]  # others, since math-verify keeps what it has read
    try:
        _compare(checks, numbers[:2] * 8)  # starts the processes
        of_numbers, of_expressions = _compare(checks, numbers), _compare(checks, expressions)
        ended: list[float] = []

        def hang() -> None:
            began = time.perf_counter()
            if checks.equal(HANGS, "1"):
                raise RewardError(f"{HANGS} was taken for 1")
            ended.append(time.perf_counter() - began)

        hanging = threading.Thread(target=hang)
        hanging.start()
        beside = _compare(checks, again)
        hanging.join()
    finally:
        checks.close()
    if not ended:
        raise RewardError("the comparison that hangs was not answered")
    return MathFigures(
        count=count,
        numbers_per_s=round(count / of_numbers, 1),
        expressions_per_s=round(count / of_expressions, 1),
        beside_hanging_per_s=round(count / beside, 1),
        hanging_s=round(ended[0], 2),
    )


def run(*, json: bool) -> MathFigures:
    """Measure, print and return the figures."""
    figures = measure_math()
    if json:
        print(jsonlib.dumps(asdict(figures)))
    else:
        console = Console()
        for name, value in asdict(figures).items():
            console.print(f"{name:24} {value}")
    return figures


def _pair(forms: Forms, number: int) -> tuple[str, str, bool]:
    """Return an answer, the expected one, and whether they are equal."""
    task, attempt = divmod(number, GROUP)
    answer, expected = forms[task % len(forms)]
    n = 101 + task
    is_right = attempt < GROUP // 2
    return answer.format(n=n if is_right else n + 1000 * attempt), expected.format(n=n), is_right


def _compare(checks: MathChecks, pairs: Sequence[tuple[str, str, bool]]) -> float:
    """Compare pairs, and return the seconds. Raises RewardError if one is judged wrongly."""

    def check(pair: tuple[str, str, bool]) -> None:
        answer, expected, equal = pair
        if checks.equal(answer, expected) is not equal:
            raise RewardError(f"{answer} and {expected} were {'not ' if equal else ''}taken for equal")

    began = time.perf_counter()
    with ThreadPoolExecutor(2 * PROCESSES) as threads:
        list(threads.map(check, pairs))
    return time.perf_counter() - began
