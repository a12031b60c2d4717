"""`areal-agents simulate`: reads parameters, simulates, and reports the results as text, JSON and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from areal_agents.simulate.loop import SimulationResult, simulate
from areal_agents.simulate.parameters import Parameters, read_parameters
from areal_agents.simulate.sizing import Split, bounds, fastest, splits, synchronous, with_split
from areal_agents.simulate.trace import Trace, read_trace
from areal_agents.simulate.work import Work
from areal_agents.whole_files import replacing

WORK = ("tokens", "turns", "tool_s")


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """The simulated runs.

    Attributes:
        parameters: the parameters of the best split.
        gpus: the number of GPUs that were split.
        best: the fastest split of `tried`.
        tried: the simulated splits.
        synchronous: the fastest run at η = 0 on the same GPUs.
        by_bound: the best split under several η.
        trace: the recorded run that the parameters were read from, if any.
        replayed: the simulation of the recorded run with its own settings.
    """

    parameters: Parameters
    gpus: int
    best: Split
    tried: Sequence[Split]
    synchronous: Split
    by_bound: Mapping[int | None, SimulationResult]
    trace: Trace | None
    replayed: SimulationResult | None

    @property
    def speedup(self) -> float:
        """The throughput of the best split, divided by that of the best synchronous run."""
        return self.best.outcome.tokens_per_s / self.synchronous.outcome.tokens_per_s

    def to_dict(self) -> dict[str, Any]:
        """Return the report for `--json`."""
        return {
            "gpus": self.gpus,
            "max_staleness": self.parameters.max_staleness,
            "best": _split(self.best),
            "speedup_over_sync": round(self.speedup, 3),
            "synchronous": _split(self.synchronous),
            "staleness": _shares(self.best.outcome),
            "by_max_staleness": [
                {"max_staleness": bound, **_figures(outcome)} for bound, outcome in self.by_bound.items()
            ],
            "splits": [_split(split) for split in self.tried],
            "trace": self.trace and self._replay(),
            "parameters": self.parameters.model_dump(mode="json"),
        }

    def _replay(self) -> dict[str, Any]:
        assert self.trace is not None and self.replayed is not None
        return {
            "episodes": self.trace.episodes,
            "steps": self.trace.steps,
            "measured_step_s": round(self.trace.step_s, 3),
            "simulated_step_s": round(self.replayed.step_s, 3),
            "not_modelled": list(self.trace.not_modelled),
        }


def run(
    overrides: Sequence[str], *, source: Path | None, gpus: int | None, plot: Path | None, json: bool
) -> SimulationReport:
    """Simulate, and print and plot the results; with `json` the last line printed is one JSON object.

    Args:
        overrides: `key=value` settings of `Parameters`.
        source: the folder of a run to take the parameters from.
        gpus: the number of GPUs to split; None: that of the parameters.
        plot: the PNG file to write, if any.

    Raises:
        ConfigError: a parameter is invalid, the folder is not that of a run, or there are too few GPUs.
    """
    report = _report(overrides, source=source, gpus=gpus)
    console = Console(soft_wrap=True, highlight=False)
    _show(report, console)
    if plot is not None:
        draw(report, plot)
        console.print(f"wrote the plot to {plot}")
    if json:
        print(orjson.dumps(report.to_dict()).decode())
    return report


def _report(overrides: Sequence[str], *, source: Path | None, gpus: int | None) -> SimulationReport:
    trace = read_trace(source) if source is not None else None
    parameters = read_parameters(overrides, trace.parameters if trace else None)
    is_random = trace is None or any(o.partition("=")[0].partition(".")[0] in WORK for o in overrides)
    work: Work | None = None if is_random or trace is None else trace.work
    gpus = gpus or parameters.engines * parameters.gpus_per_engine + parameters.trainers
    tried = splits(parameters, work, gpus=gpus)
    best = fastest(tried)
    chosen = with_split(parameters, engines=best.engines, trainers=best.trainers)
    replayed = simulate(read_parameters((), trace.parameters).scenario(trace.work)) if trace else None
    sync = synchronous(parameters, work, gpus=gpus)
    return SimulationReport(chosen, gpus, best, tried, sync, bounds(chosen, work), trace, replayed)


def _show(report: SimulationReport, console: Console) -> None:
    if report.trace is not None and report.replayed is not None:
        console.print(
            f"from {report.trace.steps} steps and {report.trace.episodes} episodes: "
            f"{report.trace.step_s:.2f} s per step measured, {report.replayed.step_s:.2f} s simulated"
        )
        for setting in report.trace.not_modelled:
            console.print(f"[yellow]not modelled:[/yellow] {setting}")
    table = Table(
        "engines", "trainers", "s per step", "tokens/s", "trainer idle", "engines idle", "staleness"
    )
    for split in report.tried:
        style = "bold" if split is report.best else ""
        table.add_row(str(split.engines), str(split.trainers), *_row(split.outcome), style=style)
    console.print(table)
    table = Table("η", "s per step", "tokens/s", "trainer idle", "engines idle", "staleness", "masked")
    for bound, outcome in report.by_bound.items():
        table.add_row("∞" if bound is None else str(bound), *_row(outcome), f"{outcome.masked:.1%}")
    console.print(table)
    best, sync = report.best, report.synchronous
    how = "all GPUs for both in turn" if sync.colocated else f"{sync.engines} + {sync.trainers}"
    console.print(
        f"best split of {report.gpus} GPUs: {best.engines} engines of {report.parameters.gpus_per_engine}, "
        f"{best.trainers} trainers; {best.outcome.tokens_per_s:,.0f} tokens/s, {report.speedup:.2f}× the "
        f"best synchronous run ({how}: {sync.outcome.tokens_per_s:,.0f}), "
        f"{best.outcome.tokens_per_s / report.by_bound[0].tokens_per_s:.2f}× the same split at η = 0"
    )
    shares = ", ".join(f"{age}: {share:.0%}" for age, share in _shares(best.outcome).items())
    console.print(f"staleness of the trained tokens, mean {best.outcome.staleness_mean:.2f}: {shares}")


def _row(outcome: SimulationResult) -> list[str]:
    return [
        f"{outcome.step_s:,.2f}", f"{outcome.tokens_per_s:,.0f}", f"{outcome.trainer_idle:.0%}",
        f"{outcome.rollout_idle:.0%}", f"{outcome.staleness_mean:.2f}",
    ]  # fmt: skip


def _figures(outcome: SimulationResult) -> dict[str, float]:
    return {
        "step_s": round(outcome.step_s, 4),
        "tokens_per_s": round(outcome.tokens_per_s, 1),
        "trainer_idle": round(outcome.trainer_idle, 4),
        "rollout_idle": round(outcome.rollout_idle, 4),
        "staleness_mean": round(outcome.staleness_mean, 3),
        "masked": round(outcome.masked, 4),
    }


def _split(split: Split) -> dict[str, Any]:
    return {
        "engines": split.engines, "trainers": split.trainers, "colocated": split.colocated,
        **_figures(split.outcome),
    }  # fmt: skip


def _shares(outcome: SimulationResult) -> dict[str, float]:
    total = sum(outcome.staleness.values())
    return {str(age): round(tokens / total, 4) for age, tokens in outcome.staleness.items()}


def draw(report: SimulationReport, path: Path) -> None:
    """Plot throughput by split and by η, and the staleness of the best split, as a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    by_split, by_bound, staleness = figure.subplots(1, 3)
    by_split.plot(
        [split.engines for split in report.tried], [s.outcome.tokens_per_s for s in report.tried], "o-"
    )
    by_split.axhline(report.synchronous.outcome.tokens_per_s, color="#c2542d", label="best synchronous")
    by_split.set(xlabel=f"engines, of {report.gpus} GPUs", ylabel="tokens/s", ylim=(0, None))
    by_split.legend(loc="lower right")
    names = ["∞" if bound is None else str(bound) for bound in report.by_bound]
    by_bound.bar(names, [outcome.tokens_per_s for outcome in report.by_bound.values()], color="#7aa6c2")
    by_bound.set(xlabel="η", ylabel="tokens/s")
    shares = _shares(report.best.outcome)
    staleness.bar(list(shares), list(shares.values()), color="#7aa6c2")
    staleness.set(xlabel="staleness of trained tokens, in versions", ylabel="share")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
