"""The live view of a run: a panel that is redrawn on a terminal, and one line per step otherwise."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from areal_agents.launch.progress import HeldOut, RunProgress

BARS = "▁▂▃▄▅▆▇█"
FEWEST_TURNS = 8  # from so many turns on, it is reported that most are constrained
FAILURES_EVERY_S = 15.0  # without a terminal, failures are reported at most this often
LONGEST_FAILURE = 300  # characters of the last failure
PANEL_WIDTH = 100  # at most, in characters
UNREWARDED_S = 10.0  # after this time without a reward, ended episodes are reported


class LiveView:
    """Shows snapshots of a run's progress; used as a context manager, which starts and ends the display."""

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
        self._reported_constrained = False
        self._started = time.monotonic()
        self._stage = "starting"
        self._printed_rows = 0
        self._printed_evals: set[str] = set()
        self._event = ""
        self._failed = 0
        self._failed_line_at = -FAILURES_EVERY_S
        self._unrewarded_since: float | None = None
        self._warning: str | None = None
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> LiveView:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def stage(self, text: str) -> None:
        """Show what the run is doing before the first step."""
        self._stage = text
        if not self._live:
            self._console.print(f"[{self._elapsed():5.0f} s] {text}")

    def event(self, text: str) -> None:
        """Show an event; on a terminal it is shown until the next one."""
        self._event = f"[{self._elapsed():.0f} s] {text}"
        if not self._live:
            self._console.print(f"[{self._elapsed():5.0f} s] {text}", highlight=False, soft_wrap=True)

    def warn(self, text: str | None) -> None:
        """Show a condition that needs the user's attention; None ends it."""
        if not self._live and (text is None) != (self._warning is None):
            line = f"warning: {text}" if text else "the warning no longer applies; the run continues"
            self._console.print(f"[{self._elapsed():5.0f} s] {line}", highlight=False, soft_wrap=True)
        self._warning = text

    def update(self, rows: Sequence[dict[str, Any]], progress: RunProgress) -> None:
        """Show the newest metrics and progress."""
        if self._live:
            self._live.update(self._panel(rows, progress), refresh=True)
            return
        is_constrained = not self._trains_constrained and is_mostly_constrained(progress)
        if is_constrained and not self._reported_constrained:
            self._reported_constrained = True
            self.event(describe_constrained(progress))
        if progress.failed > self._failed and self._elapsed() - self._failed_line_at >= FAILURES_EVERY_S:
            self._failed, self._failed_line_at = progress.failed, self._elapsed()
            self.event(describe_failures(progress))
        self._note_unrewarded(progress)
        if progress.agent_errors and rows[self._printed_rows :]:
            self.event(describe_agent_errors(progress))
        for row in rows[min(self._printed_rows, len(rows)) :]:
            self._console.print(
                f"[{self._elapsed():5.0f} s] {describe_step(row, self._steps)}",
                highlight=False,
                soft_wrap=True,
            )
        self._printed_rows = len(rows)
        for evaluation in progress.held_out:
            if (
                evaluation.done >= self._expected(rows, progress)
                and evaluation.label not in self._printed_evals
            ):
                self._printed_evals.add(evaluation.label)
                line = f"held-out {evaluation.label}: {evaluation.reward:.3f} on {evaluation.done} tasks"
                self._console.print(f"[{self._elapsed():5.0f} s] {line}", highlight=False, soft_wrap=True)

    def _note_unrewarded(self, progress: RunProgress) -> None:
        """Report once, for each time, that episodes have waited for rewards for a while."""
        if not progress.unrewarded:
            self._unrewarded_since = None
        elif self._unrewarded_since is None:
            self._unrewarded_since = self._elapsed()
        elif self._unrewarded_since >= 0 and self._elapsed() - self._unrewarded_since >= UNREWARDED_S:
            self._unrewarded_since = -1.0
            self.event(describe_unrewarded(progress))

    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    def _panel(self, rows: Sequence[dict[str, Any]], progress: RunProgress) -> Panel:
        notes = [Text(self._warning, "bold red")] if self._warning else []
        notes += [Text(self._event, "yellow")] if self._event else []
        notes.append(
            Text(
                f"{self._elapsed():.0f} s · policy version {max(0, progress.version)} · Ctrl-C ends the run",
                "dim",
            )
        )
        return progress_panel(
            self._title,
            rows,
            progress,
            steps=self._steps,
            eval_episodes=self._eval_episodes,
            trains_constrained=self._trains_constrained,
            stage=self._stage,
            notes=notes,
            width=min(PANEL_WIDTH, self._console.width),
        )

    def _expected(self, rows: Sequence[dict[str, Any]], progress: RunProgress) -> int:
        return _expected(rows, progress, self._eval_episodes)


