"""The progress of a run in a notebook: one panel below the cell, which is replaced until the run ends."""

from __future__ import annotations

import sys
import threading
from collections import deque
from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from areal_agents.config import Config
from areal_agents.errors import ConfigError
from areal_agents.inspection.sources import store_of_run
from areal_agents.launch.progress import MetricsFile, ProgressReader, RunProgress
from areal_agents.launch.report.panel import PANEL_WIDTH, progress_panel
from areal_agents.launch.run_folder import RunFolder
from areal_agents.launch.summary import Summary

REFRESH_S = 1.0
SHOWN_LINES = 4  # of the output, below the progress
STOP_S = 10.0  # longest wait for the refreshing thread


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class NotebookView:
    """The panel of one run.

    Args:
        folder: the folder of the run.
        config: its configuration.
    """

    def __init__(self, folder: RunFolder, config: Config) -> None:
        self._folder = folder
        self._config = config
        self._title = f"areal-agents · {config.name}"
        self._lines: deque[str] = deque(maxlen=SHOWN_LINES)
        self._metrics = MetricsFile(folder.metrics)
        self._ended = threading.Event()
        self._handle: Any = _display(self._panel_of_lines())
        self._refresher = threading.Thread(target=self._refresh, name="notebook view", daemon=True)

    def start(self) -> None:
        """Begin to replace the panel every second."""
        self._refresher.start()

    def line(self, text: str) -> None:
        """Show a line of the run's output below its progress."""
        self._lines.append(text)

    def end(self) -> None:
        """Show the results of the run, or the last lines of a run that has none."""
        self._ended.set()
        self._refresher.join(STOP_S)
        if not self._folder.summary.exists():
            self._handle.update(self._panel_of_lines())
            return
        summary = Summary.read(self._folder.summary)
        table = summary.table()
        table.title = None
        place = Text(f"{summary.model_is}: {self._folder.final_model}", overflow="fold")
        self._handle.update(Panel(Group(table, place), title=self._title, width=PANEL_WIDTH))

    def _refresh(self) -> None:
        while not self._ended.wait(REFRESH_S):
            try:
                with store_of_run(self._folder) as store:
                    progress = ProgressReader(store).read()
            except ConfigError:  # there is no store yet
                self._handle.update(self._panel_of_lines())
                continue
            self._metrics.update()
            self._handle.update(self._panel_of_progress(progress))

    def _panel_of_lines(self) -> Panel:
        text = Text("\n".join(self._lines) or "starting", overflow="fold")
        return Panel(text, title=self._title, width=PANEL_WIDTH)

    def _panel_of_progress(self, progress: RunProgress) -> Panel:
        evaluation = self._config.eval
        return progress_panel(
            self._title,
            self._metrics.rows,
            progress,
            steps=self._config.trainer.steps,
            eval_episodes=evaluation.most_episodes if evaluation else 0,
            trains_constrained=self._config.algorithm.train_constrained,
            stage="starting",
            notes=[Text("\n".join(self._lines), "dim", overflow="fold")],
            width=PANEL_WIDTH,
        )


def _display(panel: Panel) -> Any:
    """Show a panel below the current cell, and return a handle that replaces it."""
    from IPython.display import display

    return display(panel, display_id=True)
