"""What a run shows of itself, in the form that the user chose."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from rich.console import Console

from areal_agents.config import Config
from areal_agents.launch.memory_use import MemoryUse
from areal_agents.launch.progress import RunProgress
from areal_agents.launch.report.changes import Changes
from areal_agents.launch.report.json_lines import JsonReport
from areal_agents.launch.report.lines import LineReport
from areal_agents.launch.report.panel import PanelReport
from areal_agents.launch.run_folder import RunFolder
from areal_agents.launch.summary import Summary

Form = Literal["auto", "quiet", "json"]


class Report(Protocol):
    """Shows a run. As a context manager it surrounds the time in which the processes of the run live."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def resume(self, rows: Sequence[Mapping[str, Any]], evaluations: Iterable[str]) -> None:
        """Take rows of metrics.jsonl and labels of evaluations as shown by an earlier start of the run."""

    def say(self, text: str) -> None:
        """Show a line about how the run is set up."""

    def stage(self, text: str) -> None:
        """Show what the run is doing before its first step."""

    def wait(self, what: str, waited_s: float, limit_s: float) -> None:
        """Show that the run waits before its first step; see `OnWait`."""

    def event(self, text: str) -> None:
        """Show something unusual that happened: a restart, a server that does not answer."""

    def warn(self, text: str | None) -> None:
        """Show a condition that needs the user's attention, until it is replaced; None ends it."""

    def update(
        self, rows: Sequence[Mapping[str, Any]], progress: RunProgress, memory: MemoryUse | None = None
    ) -> None:
        """Show the newest rows of metrics.jsonl, progress, and memory of the processes."""

    def result(self, summary: Summary, folder: RunFolder) -> None:
        """Show the results of the run."""


def report_of(config: Config, console: Console, form: Form) -> Report:
    """Return the report of a run in the chosen form.

    Args:
        console: where panel and lines are written.
        form: "auto" is a panel on a terminal and lines elsewhere, "quiet" only what is unusual and the
            results, and "json" one object for each line of standard output.
    """
    changes = Changes(
        steps=config.trainer.steps,
        eval_episodes=config.eval.most_episodes if config.eval else 0,
        trains_constrained=config.algorithm.train_constrained,
    )
    if form == "json":
        return JsonReport(sys.stdout, changes, steps=config.trainer.steps)
    if form == "auto" and console.is_terminal:
        return PanelReport(
            console,
            title=f"areal-agents · {config.name}",
            steps=config.trainer.steps,
            eval_episodes=config.eval.most_episodes if config.eval else 0,
            trains_constrained=config.algorithm.train_constrained,
        )
    return LineReport(console, changes, quiet=form == "quiet")
