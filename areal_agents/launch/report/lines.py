"""Shows a run as lines, for logs and for terminals that cannot redraw; or only what is unusual of it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console

from areal_agents.launch.memory_use import MemoryUse
from areal_agents.launch.progress import RunProgress
from areal_agents.launch.report.changes import ROUTINE, Changes
from areal_agents.launch.report.panel import show_result
from areal_agents.launch.run_folder import RunFolder
from areal_agents.launch.summary import Summary
from areal_agents.launch.waiting import WaitLines


class LineReport:
    """Prints one line for each change; see `Report` for the methods.

    Args:
        quiet: leave out the set-up, the stages, the steps and the evaluations.
    """

    def __init__(self, console: Console, changes: Changes, *, quiet: bool = False) -> None:
        self._console = console
        self._changes = changes
        self._quiet = quiet
        self._started = time.monotonic()
        self._warning: str | None = None
        self.wait = WaitLines(self.stage)

    def __enter__(self) -> LineReport:
        self._started = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def resume(self, rows: Sequence[Mapping[str, Any]], evaluations: Iterable[str]) -> None:
        self._changes.know(rows, evaluations)

    def say(self, text: str) -> None:
        if not self._quiet:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def stage(self, text: str) -> None:
        if not self._quiet:
            self.event(text)

    def event(self, text: str) -> None:
        elapsed = time.monotonic() - self._started
        self._console.print(f"[{elapsed:5.0f} s] {text}", markup=False, highlight=False, soft_wrap=True)

    def warn(self, text: str | None) -> None:
        if (text is None) != (self._warning is None):
            self.event(f"warning: {text}" if text else "the warning no longer applies; the run continues")
        self._warning = text

    def update(
        self, rows: Sequence[Mapping[str, Any]], progress: RunProgress, memory: MemoryUse | None = None
    ) -> None:
        for change in self._changes.since_last(rows, progress):
            if not (self._quiet and change.kind in ROUTINE):
                self.event(change.text)

    def result(self, summary: Summary, folder: RunFolder) -> None:
        show_result(self._console, summary, folder)
