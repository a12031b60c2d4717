"""The results of a finished run: summary.json, a table, and a plot of the rewards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from areal_agents.launch.progress import HeldOut


@dataclass(frozen=True, slots=True)
class Summary:
    """The results of a run. Idle times are fractions of the training time; rewards are means."""

    heldout_before: float | None
    heldout_after: float | None
    heldout: dict[str, float]
    steps: int
    wall_s: float
    train_s: float
    sampled_tokens: int
    trained_tokens: int
    staleness_mean: float
    staleness_max: int
    versions: int
    trainer_idle: float
    engine_idle: float | None
    pause_s: float
    heldout_without_tool: float | None = None

    @classmethod
    def of(
        cls,
        rows: Sequence[dict[str, Any]],
        held_out: Sequence[HeldOut],
        *,
        wall_s: float,
        engine_idle: float | None,
        without_tool: float | None = None,
    ) -> Summary:
        """Compute the summary from the rows of metrics.jsonl and the evaluations."""
        by_label = {e.label: e.reward for e in held_out if e.done}
        trained = sum(row["tokens"] for row in rows)
        train_s = sum(row["step_s"] for row in rows)
        return cls(
            heldout_before=by_label.get("before"),
            heldout_after=by_label.get("after"),
            heldout=by_label,
            steps=rows[-1]["step"] if rows else 0,
            wall_s=round(wall_s, 1),
            train_s=round(train_s, 1),
            sampled_tokens=sum(row["sampled_tokens"] for row in rows),
            trained_tokens=trained,
            staleness_mean=round(
                sum(row["staleness_mean"] * row["tokens"] for row in rows) / max(1, trained), 3
            ),
            staleness_max=max((row["staleness_max"] for row in rows), default=0),
            versions=rows[-1]["version"] + 1 if rows else 1,
            trainer_idle=round(sum(row["wait_s"] for row in rows) / train_s, 3) if train_s else 0.0,
            engine_idle=None if engine_idle is None else round(engine_idle, 3),
            pause_s=round(sum(row["pause_s"] for row in rows), 3),
            heldout_without_tool=without_tool,
        )

    @classmethod
    def read(cls, path: Path) -> Summary:
        """Read a summary that `write` wrote."""
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        """Write summary.json atomically."""
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self), indent=2) + "\n")
        temporary.replace(path)

    def table(self) -> Table:
        """Return the results as a table for a terminal."""
        table = Table(title="areal-agents: summary of the run", show_header=False)
        table.add_row("held-out reward before", _share(self.heldout_before))
        table.add_row("held-out reward after", f"[bold]{_share(self.heldout_after)}[/bold]")
        if self.heldout_before is not None and self.heldout_after is not None:
            table.add_row("gain", f"[bold green]{self.heldout_after - self.heldout_before:+.3f}[/bold green]")
        if self.heldout_without_tool is not None:
            table.add_row("held-out reward without the tool", _share(self.heldout_without_tool))
        table.add_row("steps, policy versions", f"{self.steps}, {self.versions}")
        table.add_row("wall time", f"{self.wall_s:.0f} s, of which {self.train_s:.0f} s training")
        table.add_row("sampled / trained tokens", f"{self.sampled_tokens:,} / {self.trained_tokens:,}")
        table.add_row("staleness mean / max", f"{self.staleness_mean:.2f} / {self.staleness_max}")
        table.add_row("trainer idle, engine idle", f"{self.trainer_idle:.0%}, {_percent(self.engine_idle)}")
        table.add_row("generation paused for swaps", f"{self.pause_s:.2f} s in total")
        return table


def plot_rewards(rows: Sequence[dict[str, Any]], held_out: Sequence[HeldOut], path: Path) -> None:
    """Plot the reward of the training groups and the held-out reward by step."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(
        [r["step"] for r in rows],
        [r["reward_mean"] for r in rows],
        label="training (sampled)",
        color="#7aa6c2",
    )
    last = rows[-1]["step"] if rows else 0
    points = sorted((_step_of(e.label, last), e.reward) for e in held_out if e.done)
    axes.plot(*zip(*points, strict=True) if points else ([], []), "o-", label="held out", color="#c2542d")
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1) if _is_share(rows, held_out) else None)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    temporary = path.with_suffix(".tmp.png")
    figure.savefig(temporary, dpi=120)
    temporary.replace(path)


def _step_of(label: str, last: int) -> int:
    if label == "before":
        return 0
    return last if label == "after" else int(label.removeprefix("step-"))


def _is_share(rows: Sequence[dict[str, Any]], held_out: Sequence[HeldOut]) -> bool:
    rewards = [row["reward_mean"] for row in rows] + [e.reward for e in held_out]
    return all(0.0 <= reward <= 1.0 for reward in rewards)


def _share(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.0%}"
