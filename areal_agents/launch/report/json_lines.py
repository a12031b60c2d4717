"""Shows a run as JSON lines, for other programs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, TextIO

from areal_agents.launch.memory_use import MemoryUse
from areal_agents.launch.progress import RunProgress
from areal_agents.launch.report.changes import Changes
from areal_agents.launch.run_folder import RunFolder
from areal_agents.launch.summary import Summary
from areal_agents.launch.waiting import WaitLines

PROGRESS_EVERY_S = 5.0


class JsonReport:
    """Writes one object for each line; see `Report` for the methods.

    Every object has `event`, the name of what happened, and `time`, in seconds since the epoch. Numbers that
    JSON does not have are null, as in metrics.jsonl.

    Args:
        out: where the lines are written.
        steps: the number of steps of the run.
    """

    def __init__(self, out: TextIO, changes: Changes, *, steps: int) -> None:
        self._out = out
        self._changes = changes
        self._steps = steps
        self._warning: str | None = None
        self.wait = WaitLines(self.stage)
        self._progress_at = -PROGRESS_EVERY_S

    def __enter__(self) -> JsonReport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def resume(self, rows: Sequence[Mapping[str, Any]], evaluations: Iterable[str]) -> None:
        self._changes.know(rows, evaluations)

    def say(self, text: str) -> None:
        self._write("setup", text=text)

    def stage(self, text: str) -> None:
        self._write("stage", text=text)

    def event(self, text: str) -> None:
        self._write("notice", text=text)

    def warn(self, text: str | None) -> None:
        if text != self._warning:
            self._write("warning", text=text)
        self._warning = text

    def update(
        self, rows: Sequence[Mapping[str, Any]], progress: RunProgress, memory: MemoryUse | None = None
    ) -> None:
        for change in self._changes.since_last(rows, progress):
            if change.kind == "step":
                self._write("step", steps=self._steps, metrics=change.values)
            else:
                self._write(change.kind, text=change.text, **change.values)
        if time.monotonic() - self._progress_at >= PROGRESS_EVERY_S:
            self._progress_at = time.monotonic()
            values = {name: value for name, value in asdict(progress).items() if name != "held_out"}
            self._write("progress", **values, memory=dict(memory.by_role) if memory else None)

    def result(self, summary: Summary, folder: RunFolder) -> None:
        self._write("result", folder=str(folder.root), summary=asdict(summary), model=str(folder.final_model))

    def _write(self, event: str, **values: Any) -> None:
        line = json.dumps({"event": event, "time": round(time.time(), 3), **values}, allow_nan=False)
        print(line, file=self._out, flush=True)
