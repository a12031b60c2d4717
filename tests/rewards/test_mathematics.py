"""Mathematical answers are compared by the real math-verify in separate processes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal_agents.errors import RewardError
from areal_agents.rewards import FinishedEpisode, math_answer, mathematics
from areal_agents.rewards.mathematics import MathChecks

HANGS = r"\boxed{9^{9^{9^{9^9}}}}"


@pytest.fixture(scope="module")
def checks() -> Iterator[MathChecks]:
    found = MathChecks(processes=2, time_s=30)
    yield found
    found.close()


@pytest.mark.parametrize(
    ("answer", "expected", "equal"),
    [
        (r"So the answer is \boxed{\frac{1}{2}}.", "0.5", True),
        (r"\boxed{1/2}", r"\frac{1}{2}", True),
        ("The answer is 12.", "12", True),
        (r"First \boxed{3}, no: \boxed{4}", "4", False),  # two boxes are one answer: two guesses are wrong
        (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", True),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", True),
        (r"\boxed{(1, 2)}", "(2, 1)", False),
        (r"\boxed{12}", "13", False),
        ("I do not know.", "12", False),
        ("", "12", False),
        (r"\boxed{\frac{1}{0}}", "12", False),
    ],
)
def test_answers_are_compared_as_mathematics(
    checks: MathChecks, answer: str, expected: str, equal: bool
) -> None:
    assert checks.equal(answer, expected) is equal


@pytest.mark.parametrize(
    ("answer", "expected", "equal"),
    [
        (r"It is \boxed{1739}, as 347+1392 is 1739.", "1739", True),
        ("347+58*24 = 1739.\nThe answer is: 1739", "1739", True),
        (r"So $347+1392=1739$.", "1739", True),
        (r"\boxed{1{,}739}", "1739", True),
        (r"\boxed{1739}", "1,739", True),
        (r"\boxed{\$1,739.00}", "1739", True),
        (r"\boxed{25 \text{ cm}^2}", "25", True),
        (r"\boxed{x = -5}", "-5", True),
        (r"\boxed 7", "7", True),
        (r"\boxed{347+58*24}", "1739", False),
        (r"\boxed{347+58*24}", "1,739", False),
        (r"\boxed{1739=347+58*24}", "1739", False),
        (r"\boxed{\sum_{i=1}^{1739}1}", "1739", False),
        ("The answer is 347+58*24", "1739", False),
        ("347+58*24\nDone.", "1739", False),  # math-verify searches every line
        (r"\boxed{} $347+58*24$", "1739", False),  # and after an empty box
        (r"\[ \boxed{} = 347+58*24 \]", "1739", False),
        (r"\boxed{2/4}", "0.5", True),  # only a whole number must be worked out
        (r"\boxed{1739}", "1740", False),
        ("", "7", False),
    ],
)
def test_a_calculation_is_not_accepted_if_it_must_be_worked_out(
    checks: MathChecks, answer: str, expected: str, equal: bool
) -> None:
    assert checks.equal(answer, expected, worked_out=True) is equal


def test_the_reward_function_can_require_an_answer_that_is_worked_out() -> None:
    episode = FinishedEpisode(
        "e", {"answer": 42}, ([{"role": "assistant", "content": r"\boxed{6*7}"}],), "finished", {}
    )
    assert math_answer(time_s=30, processes=1)(episode) == 1.0
    assert math_answer(worked_out=True, time_s=30, processes=1)(episode) == 0.0


def test_a_comparison_that_hangs_ends_only_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other comparisons continue in the other process, and the killed process is started again."""
    ask = mathematics._Process.ask

    def ask_in_time(
        process: Any, answer: str, expected: str, worked_out: bool, time_s: float
    ) -> dict[str, Any] | None:
        return ask(process, answer, expected, worked_out, 1.0 if answer == HANGS else time_s)

    monkeypatch.setattr(mathematics._Process, "ask", ask_in_time)
    both = MathChecks(processes=2, time_s=60)
    with ThreadPoolExecutor(2) as threads:  # both processes are started
        assert all(threads.map(lambda n: both.equal(n, n), "12"))
    hanging = threading.Thread(target=lambda: results.append(both.equal(HANGS, "1")))
    results: list[bool] = []
    hanging.start()
    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(lambda n: both.equal(rf"\boxed{{{n}}}", str(n)), range(50)))
    hanging.join(60)
    assert results == [False]
    assert all(both.equal(rf"\boxed{{{n}}}", str(n)) for n in range(4))
    both.close()


def test_the_reward_function_reads_the_field_of_the_task() -> None:
    def episode(text: str, **task: object) -> FinishedEpisode:
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
        return FinishedEpisode("e", task, [messages], "finished", {})

    score = math_answer("solution", processes=1, time_s=30)
    assert score(episode(r"\boxed{7}", solution=7)) == 1.0
    assert score(episode(r"\boxed{8}", solution="7")) == 0.0
    with pytest.raises(RewardError, match="the task has no field 'solution'; it has answer"):
        score(episode("7", answer="7"))
    with pytest.raises(RewardError, match="the task has no field 'solution'"):
        score(episode("7", solution=None))
    with pytest.raises(RewardError, match="cannot read the expected answer ''"):
        score(episode("7", solution=""))
    with pytest.raises(ValueError, match="must be above 0, got 0"):
        math_answer(processes=0)


def test_a_process_that_was_killed_while_idle_is_replaced() -> None:
    checks = MathChecks(processes=1, time_s=30)
    others = _workers_of(os.getpid())
    try:
        assert checks.equal("1", "1")
        (worker,) = _workers_of(os.getpid()) - others
        os.kill(worker, signal.SIGKILL)
        os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
        assert checks.equal("1", "1")
    finally:
        checks.close()


def test_a_comparison_that_hangs_ends_at_its_time_limit_even_without_its_parent() -> None:
    code = (
        "import sys, threading; from areal_agents.rewards.mathematics import MathChecks\n"
        "checks = MathChecks(processes=1, time_s=3); checks.equal('1', '1')\n"
        f"threading.Thread(target=checks.equal, args=({HANGS!r}, '1')).start()\n"
        "print('begun', flush=True); threading.Event().wait()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"begun\n"
        (worker,) = _workers_of(parent.pid)
        handle = os.pidfd_open(worker)
        used = psutil.Process(worker).cpu_times().user
        while psutil.Process(worker).cpu_times().user < used + 0.05:  # until then it may not have begun
            time.sleep(0.01)
        parent.kill()
    try:
        assert select.select([handle], [], [], 60)[0], "it is still running"
    finally:
        os.close(handle)


def _workers_of(parent: int) -> set[int]:
    children = Path(f"/proc/{parent}/task").glob("*/children")
    return {int(pid) for file in children for pid in file.read_text().split()}
