"""Shows a run as one panel, which is redrawn on a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from areal_agents.health.rules import findings
from areal_agents.launch.memory_use import MemoryUse
from areal_agents.launch.progress import RunProgress
from areal_agents.launch.report.describe import (
    describe_agent_errors,
    describe_constrained,
    describe_duration,
    describe_failures,
    describe_memory,
    describe_unrewarded,
    expected_episodes,
    is_mostly_constrained,
    sparkline,
)
from areal_agents.launch.run_folder import RunFolder
from areal_agents.launch.summary import Summary
from areal_agents.launch.waiting import describe_wait

PANEL_WIDTH = 100  # at most, in characters
WAIT_DRAWN_S = 1.0  # between two drawings of how long a wait has been
SHOWN_VALUES = 40  # the latest values of a sparkline


class PanelReport:
    """Redraws the panel at each update; see `Report` for the methods."""

    def __init__(
        self,
        console: Console,
        *,
        title: str,
        steps: int,
        eval_episodes: int,
        trains_constrained: bool = False,
    ) -> None:
        self._console = console
        self._title = title
        self._steps = steps
        self._eval_episodes = eval_episodes
        self._trains_constrained = trains_constrained
        self._started = time.monotonic()
        self._stage = "starting"
        self._event = ""
        self._warning: str | None = None
        self._live = Live(console=console, auto_refresh=False)
        self._rows: Sequence[Mapping[str, Any]] = ()
        self._progress = RunProgress(-1, {})
        self._memory: MemoryUse | None = None
        self._wait_drawn_at = 0.0

    def __enter__(self) -> PanelReport:
        self._started = time.monotonic()
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def resume(self, rows: Sequence[Mapping[str, Any]], evaluations: Iterable[str]) -> None:
        """The panel shows the whole run."""

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def stage(self, text: str) -> None:
        self._stage = text
        self._draw()

    def wait(self, what: str, waited_s: float, limit_s: float) -> None:
        if time.monotonic() - self._wait_drawn_at >= WAIT_DRAWN_S:
            self._wait_drawn_at = time.monotonic()
            self.stage(describe_wait(what, waited_s, limit_s))

    def event(self, text: str) -> None:
        self._event = f"[{self._elapsed():.0f} s] {text}"

    def warn(self, text: str | None) -> None:
        self._warning = text

    def update(
        self, rows: Sequence[Mapping[str, Any]], progress: RunProgress, memory: MemoryUse | None = None
    ) -> None:
        self._rows, self._progress, self._memory = rows, progress, memory
        self._draw()

    def _draw(self) -> None:
        notes = [Text(f"warning: {self._warning}", "bold red")] if self._warning else []
        notes += [Text(self._event, "yellow")] if self._event else []
        notes.append(Text(f"{describe_duration(self._elapsed())} · Ctrl-C ends the run", "dim"))
        panel = progress_panel(
            self._title,
            self._rows,
            self._progress,
            steps=self._steps,
            eval_episodes=self._eval_episodes,
            trains_constrained=self._trains_constrained,
            stage=self._stage,
            memory=self._memory,
            notes=notes,
            width=min(PANEL_WIDTH, self._console.width),
        )
        self._live.update(panel, refresh=True)

    def result(self, summary: Summary, folder: RunFolder) -> None:
        show_result(self._console, summary, folder)

    def _elapsed(self) -> float:
        return time.monotonic() - self._started


def show_result(console: Console, summary: Summary, folder: RunFolder) -> None:
    """Print the results of a run."""
    console.print(summary.table())
    console.print(
        f"{summary.model_is}: {folder.final_model}\nsummary: {folder.summary}, {folder.reward_plot}",
        soft_wrap=True,
    )


def progress_panel(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    progress: RunProgress,
    *,
    steps: int,
    eval_episodes: int,
    trains_constrained: bool,
    stage: str,
    notes: Sequence[Text],
    width: int,
    memory: MemoryUse | None = None,
) -> Panel:
    """Return a panel that shows the progress of a run.

    Args:
        title: the title of the panel.
        rows: the rows of metrics.jsonl so far.
        progress: a snapshot of the store of the run.
        steps: the number of steps of the run.
        eval_episodes: the number of episodes of an evaluation.
        trains_constrained: whether constrained turns are trained on.
        stage: what the run is doing before its first version.
        notes: lines below the progress.
        width: the width of the panel in characters.
        memory: the memory of the processes; None: it is not shown.
    """
    step = rows[-1]["step"] if rows else 0
    head = Table.grid(padding=(0, 1))
    head.add_row(
        f"step {step}/{steps}", ProgressBar(total=steps, completed=step, width=40), _eta(rows, steps)
    )
    body = Table.grid(padding=(0, 2))
    body.add_column(style="dim")
    body.add_column()
    if not trains_constrained and is_mostly_constrained(progress):
        body.add_row("not trained", Text(describe_constrained(progress), "red"))
    if rows:
        rewards = [row["reward_mean"] for row in rows]
        body.add_row("reward", f"[bold]{rewards[-1]:.3f}[/bold]  {sparkline(rewards[-SHOWN_VALUES:])}")
    else:
        body.add_row("now", Text(stage if progress.version < 0 else "waiting for the first batch"))
    if progress.held_out:
        body.add_row("held-out", _held_out(rows, progress, eval_episodes))
    body.add_row("tokens/s", _tokens_per_s(rows, progress))
    if rows:
        last = rows[-1]
        body.add_row("staleness", f"mean {last['staleness_mean']:.2f}, max {last['staleness_max']}")
        body.add_row("idle", _idle(last))
    counts = progress.groups
    queue = f"{counts.get('complete', 0)} groups ready, {counts.get('pending', 0)} in progress"
    body.add_row("queue", f"{queue}, {counts.get('trained', 0)} trained, {counts.get('dropped', 0)} dropped")
    if progress.published_at is not None:
        body.add_row("weights", _last_swap(rows, progress))
    if memory is not None and memory.by_role:
        peak = rows[-1].get("device_memory_peak") if rows else None
        body.add_row("memory", describe_memory(memory.by_role, memory.total, peak))
    for finding in findings(rows):
        body.add_row(finding.name, Text(str(finding), "red"))
    if progress.unrewarded:
        body.add_row("rewards", describe_unrewarded(progress))
    if progress.failed:
        body.add_row("failures", Text(describe_failures(progress), "red"))
    if progress.agent_errors:
        body.add_row("agent errors", describe_agent_errors(progress))
    return Panel(Group(head, body, *notes), title=title, width=width)


def _eta(rows: Sequence[Mapping[str, Any]], steps: int) -> str:
    if len(rows) < 2:
        return ""
    recent = rows[-10:]
    per_step = (recent[-1]["time"] - recent[0]["time"]) / (len(recent) - 1)
    left = describe_duration(per_step * (steps - rows[-1]["step"]))
    return f"{per_step:.1f} s per step, about {left} left"


def _held_out(rows: Sequence[Mapping[str, Any]], progress: RunProgress, eval_episodes: int) -> str:
    """Return the complete evaluations as a curve, and how far the running one is."""
    expected = expected_episodes(rows, progress, eval_episodes)
    complete = [evaluation for evaluation in progress.held_out if evaluation.done >= expected]
    parts = []
    if complete:
        rewards = [evaluation.reward for evaluation in complete]
        curve = f"  {sparkline(rewards[-SHOWN_VALUES:])}  from {rewards[0]:.3f}" if len(rewards) > 1 else ""
        parts.append(f"[bold]{rewards[-1]:.3f}[/bold] ({complete[-1].label}){curve}")
    for evaluation in progress.held_out:
        if evaluation.done < expected and evaluation is progress.held_out[-1]:
            parts.append(f"{evaluation.label}: {evaluation.done}/{expected} episodes")
    return " · ".join(parts)


def _tokens_per_s(rows: Sequence[Mapping[str, Any]], progress: RunProgress) -> str:
    engine = f"engine {progress.sampled_tokens_per_s:,.0f} sampled"
    computed = rows[-1]["tokens_per_s"] if rows else None
    return engine if computed is None else f"{engine} · trainer {computed:,.0f} while it computes"


def _idle(row: Mapping[str, Any]) -> str:
    shares = {"trainer": row["trainer_idle"], "engine": row["rollout_idle"]}
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share is not None) or "—"


def _last_swap(rows: Sequence[Mapping[str, Any]], progress: RunProgress) -> str:
    assert progress.published_at is not None
    ago = describe_duration(max(0.0, time.time() - progress.published_at))
    pause = rows[-1]["pause_s"] if rows else None
    paused = "" if pause is None else f", which paused generation for {pause:.2f} s"
    return f"version {progress.version}, published {ago} ago{paused}"
