"""An agent in the plain OpenAI SDK: write a program, see what it does on the public tests, and repair it.

`areal-agents train config.yaml` trains the model behind it. The reward is the hidden tests of the task, which
run on the last program in a sandbox, where the expected outputs are not.
"""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from areal_agents import Episode, episode
from areal_agents.rewards import ProgramRunner, code_tests, fenced, read_tests
from areal_agents.rewards.code import CodeTest, ProgramRun

PROGRAMS = 3  # replies of an episode
SHOWN = 1000  # characters of an input, of an output or of an error that the policy sees
SYSTEM = (
    "Solve the problem in Python. Reply with the whole program in one ```python block. "
    "If it fails a test, you see what it did, and reply with a better one."
)
NO_PROGRAM = "There is no ```python block in the reply."

HTTP = DefaultAsyncHttpxClient(timeout=600)  # one for all episodes: opening another takes 20 ms
RUNNER = ProgramRunner()
solved = code_tests("tests")  # the reward of config.yaml: 1.0 if every hidden test passes, else 0.0


@episode
async def coder(task: dict, ep: Episode) -> None:
    """Write a program, and repair it while it fails a public test."""
    await converse(task, ep, programs=PROGRAMS)


@episode
async def one_shot(task: dict, ep: Episode) -> None:
    """Write one program, and see no test: what LiveCodeBench measures."""
    await converse(task, ep, programs=1)


async def converse(task: dict[str, Any], ep: Episode, *, programs: int) -> None:
    """Ask for programs, at most so many, until one passes the public tests."""
    client = AsyncOpenAI(base_url=ep.base_url, api_key=ep.api_key, http_client=HTTP)
    messages = opening(task)
    for left in reversed(range(programs)):
        response = await client.chat.completions.create(model="policy", messages=messages)
        reply = response.choices[0].message.content or ""
        if not left or (seen := await tried(task, reply)) is None:
            return
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": seen}]


async def tried(task: dict[str, Any], reply: str) -> str | None:
    """What the policy is told of the program in its reply; None if every public test passes."""
    program = fenced(reply)
    if program is None:
        return NO_PROGRAM
    tests = read_tests(task, "public_tests")
    runs = await RUNNER.run(program, tests, until_failure=True)
    return None if runs[-1].passed else report(len(runs), tests[len(runs) - 1], runs[-1])


def opening(task: dict[str, Any]) -> list[dict[str, str]]:
    """The messages that an episode starts with."""
    if task["starter_code"]:
        form = f"Complete this code:\n```python\n{task['starter_code']}\n```"
    else:
        form = "The program reads standard input and prints the result."
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"{task['question']}\n{form}"},
    ]


def report(number: int, test: CodeTest, run: ProgramRun) -> str:
    """What the policy is told of the test that its program failed."""
    parts = [f"It fails test {number}. Input:", test.input, "Expected:", test.output, "Got:", run.output]
    if run.error:
        parts += ["Error:", run.error]
    return "\n".join(shortened(part.rstrip()) for part in parts)


def shortened(text: str) -> str:
    """The text, or its beginning and its end if it is long."""
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]}\n[…]\n{text[-SHOWN // 2 :]}"
