"""The results of a finished run: summary.json, a table, and a plot of the rewards."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.table import Table

from areal_agents.evaluation.estimators import t_interval
from areal_agents.launch.progress import HeldOut
from areal_agents.whole_files import replacing, write_whole

_SMOOTHED = 5  # steps that are averaged in the plot
_HELD_OUT = ("#c2542d", "#7a4fa3", "#3f8f4f")  # colours of held-out rewards, for each fingerprint


@dataclass(frozen=True, slots=True)
class Summary:
    """The results of a run. Idle times are fractions of `steps_s`; rewards are means.

    Attributes:
        wall_s: seconds of the run, with its evaluations and with the time before each resume.
        steps_s: seconds of all its training steps, from the request for a batch to its published version.
        heldout: the held-out reward of every complete evaluation, by its label.
        heldout_incomplete: the number of episodes of each evaluation that was ended before it was complete.
        nothing_trained: why no token was trained; "" if one was.
        agent_changed: what changed in the agent, its reward or the held-out tasks between the evaluations
            before and after, so that these cannot be compared; "" if nothing did.
        heldout_since_change: if something changed, the first held-out reward that can be compared with the
            one after; None if there is none.
        heldout_since_change_label: the label of that evaluation.
        gain_low, gain_high: the 95% confidence interval of the gain, or of that since the change, paired by
            task; None where none can be computed.
        gain_tasks: the number of held-out tasks that the interval is over.
    """

    heldout_before: float | None
    heldout_after: float | None
    heldout: dict[str, float]
    steps: int
    wall_s: float
    steps_s: float
    sampled_tokens: int
    trained_tokens: int
    staleness_mean: float
    staleness_max: int
    versions: int
    trainer_idle: float
    engine_idle: float | None
    pause_s: float
    heldout_without_tool: float | None = None
    heldout_incomplete: dict[str, int] = field(default_factory=dict)
    nothing_trained: str = ""
    agent_changed: str = ""
    heldout_since_change: float | None = None
    heldout_since_change_label: str = ""
    gain_low: float | None = None
    gain_high: float | None = None
    gain_tasks: int = 0

    @classmethod
    def of(
        cls,
        rows: Sequence[dict[str, Any]],
        held_out: Sequence[HeldOut],
        *,
        wall_s: float,
        engine_idle: float | None,
        without_tool: float | None = None,
        changes: Mapping[str, str] = MappingProxyType({}),
    ) -> Summary:
        """Compute the summary from the rows of metrics.jsonl and the evaluations.

        Args:
            changes: by fingerprint, what had changed when the run was started with it, as a sentence.
        """
        complete = complete_evaluations(held_out)
        agent_changed, base = _base_since_change(complete, changes)
        by_label = {e.label: e.reward for e in complete}
        named = {e.label: e for e in complete}
        differences = _differences(base if agent_changed else named.get("before"), named.get("after"))
        low, high = t_interval(differences) or (None, None)
        trained = sum(row["tokens"] for row in rows)
        steps_s = sum(row["step_s"] for row in rows)
        return cls(
            heldout_before=by_label.get("before"),
            heldout_after=by_label.get("after"),
            heldout=by_label,
            steps=rows[-1]["step"] if rows else 0,
            wall_s=round(wall_s, 1),
            steps_s=round(steps_s, 1),
            sampled_tokens=sum(row["sampled_tokens"] for row in rows),
            trained_tokens=trained,
            staleness_mean=round(
                sum(row["staleness_mean"] * row["tokens"] for row in rows) / max(1, trained), 3
            ),
            staleness_max=max((row["staleness_max"] for row in rows), default=0),
            versions=rows[-1]["version"] + 1 if rows else 1,
            trainer_idle=round(sum(row["wait_s"] for row in rows) / steps_s, 3) if steps_s else 0.0,
            engine_idle=None if engine_idle is None else round(engine_idle, 3),
            pause_s=round(sum(row["pause_s"] for row in rows), 3),
            heldout_without_tool=without_tool,
            heldout_incomplete={e.label: e.done for e in held_out if e not in complete},
            nothing_trained="" if trained or not rows else _why_nothing(rows),
            agent_changed=agent_changed,
            heldout_since_change=None if base is None else base.reward,
            heldout_since_change_label="" if base is None else base.label,
            gain_low=low,
            gain_high=high,
            gain_tasks=len(differences),
        )

    @classmethod
    def read(cls, path: Path) -> Summary:
        """Read a summary that `write` wrote."""
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        """Write summary.json atomically."""
        write_whole(path, json.dumps(asdict(self), indent=2) + "\n")

    @property
    def gain(self) -> float | None:
        """The held-out reward after minus the one before; None if these cannot be compared."""
        if self.heldout_before is None or self.heldout_after is None or self.agent_changed:
            return None
        return self.heldout_after - self.heldout_before

    @property
    def model_is(self) -> str:
        """What the exported model is: the trained one, or the initial one if nothing was trained."""
        return "the initial model, untrained" if self.nothing_trained else "trained model"

    def table(self) -> Table:
        """Return the results as a table for a terminal."""
        table = Table(title="areal-agents: summary of the run", show_header=False)
        table.add_row("held-out reward before", _share(self.heldout_before))
        table.add_row("held-out reward after", f"[bold]{_share(self.heldout_after)}[/bold]")
        if self.gain is not None:
            table.add_row("gain", f"[bold green]{self.gain:+.3f}[/bold green]{self._certainty()}")
        elif self.agent_changed:
            table.add_row("[bold yellow]gain not comparable[/bold yellow]", self.agent_changed)
            if self.heldout_since_change is not None and self.heldout_after is not None:
                since = self.heldout_after - self.heldout_since_change
                label = self.heldout_since_change_label
                table.add_row(
                    "gain since the change",
                    f"[bold green]{since:+.3f}[/bold green] (from {self.heldout_since_change:.3f}, {label})"
                    f"{self._certainty()}",
                )
        if self.heldout_without_tool is not None:
            table.add_row("held-out reward without the tool", _share(self.heldout_without_tool))
        if self.heldout_incomplete:
            ended = ", ".join(
                f"{label} after {done} episodes" for label, done in self.heldout_incomplete.items()
            )
            table.add_row("evaluations that were ended early", ended)
        if self.nothing_trained:
            table.add_row("[bold red]nothing was trained[/bold red]", self.nothing_trained)
        table.add_row("steps, policy versions", f"{self.steps}, {self.versions}")
        table.add_row("wall time", f"{self.wall_s:.0f} s, of which {self.steps_s:.0f} s steps")
        table.add_row("sampled / trained tokens", f"{self.sampled_tokens:,} / {self.trained_tokens:,}")
        table.add_row("staleness mean / max", f"{self.staleness_mean:.2f} / {self.staleness_max}")
        table.add_row("trainer idle, engine idle", f"{self.trainer_idle:.0%}, {_percent(self.engine_idle)}")
        table.add_row("generation paused for swaps", f"{self.pause_s:.2f} s in total")
        return table

    def _certainty(self) -> str:
        """Return how sure the gain is, as the end of its line."""
        if self.gain_low is None or self.gain_high is None:
            if not self.gain_tasks:  # the scores of tasks are not known
                return ""
            alike = f"the scores of all {self.gain_tasks} tasks changed by the same amount"
            why = "there is one task" if self.gain_tasks == 1 else alike
            return f" (no interval: {why})"
        text = f" (95% interval over {self.gain_tasks} tasks: {self.gain_low:+.3f} to {self.gain_high:+.3f}"
        if self.gain_low <= 0 <= self.gain_high:
            text += ", which includes 0; evaluate more tasks to be sure (eval.episodes)"
        return f"{text})"


def _differences(first: HeldOut | None, last: HeldOut | None) -> list[float]:
    """Return by how much the score of each task that both evaluations have changed."""
    if first is None or last is None:
        return []
    after = dict(last.scores)
    return [after[task] - score for task, score in first.scores if task in after]


def complete_evaluations(held_out: Sequence[HeldOut]) -> list[HeldOut]:
    """Return the evaluations with as many episodes as the largest one; the others were ended early."""
    most = max((e.done for e in held_out), default=0)
    return [e for e in held_out if e.done and e.done == most]


def comparable(first: HeldOut, second: HeldOut) -> bool:
    """Whether two evaluations were played with the same agent, reward and tasks, as far as is recorded."""
    return not first.fingerprint or not second.fingerprint or first.fingerprint == second.fingerprint


def _base_since_change(complete: Sequence[HeldOut], changes: Mapping[str, str]) -> tuple[str, HeldOut | None]:
    """Return what changed between the evaluations before and after, and the first one since that change."""
    by_label = {e.label: e for e in complete}
    before, after = by_label.get("before"), by_label.get("after")
    if before is None or after is None or comparable(before, after):
        return "", None
    base = next((e for e in complete if e.label != "after" and e.fingerprint == after.fingerprint), None)
    return changes.get(after.fingerprint, "the agent changed"), base


def _why_nothing(rows: Sequence[dict[str, Any]]) -> str:
    """Return why none of these steps trained a token, and what to change."""
    some = sum(row["groups_solved_some"] for row in rows)
    if some == 0:
        return (
            "all episodes of each group had the same reward, so there was nothing to prefer; the model is "
            "the initial one. Check the reward, choose tasks that are sometimes solved, or raise "
            "rollout.group_size"
        )
    return (
        f"{some} groups had different rewards, but none of their turns can be trained; the model is the "
        "initial one. See constrained turns and exclude_labels in docs/algorithms.md, and logs/trainer.log"
    )


def plot_rewards(rows: Sequence[dict[str, Any]], held_out: Sequence[HeldOut], path: Path) -> None:
    """Plot the reward of the training groups and the held-out reward by step."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps, rewards = [r["step"] for r in rows], [r["reward_mean"] for r in rows]
    axes.plot(steps, rewards, label="training (sampled)", color="#c5d9e6")
    axes.plot(steps, _smoothed(rewards), label=f"training, mean of {_SMOOTHED} steps", color="#3b7ea6")
    last = rows[-1]["step"] if rows else 0
    done = [e for e in held_out if e.done]
    for number, fingerprint in enumerate(dict.fromkeys(e.fingerprint for e in done) or [""]):
        # A line joins only what can be compared.
        points = sorted(
            (step_of_label(e.label, last), e.reward) for e in done if e.fingerprint == fingerprint
        )
        label = "held out" if number == 0 else f"held out, after change {number} of the agent"
        axes.plot(
            *zip(*points, strict=True) if points else ([], []),
            "o-",
            label=label,
            color=_HELD_OUT[number % len(_HELD_OUT)],
        )
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1) if _is_share(rows, held_out) else None)
    axes.set_title(f"Reward of {path.resolve().parent.name}")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")


def _smoothed(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and of those before it, at most `_SMOOTHED` in all."""
    windows = (values[max(0, end - _SMOOTHED) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


def step_of_label(label: str, last: int) -> int:
    """Return the step of an evaluation; `last` is the last step of its run."""
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
