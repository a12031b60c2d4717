"""`python -m benchmarks async --table`: the cost of staleness, with naive and with decoupled PPO.

The quick start is trained on batches that are exactly η versions old (`rollout.lag`), with both objectives,
on each seed; each result is a line of a JSONL file. Runs that the file contains are not repeated, and an
interrupted run continues from its last checkpoint, so the whole table, which takes hours, can be produced in
several sessions. Each batch is trained in more minibatches than in the quick start, where staleness makes
no difference.
"""

from __future__ import annotations

import itertools
import json as jsonlib
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from areal_agents.config import Config, load_config
from areal_agents.errors import ConfigError
from areal_agents.launch.progress import MetricsFile
from areal_agents.launch.summary import Summary
from areal_agents.launch.train import train
from areal_agents.whole_files import replacing

CONFIG = Path("examples/search_agent/config.yaml")
STALENESS = (0, 1, 2, 4, 8, 16)
OBJECTIVES = {"naive": "behavior", "decoupled": "batch"}  # algorithm.proximal
COLOURS = {"naive": "#c2542d", "decoupled": "#2d6fc2"}  # in the plot
SEEDS = (0, 1, 2)
MINIBATCHES = 4
LAST_STEPS = 10  # training rewards are averaged over the last steps of a run


@dataclass(frozen=True, slots=True)
class Setting:
    """One run of the table."""

    lag: int
    objective: str
    seed: int

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return f"{self.objective}-eta{self.lag}-seed{self.seed}"


@dataclass(frozen=True, slots=True)
class Result:
    """The results of a run. Times cover only the training.

    Attributes:
        heldout_before, heldout_after: mean rewards of held-out tasks, greedy.
        last_rewards: the mean reward of the training episodes of the last steps, sampled.
    """

    lag: int
    objective: str
    seed: int
    heldout_before: float | None
    heldout_after: float | None
    last_rewards: float
    steps: int
    train_s: float
    staleness_mean: float
    staleness_max: int


def run(
    out: Path,
    *,
    json: bool,
    image: Path | None = None,
    config: Path = CONFIG,
    settings: Sequence[Setting] | None = None,
    overrides: Sequence[str] = (),
) -> str:
    """Make the runs that `out` lacks, append their results to it, and print and return the table.

    Args:
        out: a file with one `Result` per line. The folders of runs are kept next to it, in a folder with the
            same name, until their line is written.
        image: where to plot the held-out rewards, as a PNG; None: nowhere.
        json: whether to print all results as one JSON object at the end.
        settings: the runs; by default all runs of the table.
        overrides: overrides of the configuration, for every run.

    Raises:
        ConfigError: there is no quick start in the working directory, or `out` is not a file of results.
        ChildDied: a process of a run ended that should not have.
    """
    if not config.is_file():
        raise ConfigError(f"the table trains the quick start, but there is no {config} here")
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    results = read_results(out)
    known = {(r.lag, r.objective, r.seed) for r in results}
    for setting in settings if settings is not None else all_settings():
        if (setting.lag, setting.objective, setting.seed) in known:
            continue
        console.print(f"η = {setting.lag}, {setting.objective} PPO, seed {setting.seed}")
        result = _train(setting, out.with_suffix("") / setting.name, config, overrides, console)
        results.append(result)
        out.parent.mkdir(parents=True, exist_ok=True)
        _write(out, results)
    table = markdown(results)
    print(table)
    if image is not None:
        plot(results, image)
    if json:
        print(jsonlib.dumps({"results": [asdict(result) for result in results]}))
    return table


def all_settings() -> list[Setting]:
    """Every run of the table, seed by seed, so that early results cover the whole table."""
    return [
        Setting(lag, objective, seed)
        for seed, lag, objective in itertools.product(SEEDS, STALENESS, OBJECTIVES)
    ]


def _train(
    setting: Setting, folder: Path, config: Path, overrides: Sequence[str], console: Console
) -> Result:
    loaded: Config = load_config(
        config,
        [
            f"run_dir={folder}",
            f"seed={setting.seed}",
            f"rollout.max_staleness={setting.lag}",
            f"rollout.lag={setting.lag}",
            f"algorithm.minibatches={MINIBATCHES}",
            f"algorithm.proximal={OBJECTIVES[setting.objective]}",
            "eval.every=null",
            *overrides,
        ],
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".log"), "a") as log:
        summary: Summary = train(loaded, console=Console(file=log, width=200))
    metrics = MetricsFile(folder / "metrics.jsonl")
    metrics.update()
    console.print(
        f"held out {summary.heldout_before} → {summary.heldout_after} in {summary.steps_s:.0f} s of training"
    )
    return Result(
        lag=setting.lag,
        objective=setting.objective,
        seed=setting.seed,
        heldout_before=summary.heldout_before,
        heldout_after=summary.heldout_after,
        last_rewards=statistics.mean(row["reward_mean"] for row in metrics.rows[-LAST_STEPS:]),
        steps=summary.steps,
        train_s=summary.steps_s,
        staleness_mean=summary.staleness_mean,
        staleness_max=summary.staleness_max,
    )


def read_results(path: Path) -> list[Result]:
    """The results of earlier runs; empty if there is no file. Raises ConfigError if it is not a file of
    results."""
    if not path.exists():
        return []
    try:
        return [Result(**jsonlib.loads(line)) for line in path.read_text().splitlines()]
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is not a file of results: {error}; choose another with --out") from None


def _write(path: Path, results: Sequence[Result]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(jsonlib.dumps(asdict(result)) + "\n" for result in results))
    temporary.replace(path)


def markdown(results: Sequence[Result]) -> str:
    """Held-out reward after training by η and objective: the mean and, in parentheses, each seed."""
    lines = [
        "| η | naive PPO | decoupled PPO | training reward at the end, naive / decoupled |",
        "| --- | --- | --- | --- |",
    ]
    for lag in STALENESS:
        naive, decoupled = (
            sorted((r for r in results if (r.lag, r.objective) == (lag, objective)), key=lambda r: r.seed)
            for objective in OBJECTIVES
        )
        if naive or decoupled:
            lines.append(
                f"| {lag} | {_heldout(naive)} | {_heldout(decoupled)} | {_last(naive)} / {_last(decoupled)} |"
            )
    return "\n".join(lines)


def _heldout(results: Sequence[Result]) -> str:
    rewards = [r.heldout_after for r in results if r.heldout_after is not None]
    if not rewards:
        return "–"
    return f"{statistics.mean(rewards):.3f} ({', '.join(f'{reward:.3f}' for reward in rewards)})"


def _last(results: Sequence[Result]) -> str:
    return f"{statistics.mean(r.last_rewards for r in results):.3f}" if results else "–"


def plot(results: Sequence[Result], path: Path) -> None:
    """Plot the held-out reward by η, a line for each objective through the means, a point for each seed.

    The image is written whole or not at all.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for objective, colour in COLOURS.items():
        rewards = {
            place: [
                r.heldout_after
                for r in results
                if (r.lag, r.objective) == (lag, objective) and r.heldout_after is not None
            ]
            for place, lag in enumerate(STALENESS)
        }
        means = {place: statistics.mean(of) for place, of in rewards.items() if of}
        axes.plot(list(means), list(means.values()), color=colour, label=f"{objective} PPO, mean")
        for place, of in rewards.items():
            axes.scatter([place] * len(of), of, color=colour, s=14, alpha=0.6)
    axes.set_xticks(range(len(STALENESS)), [str(lag) for lag in STALENESS])
    axes.set_xlabel("η: versions between sampling and training")
    axes.set_ylabel("held-out reward after training")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)