def progress_panel(
    title: str,
    rows: Sequence[dict[str, Any]],
    progress: RunProgress,
    *,
    steps: int,
    eval_episodes: int,
    trains_constrained: bool,
    stage: str,
    notes: Sequence[Text],
    width: int,
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
        body.add_row("reward", f"{rewards[-1]:.3f}  {sparkline(rewards[-40:])}")
        body.add_row("tokens/s", f"{_tokens_per_s(rows):,.0f} sampled and trained")
        body.add_row("staleness", f"mean {rows[-1]['staleness_mean']:.2f}, max {rows[-1]['staleness_max']}")
    else:
        body.add_row("now", stage if progress.version < 0 else "waiting for the first batch")
    for evaluation in progress.held_out:
        expected = _expected(rows, progress, eval_episodes)
        body.add_row(f"held-out {evaluation.label}", _describe_held_out(evaluation, expected))
    counts = progress.groups
    queue = f"{counts.get('complete', 0)} groups ready, {counts.get('pending', 0)} in progress"
    body.add_row("queue", f"{queue}, {counts.get('trained', 0)} trained, {counts.get('dropped', 0)} dropped")
    if progress.unrewarded:
        body.add_row("rewards", describe_unrewarded(progress))
    if progress.failed:
        body.add_row("failures", Text(describe_failures(progress), "red"))
    if progress.agent_errors:
        body.add_row("agent errors", describe_agent_errors(progress))
    return Panel(Group(head, body, *notes), title=title, width=width)


def _expected(rows: Sequence[dict[str, Any]], progress: RunProgress, eval_episodes: int) -> int:
    """Return the expected number of episodes of an evaluation: at most as many as "before" had."""
    before = [evaluation.done for evaluation in progress.held_out if evaluation.label == "before"]
    return min([eval_episodes, *(before if rows else [])])


def _eta(rows: Sequence[dict[str, Any]], steps: int) -> str:
    if len(rows) < 2:
        return ""
    recent = rows[-10:]
    per_step = (recent[-1]["time"] - recent[0]["time"]) / (len(recent) - 1)
    return f"{per_step:.1f} s per step, about {per_step * (steps - rows[-1]['step']):.0f} s left"


def _describe_held_out(evaluation: HeldOut, expected: int) -> str:
    if evaluation.done < expected:
        return f"{evaluation.done}/{expected} episodes"
    return f"[bold]{evaluation.reward:.3f}[/bold]"


def describe_failures(progress: RunProgress) -> str:
    """Return how many training episodes have failed, and why the last one has."""
    count = f"{progress.failed} training episode{'s' if progress.failed > 1 else ''} failed"
    return f"{count}; the last one: {(progress.failure or 'unknown')[:LONGEST_FAILURE]}"


def is_mostly_constrained(progress: RunProgress) -> bool:
    """Whether most of the latest training turns are constrained; False as long as there are few turns."""
    return progress.turns >= FEWEST_TURNS and 2 * progress.constrained > progress.turns


def describe_constrained(progress: RunProgress) -> str:
    """Return how many of the latest training turns are not trained because a grammar constrained them."""
    return (
        f"algorithm.train_constrained is off, and {progress.constrained} of the latest {progress.turns} "
        "turns are constrained, so they are not trained; areal-agents doctor names the agent's setting"
    )


def describe_agent_errors(progress: RunProgress) -> str:
    """Return how many training episodes are scored although their agent raised."""
    return f"{progress.agent_errors} episodes are scored with rollout.agent_error_reward: their agent raised"


def describe_unrewarded(progress: RunProgress) -> str:
    """Return how many episodes wait for a reward, and how to give it."""
    return (
        f"{progress.unrewarded} ended training episodes wait for a reward; post it to /episodes/ID/reward, "
        "or they fail after proxy.reward_timeout_s"
    )


def describe_step(row: dict[str, Any], steps: int) -> str:
    """Return one line about one training step."""
    groups = f"{row['groups_solved_all']}/{row['groups_solved_some']}/{row['groups_solved_none']}"
    return (
        f"step {row['step']:>3}/{steps}  reward {row['reward_mean']:.3f}  groups all/some/none {groups}  "
        f"staleness {row['staleness_mean']:.2f} (max {row['staleness_max']})  "
        f"clip {row['clip_fraction']:.3f}  KL {row['kl_behavior_k3']:.4f}  step {row['step_s']:.1f} s, "
        f"waited {row['wait_s']:.1f} s"
    )


def sparkline(values: Sequence[float]) -> str:
    """Return the values as a row of block characters, scaled between their minimum and maximum."""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in values)


def _tokens_per_s(rows: Sequence[dict[str, Any]]) -> float:
    recent = rows[-6:]
    if len(recent) < 2:
        return 0.0
    seconds = recent[-1]["time"] - recent[0]["time"]
    return sum(row["sampled_tokens"] for row in recent[1:]) / seconds if seconds > 0 else 0.0
