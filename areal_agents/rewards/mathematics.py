"""The reward for mathematical answers, which math-verify compares in separate processes.

A comparison that hangs or needs too much memory ends at its own time limit with its own process. It delays
other comparisons only as far as it occupies one of the processes.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import queue
import select
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from areal_agents.errors import RewardError
from areal_agents.rewards.finished import FinishedEpisode

_FREE_S = 600.0  # longest wait until another comparison has ended
_START_S = 120.0  # importing sympy takes many seconds on a busy machine


def math_answer(
    field: str = "answer", *, worked_out: bool = False, time_s: float = 5.0, processes: int = 2
) -> Callable[[FinishedEpisode], float]:
    """Return a reward function: 1.0 if the answer is mathematically equal to a field of the task, else 0.0.

        score = math_answer()       # 0.5, 1/2 and \\frac{1}{2} are equal

    The answer is the content of \\boxed{} in the last reply, or else its last number or expression. Several
    boxes are one answer with several parts, so two guesses are wrong. A comparison that takes longer than
    `time_s` counts as unequal. It needs math-verify (extra `rewards`).

    Args:
        field: the field of the task with the expected answer, a string or a number.
        worked_out: where the expected answer is a whole number, an answer that is a calculation is wrong:
            347+58*24 is equal to 1739 for math-verify, so a policy could earn the reward and compute nothing.
        time_s: time limit of a comparison in seconds.
        processes: how many comparisons run at the same time.

    The returned function raises RewardError if math-verify is not installed, or cannot read the expected
    answer.
    """
    checks = MathChecks(processes=processes, time_s=time_s)

    def score(episode: FinishedEpisode) -> float:
        if episode.task.get(field) is None:
            raise RewardError(f"the task has no field {field!r}; it has {', '.join(map(str, episode.task))}")
        return float(checks.equal(episode.answer, str(episode.task[field]), worked_out=worked_out))

    return score


class MathChecks:
    """Processes that compare answers, each started when it is first needed. Thread-safe.

    It is for agents that look at an answer before the episode ends; `equal` waits, so an async agent calls
    it by `asyncio.to_thread`.
    """

    def __init__(self, *, processes: int = 2, time_s: float = 5.0) -> None:
        """Args are those of `math_answer`. Raises ValueError if one is not above 0."""
        if processes < 1 or not time_s > 0:
            raise ValueError(f"processes and time_s must be above 0, got {processes} and {time_s}")
        self._time_s = time_s
        self._idle: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(processes):
            self._idle.put(None)
        atexit.register(self.close)

    def equal(self, answer: str, expected: str, *, worked_out: bool = False) -> bool:
        """Return whether an answer equals the expected one; False if the comparison exceeds its time.

        Args:
            worked_out: see `math_answer`.

        Raises RewardError if the expected answer cannot be read, no process can be started, or none becomes
        free within 10 minutes.
        """
        try:
            process = self._idle.get(timeout=_FREE_S)
        except queue.Empty:
            raise RewardError(
                f"no process was free for a comparison within {_FREE_S:g} s; give math_answer more processes"
            ) from None
        try:
            if process is not None and process.has_ended:  # it was killed while it compared nothing
                process.end()
                process = None
            if process is None:
                process = _Process()
            found = process.ask(answer, expected, worked_out, self._time_s)
            if found is None:  # it hangs, or its process has died of it
                process.end()
                process = None
                return False
            if "error" in found:
                raise RewardError(found["error"])
            return bool(found["equal"])
        finally:
            self._idle.put(process)

    def close(self) -> None:
        """End the processes that compare nothing at present; they are started again when needed."""
        ended = 0
        with contextlib.suppress(queue.Empty):  # another thread may take the last one
            while True:
                process = self._idle.get_nowait()
                ended += 1
                if process is not None:
                    process.end()
        for _ in range(ended):
            self._idle.put(None)


class _Process:
    """A process that compares one pair of answers at a time."""

    def __init__(self) -> None:
        """Start the process. Raises RewardError if it does not start."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "areal_agents.rewards.mathematics_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # an interrupt of the terminal is not meant for it
        )
        ready = self._line(_START_S)
        if ready is None or "ready" not in ready:
            self.end()
            raise RewardError((ready or {}).get("error", "the process that compares answers did not start"))

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def ask(self, answer: str, expected: str, worked_out: bool, time_s: float) -> dict[str, Any] | None:
        """Return the result for a pair; None if the process died or did not answer in time."""
        assert self._process.stdin is not None
        pair = {"answer": answer, "expected": expected, "worked_out": worked_out, "time_s": time_s}
        try:
            self._process.stdin.write(json.dumps(pair).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        return self._line(time_s)

    def end(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):  # a pair that it has not read is lost with it
                stream.close()

    def _line(self, time_s: float) -> dict[str, Any] | None:
        """Return the next line of the process; None if it has ended or wrote none in time.

        The process writes a line as a whole, so reading one does not wait.
        """
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], time_s)
        line = self._process.stdout.readline() if readable else b""
        return json.loads(line) if line else None
