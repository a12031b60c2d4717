"""Example tasks, as users of Inspect AI write them."""

from __future__ import annotations

import asyncio

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelAPI, ModelOutput, ModelUsage, modelapi
from inspect_ai.scorer import Score, includes, mean, model_graded_qa, scorer
from inspect_ai.solver import generate, solver, use_tools
from inspect_ai.tool import tool
from inspect_ai.util import sandbox


@tool
def add():
    async def execute(x: int, y: int) -> int:
        """Add two numbers.

        Args:
            x: the first number.
            y: the second number.
        """
        return x + y

    return execute


def sums(count: int) -> list[Sample]:
    return [Sample(input=f"What is {n} + {n}?", target=f"{2 * n}.") for n in range(1, count + 1)]


@task
def addition(count: int = 20) -> Task:
    """A solver with a tool, and a scorer."""
    return Task(dataset=sums(count), solver=[use_tools(add()), generate()], scorer=includes())


@solver
def waits():
    async def solve(state, generate):
        await generate(state)
        await asyncio.sleep(3600)
        return state

    return solve


@solver
def fails():
    async def solve(state, generate):
        await generate(state)
        raise ValueError(f"sample {state.sample_id} is broken")

    return solve


@solver
def writes():
    async def solve(state, generate):
        await sandbox().write_file("said", (await generate(state)).output.completion)
        return state

    return solve


@scorer(metrics={"*": [mean()]})
def measures():
    async def score(state, target):
        said = state.output.completion
        return Score(value={"length": len(said), "not_a_number": float("nan"), "words": said})

    return score


@scorer(metrics=[mean()])
def read():
    async def score(state, target):
        return Score(value=(await sandbox().read_file("said")).count("a"))

    return score


@modelapi(name="kind")
class Kind(ModelAPI):
    """A grader that finds every answer correct."""

    async def generate(self, input, tools, tool_choice, config):
        output = ModelOutput.from_content(self.model_name, "GRADE: C")
        output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
        return output


@task
def stuck() -> Task:
    return Task(dataset=sums(2), solver=waits(), scorer=includes())


@task
def broken() -> Task:
    return Task(dataset=sums(2), solver=fails(), scorer=includes())


@task
def measured() -> Task:
    return Task(dataset=sums(2), scorer=[includes(), measures()])


@task
def graded() -> Task:
    return Task(dataset=sums(2), scorer=model_graded_qa())


@task
def files() -> Task:
    return Task(dataset=sums(2), solver=writes(), scorer=read(), sandbox="local")


@task
def unscored() -> Task:
    return Task(dataset=sums(2))
