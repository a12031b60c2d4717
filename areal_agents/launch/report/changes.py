"""Finds what is new in a run since the last look: steps, evaluations, failures, rewards that are missing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from areal_agents.health.rules import findings
from areal_agents.launch.progress import RunProgress
from areal_agents.launch.report.describe import (
    describe_agent_errors,
    describe_constrained,
    describe_failures,
    describe_held_out,
    describe_step,
    describe_unrewarded,
    expected_episodes,
    is_mostly_constrained,
)

FAILURES_EVERY_S = 15.0  # failures are reported at most this often
UNREWARDED_S = 10.0  # after this time without a reward, ended episodes are reported

Kind = Literal["step", "held_out", "failures", "constrained", "unrewarded", "agent_errors", "health"]
ROUTINE: tuple[Kind, ...] = ("step", "held_out")  # what a run reports even if all is well


@dataclass(frozen=True, slots=True)
class Change:
    """Something new: its kind, the sentence for a reader, and the values for a program."""

    kind: Kind
    text: str
    values: Mapping[str, Any]


class Changes:
    """Compares each snapshot of a run with the ones before; each change is found once.

    Args:
        steps: the number of steps of the run.
        eval_episodes: the number of episodes of an evaluation.
        trains_constrained: whether constrained turns are trained on.
        now: the time in seconds.
    """

    def __init__(
        self,
        *,
        steps: int,
        eval_episodes: int,
        trains_constrained: bool,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps, self._eval_episodes = steps, eval_episodes
        self._trains_constrained = trains_constrained
        self._now = now
        self._reported_constrained = False
        self._rows = 0
        self._evaluations: set[str] = set()
        self._failed, self._failed_at = 0, -FAILURES_EVERY_S
        self._unrewarded_since: float | None = None
        self._reported_unrewarded = False
        self._findings: set[str] = set()

    def know(self, rows: Sequence[Mapping[str, Any]], evaluations: Iterable[str]) -> None:
        """Take the rows and the labels of the evaluations of an earlier start as found already."""
        self._rows = len(rows)
        self._evaluations = set(evaluations)
        self._findings = {finding.name for finding in findings(rows)}

    def since_last(self, rows: Sequence[Mapping[str, Any]], progress: RunProgress) -> Iterator[Change]:
        """Yield what is new in the rows of metrics.jsonl and in the store."""
        is_constrained = not self._trains_constrained and is_mostly_constrained(progress)
        if is_constrained and not self._reported_constrained:
            self._reported_constrained = True
            counts = {"constrained": progress.constrained, "turns": progress.turns}
            yield Change("constrained", describe_constrained(progress), counts)
        if progress.failed > self._failed and self._now() - self._failed_at >= FAILURES_EVERY_S:
            self._failed, self._failed_at = progress.failed, self._now()
            values = {"failed": progress.failed, "last": progress.failure}
            yield Change("failures", describe_failures(progress), values)
        yield from self._unrewarded(progress)
        new = rows[min(self._rows, len(rows)) :]
        self._rows = len(rows)
        if progress.agent_errors and new:
            values = {"episodes": progress.agent_errors}
            yield Change("agent_errors", describe_agent_errors(progress), values)
        for row in new:
            yield Change("step", describe_step(row, self._steps), row)
        if new:
            found = {finding.name: finding for finding in findings(rows)}
            for name in sorted(found.keys() - self._findings):
                finding = found[name]
                values = {"condition": name, "seen": finding.text, "fix": finding.fix}
                yield Change("health", str(finding), values)
            self._findings = set(found)
        for evaluation in progress.held_out:
            expected = expected_episodes(rows, progress, self._eval_episodes)
            if evaluation.done >= expected and evaluation.label not in self._evaluations:
                self._evaluations.add(evaluation.label)
                values = {name: value for name, value in asdict(evaluation).items() if name != "scores"}
                yield Change("held_out", describe_held_out(evaluation), values)

    def _unrewarded(self, progress: RunProgress) -> Iterator[Change]:
        """Report once, for each time, that episodes have waited for rewards for a while."""
        if not progress.unrewarded:
            self._unrewarded_since, self._reported_unrewarded = None, False
            return
        if self._unrewarded_since is None:
            self._unrewarded_since = self._now()
        elif not self._reported_unrewarded and self._now() - self._unrewarded_since >= UNREWARDED_S:
            self._reported_unrewarded = True
            yield Change("unrewarded", describe_unrewarded(progress), {"episodes": progress.unrewarded})
