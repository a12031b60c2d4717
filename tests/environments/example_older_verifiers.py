"""An example environment, as users of verifiers 0.3 write it."""

from __future__ import annotations

import verifiers as vf
from datasets import Dataset


async def add(x: int, y: int) -> int:
    """Add two numbers.

    Args:
        x: the first number.
        y: the second number.
    """
    return x + y


async def right(completion, answer) -> float:
    if "raise" in completion[-1]["content"]:
        raise ValueError("this reply cannot be graded")
    return float(answer in completion[-1]["content"])


def load_environment(count: int = 10, held_out: bool = True) -> vf.Environment:
    rows = [{"question": f"What is {n} + {n}?", "answer": f"{2 * n}."} for n in range(1, count + 1)]
    return vf.ToolEnv(
        dataset=Dataset.from_list(rows[2:]),
        eval_dataset=Dataset.from_list(rows[:2]),
        tools=[add],
        max_turns=3,
        rubric=vf.Rubric(funcs=[right]),
    )
