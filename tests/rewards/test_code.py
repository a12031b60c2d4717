"""Programs are rewarded by tests in a sandbox, in the formats of LiveCodeBench."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from typing import Any

import pytest

from areal_agents.errors import RewardError
from areal_agents.rewards import FinishedEpisode, ProgramRunner, code_tests, read_tests

ISOLATION = "bubblewrap" if shutil.which("bwrap") else "process"
# The interpreter of the tests may be in a folder that bubblewrap does not show; /usr/bin has one.
PYTHON = "python3" if ISOLATION == "bubblewrap" else sys.executable
STDIN = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}, {"input": "5 5", "output": "10"}]
CALLS = [{"input": "[3, 1, 2]\n2", "output": "[1, 2]", "testtype": "functional"}]
ADDS = "a, b = map(int, input().split())\nprint(a + b, ' ')\n\n"
CHEATS = """
import glob, re, sys
places = ["/proc/self/environ", *glob.glob("/proc/[0-9]*/cmdline"), *glob.glob("*"), *glob.glob("/tests/*")]
texts = [sys.stdin.read()]
for place in places:
    try:
        texts.append(open(place, errors="replace").read())
    except OSError:
        pass
print(*re.findall("secret-[0-9a-f]+", " ".join(texts))[:1])
"""
METHOD = (
    "class Solution:\n    def least(self, xs: List[int], n: int) -> List[int]:\n"
    "        print('noise')\n        return sorted(xs)[:n]"
)


def episode(program: str | None, **task: Any) -> FinishedEpisode:
    text = "I cannot." if program is None else f"Like this:\n```python\n{program}\n```\n"
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
    return FinishedEpisode("e", task, [messages], "finished", {})


def scoring(**settings: Any) -> Callable[[FinishedEpisode], Any]:
    return code_tests(isolation=ISOLATION, python=PYTHON, **{"time_s": 20, **settings})


async def test_programs_pass_all_tests_or_none() -> None:
    score = scoring()
    assert await score(episode(ADDS, tests=STDIN)) == 1.0
    assert await score(episode(ADDS, tests=json.dumps(STDIN))) == 1.0
    assert await score(episode("print(3)", tests=STDIN)) == 0.0
    assert await score(episode("print(3); raise SystemExit(1)", tests=STDIN[:1])) == 0.0
    assert await score(episode(None, tests=STDIN)) == 0.0
    assert await score(episode("def f(:", tests=STDIN)) == 0.0
    assert await score(episode("\ud800", tests=STDIN)) == 0.0
    assert await scoring(partial=True)(episode("print(3)", tests=STDIN)) == 0.5
    assert await scoring(most=1)(episode("print(3)", tests=STDIN)) == 1.0


async def test_functions_are_called_with_the_arguments() -> None:
    score = scoring()
    assert await score(episode(METHOD, tests=CALLS, func_name="least")) == 1.0
    named = json.dumps({"func_name": "least"})
    assert await score(episode("def least(xs, n): return sorted(xs)[:n]", tests=CALLS, metadata=named)) == 1.0
    assert await score(episode("def least(xs, n): return xs", tests=CALLS, func_name="least")) == 0.0
    assert await score(episode("def other(xs, n): return xs", tests=CALLS, func_name="least")) == 0.0


async def test_a_run_reports_the_output_and_the_error_of_a_program() -> None:
    """An agent can show the policy the output, the error, and the result of a function by itself."""
    runner = ProgramRunner(isolation=ISOLATION, python=PYTHON, time_s=20)
    right, wrong = await runner.run("print(3)", read_tests({"tests": STDIN}))
    assert (right.passed, wrong.passed) == (True, False)
    assert (wrong.output, wrong.error) == ("3\n", "")
    (fails,) = await runner.run("x", read_tests({"tests": STDIN}), until_failure=True)
    assert not fails.passed and fails.error.endswith("NameError: name 'x' is not defined")
    called = read_tests({"tests": CALLS, "func_name": "least"})
    (run,) = await runner.run("def least(xs, n):\n    print('noise')\n    return xs", called)
    assert (run.passed, run.output) == (False, "[3, 1, 2]")
    quick = ProgramRunner(isolation=ISOLATION, python=PYTHON, time_s=1)
    (endless,) = await quick.run("while True: pass", read_tests({"tests": STDIN[:1]}))
    assert endless.error == "it was ended after 1 s"


async def test_a_program_cannot_read_the_expected_output() -> None:
    """A program that looks for the expected output everywhere finds it in its input only."""
    secret, score = "secret-4f1c", scoring()
    assert await score(episode(CHEATS, tests=[{"input": secret, "output": secret}])) == 1.0
    assert await score(episode(CHEATS, tests=[{"input": "1", "output": secret}])) == 0.0


async def test_programs_without_an_end_or_a_readable_output_fail() -> None:
    assert await scoring(time_s=1)(episode("while True: pass", tests=STDIN)) == 0.0
    assert await scoring()(episode("print('x' * (1 << 23))", tests=STDIN)) == 0.0
    nested = "def least(xs, n):\n    print('[' * 100_000)\n    raise SystemExit(0)"
    assert await scoring()(episode(nested, tests=CALLS, func_name="least")) == 0.0


@pytest.mark.parametrize(
    ("task", "fault"),
    [
        ({}, "the field 'tests' of the task must be a list of tests, got None"),
        ({"tests": "{"}, "the field 'tests' of the task is not JSON"),
        ({"tests": []}, "must be a list of tests"),
        ({"tests": [{"input": 1, "output": "2"}]}, "input and output, which are strings"),
        ({"tests": [{"input": "1", "output": "2", "testtype": "x"}]}, "testtype stdin or functional"),
        ({"tests": CALLS}, "needs the name of the function in the task: func_name"),
    ],
)
async def test_invalid_tests_are_refused_with_the_reason(task: dict[str, Any], fault: str) -> None:
    with pytest.raises(RewardError, match=fault):
        await scoring()(episode(ADDS, **task))
