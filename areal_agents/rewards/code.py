"""The reward for programs: the last code block of an answer is run on tests in a sandbox.

A test has the form of LiveCodeBench: {"input", "output", "testtype": "stdin" | "functional"}. The expected
output never enters the sandbox, so a program can print it only by computing it.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from areal_agents.errors import RewardError, SandboxError
from areal_agents.rewards.finished import FinishedEpisode
from areal_agents.rewards.forms import fenced
from areal_agents.sandbox.isolations import IsolationOnFirstUse
from areal_agents.sandbox.sandbox import Finished, Limits, Sandbox, SandboxSpec

_OUTPUT_BYTES = 1 << 22  # a longer output fails the test
_FILE = "solution.py"
# Calls the tested function, which may be a method of a class Solution; the last line has its result.
# Programs for such tests use List and the like without importing them, as the sites of these tasks allow.
_CALL = """
import json, sys
name = sys.argv[1]
arguments = [json.loads(line) for line in sys.stdin.read().splitlines() if line.strip()]
space = {"__name__": "solution"}
exec("from typing import *; from collections import *", space)
exec("from functools import *; from itertools import *", space)
exec("import bisect, heapq, math, random, re, string, sys", space)
exec(compile(open("solution.py").read(), "solution.py", "exec"), space)
function = space.get(name) or getattr(space["Solution"](), name)
print("\\n" + json.dumps(function(*arguments)))
"""


@dataclass(frozen=True, slots=True)
class CodeTest:
    """A test of a program.

    Attributes:
        input: its standard input, or the arguments of the function as JSON, one on each line.
        output: what it prints, or the result of the function as JSON.
        function: the function that is called; "": the program reads standard input.
    """

    input: str
    output: str
    function: str = ""

    @classmethod
    def read(cls, test: Mapping[str, Any], function: str) -> CodeTest:
        """Read a test in the form of LiveCodeBench. Raises RewardError if it has another form.

        Args:
            function: the function that the task names; "": it names none.
        """
        kind = test.get("testtype", "functional" if function else "stdin")
        given, wanted = test.get("input"), test.get("output")
        if kind not in ("stdin", "functional") or not isinstance(given, str) or not isinstance(wanted, str):
            raise RewardError(
                "a test must have input and output, which are strings, and testtype stdin or functional, got "
                f"{dict(test)!r:.200}"
            )
        if kind == "functional" and not function:
            raise RewardError("a functional test needs the name of the function in the task: func_name")
        return cls(given, wanted, function if kind == "functional" else "")

    def passes(self, printed: str) -> bool:
        """Return whether a program that ended well passes with this output.

        White space at the end of lines and of the output does not matter.
        """
        if not self.function:
            return _lines(printed) == _lines(self.output)
        try:
            return bool(json.loads(_last_line(printed)) == json.loads(self.output))
        except (ValueError, RecursionError):  # the program printed it
            return False


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """What a program did on a test.

    Attributes:
        passed: whether it passed.
        output: what it printed, at most the last 4 MiB; of a functional test the line with the result.
        error: why it did not end well, such as the end of its standard error; "" if it did.
    """

    passed: bool
    output: str
    error: str


class ProgramRunner:
    """Runs Python programs on tests, each program in a sandbox of its own.

    An agent uses it to show a policy what its program did, and `code_tests` to reward the program.
    """

    def __init__(
        self,
        *,
        time_s: float = 10.0,
        memory_mb: int = 512,
        isolation: Literal["process", "bubblewrap", "docker"] = "bubblewrap",
        image: str = "",
        python: str = "python3",
    ) -> None:
        """Args:
        time_s: time limit of a test in seconds.
        memory_mb: memory limit of a test in MiB.
        isolation: the kind of sandbox (docs/sandboxes.md).
        image: with docker, the image that has the interpreter.
        python: the interpreter in the sandbox.
        """
        self._time_s = time_s
        self._python = python
        self._sandboxes = IsolationOnFirstUse(isolation)
        self._spec = SandboxSpec(image=image, limits=Limits(memory_mb=memory_mb, processes=64, disk_mb=64))

    async def run(
        self, program: str, tests: Sequence[CodeTest], *, until_failure: bool = False
    ) -> list[ProgramRun]:
        """Run a program on each test, or up to the first that it fails.

        Raises RewardError if no sandbox can be started.
        """
        runs: list[ProgramRun] = []
        try:
            sandbox = await self._sandboxes.start(self._spec)
            try:
                await sandbox.write(_FILE, program.encode(errors="replace"))
                for test in tests:
                    runs.append(await self._run_test(sandbox, test))
                    if until_failure and not runs[-1].passed:
                        break
            finally:
                await sandbox.end()
        except SandboxError as error:
            raise RewardError(f"the sandbox of the tests: {error}") from error
        return runs

    async def _run_test(self, sandbox: Sandbox, test: CodeTest) -> ProgramRun:
        argv = [self._python, _FILE]
        if test.function:
            argv = [self._python, "-c", _CALL, test.function]
        finished = await sandbox.run(
            argv, timeout_s=self._time_s, stdin=test.input.encode(), kept_bytes=_OUTPUT_BYTES
        )
        output = finished.stdout.text()
        error = _failure(finished, self._time_s)
        if test.function:
            output = "" if error else _last_line(output)
        return ProgramRun(not error and test.passes(output), output, error)


def code_tests(
    field: str = "tests",
    *,
    partial: bool = False,
    most: int | None = None,
    time_s: float = 10.0,
    memory_mb: int = 512,
    isolation: Literal["process", "bubblewrap", "docker"] = "bubblewrap",
    image: str = "",
    python: str = "python3",
) -> Callable[[FinishedEpisode], Awaitable[float]]:
    """Return a reward function: 1.0 if the program in the answer passes the tests of the task, else 0.0.

    The program is the last block between ``` fences. It is run as Python.

    Args:
        field: the field of the task with the tests (see `read_tests`).
        partial: the reward is the share of the tests that pass; otherwise the first failure ends it.
        most: only the first `most` tests are run; None: all.
        time_s, memory_mb, isolation, image, python: as in `ProgramRunner`.

    Raises ValueError if `most` is less than 1. The returned function raises RewardError if the tests cannot
    be read, or no sandbox can be started.
    """
    if most is not None and most < 1:
        raise ValueError(f"most must be at least 1, got {most}")
    runner = ProgramRunner(
        time_s=time_s, memory_mb=memory_mb, isolation=isolation, image=image, python=python
    )

    async def score(episode: FinishedEpisode) -> float:
        tests = read_tests(episode.task, field)[:most]
        program = fenced(episode.answer)
        if program is None:
            return 0.0
        runs = await runner.run(program, tests, until_failure=not partial)
        passed = sum(run.passed for run in runs) / len(tests)
        return passed if partial else float(passed == 1)

    return score


def read_tests(task: Mapping[str, Any], field: str = "tests") -> list[CodeTest]:
    """Return the tests of a task.

    Args:
        field: the field with the tests, a list or the JSON of one; `func_name` of the task, or of the task's
            `metadata`, names the function of functional tests.

    Raises RewardError if the field has none, or one in another form.
    """
    given = task.get(field)
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise RewardError(f"the field {field!r} of the task is not JSON: {error}") from None
    if not isinstance(given, Sequence) or not given or not all(isinstance(one, Mapping) for one in given):
        raise RewardError(f"the field {field!r} of the task must be a list of tests, got {given!r:.200}")
    return [CodeTest.read(one, _function(task)) for one in given]


def _function(task: Mapping[str, Any]) -> str:
    """Return the name of the tested function; LiveCodeBench has it in metadata, which is JSON."""
    metadata = task.get("metadata")
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except ValueError:
            metadata = None  # another data set's own
    named = task.get("func_name") or (metadata.get("func_name") if isinstance(metadata, Mapping) else None)
    return str(named or "")


def _failure(finished: Finished, time_s: float) -> str:
    """Return why a program failed: how it ended, or that it printed more than is kept; "" if it did not."""
    if finished.timed_out:
        return f"it was ended after {time_s:g} s"
    if finished.out_of_memory:
        return "it was ended because it used too much memory"
    if finished.status != 0:
        return finished.stderr.text().strip() or f"exit status {finished.status}"
    return "it printed too much" if finished.stdout.is_cut else ""


def _last_line(text: str) -> str:
    return text.rstrip().rpartition("\n")[2]


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
