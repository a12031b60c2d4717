"""`python -m benchmarks async --table`: the cost of staleness, with naive and with decoupled PPO.

An example is trained on batches that are exactly η versions old (`rollout.lag`), with both objectives, on
each seed; each result is a line of a JSONL file. Runs that the file contains are not repeated, and an
interrupted run continues from its last checkpoint, so the whole table, which takes hours, can be produced in
several sessions. Each batch is trained in more minibatches, and with a lower learning rate over more steps,
than the example is by itself, so that the policy changes little within η versions and often within a batch.
"""

from __future__ import annotations

import itertools
import json as jsonlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

from rich.console import Console

from areal_agents.config import load_config
from areal_agents.errors import ConfigError
from areal_agents.evaluation.policies import NamedPolicy
from areal_agents.launch.evaluation import evaluate
from areal_agents.launch.progress import MetricsFile
from areal_agents.launch.run_folder import RunFolder
from areal_agents.launch.summary import Summary
from areal_agents.launch.train import train
from areal_agents.whole_files import replacing

CONFIG = Path("examples/multi_turn_math/config.yaml")
REGIME = (
    "algorithm.minibatches=4", "trainer.lr=1.75e-4", "trainer.warmup_steps=4", "trainer.steps=32",
)  # fmt: skip
STALENESS = (0, 1, 2, 4, 8, 16)
OBJECTIVES = {"naive": "behavior", "decoupled": "batch"}  # algorithm.proximal
HALF, OVER = 0.5, 5  # a run has learned when the mean training reward of so many steps reaches this
COLOURS = {"naive": "#c2542d", "decoupled": "#2d6fc2"}  # in the plot
SEEDS = (0, 1, 2)


RewardOf: TypeAlias = Callable[["Result"], float | None]


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
        heldout_sampled: the same after the training, sampled at temperature 1, as in training.
        mean_rewards: the mean reward of the training episodes of all steps, sampled: it tells how fast a run
            learned.
        steps_to_half: the first step at which the mean training reward of OVER steps is at least HALF; None
            if that was never so.
    """

    lag: int
    objective: str
    seed: int
    heldout_before: float | None
    heldout_after: float | None
    heldout_sampled: float
    mean_rewards: float
    steps_to_half: int | None
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
        ConfigError: there is no example in the working directory, or `out` is not a file of results.
        ChildDied: a process of a run ended that should not have.
    """
    if not config.is_file():
        raise ConfigError(f"the table trains an example, but there is no {config} here")
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
    changes = [
        f"run_dir={folder}",
        f"seed={setting.seed}",
        f"rollout.max_staleness={setting.lag}",
        f"rollout.lag={setting.lag}",
        *REGIME,
        f"algorithm.proximal={OBJECTIVES[setting.objective]}",
        "eval.every=null",
        *overrides,
    ]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".log"), "a") as log:
        printed = Console(file=log, width=200)
        summary: Summary = train(load_config(config, changes), console=printed)
        sampled = heldout_sampled(folder, config, changes, printed)
    metrics = MetricsFile(folder / "metrics.jsonl")
    metrics.update()
    rewards = [row["reward_mean"] for row in metrics.rows]
    console.print(
        f"held out {summary.heldout_before} → {summary.heldout_after}, sampled {sampled}, "
        f"in {summary.steps_s:.0f} s of training"
    )
    return Result(
        lag=setting.lag,
        objective=setting.objective,
        seed=setting.seed,
        heldout_before=summary.heldout_before,
        heldout_after=summary.heldout_after,
        heldout_sampled=sampled,
        mean_rewards=statistics.mean(rewards),
        steps_to_half=steps_to_half(rewards),
        steps=summary.steps,
        train_s=summary.steps_s,
        staleness_mean=summary.staleness_mean,
        staleness_max=summary.staleness_max,
    )


def heldout_sampled(folder: Path, config: Path, changes: Sequence[str], console: Console) -> float:
    """The mean reward of held-out tasks, sampled at temperature 1, of the final model of a run."""
    policy = NamedPolicy(f"{folder}@final", RunFolder(folder).final_model)
    loaded = load_config(config, [*changes, f"model={policy.folder}", "eval.temperature=1"])
    results = evaluate(loaded, policy, console=console)
    return statistics.mean(score for task in results.tasks for score in task.scores)


def steps_to_half(rewards: Sequence[float]) -> int | None:
    """The first step, from 1, at which the mean of the last OVER rewards is at least HALF."""
    return next(
        (
            step
            for step in range(OVER, len(rewards) + 1)
            if statistics.mean(rewards[step - OVER : step]) >= HALF
        ),
        None,
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
    """By η and objective: rewards of held-out tasks, greedy and sampled, the mean and, in parentheses, those
    of the seeds; the mean training reward of all steps; and the steps until a run had learned, by seed."""
    rewards: list[tuple[str, RewardOf]] = [
        ("greedy", lambda result: result.heldout_after),
        ("sampled", lambda result: result.heldout_sampled),
    ]
    names = [*(label for label, _ in rewards), "training", f"steps to {HALF:g}"]
    columns = [f"{name}: {objective}" for name in names for objective in OBJECTIVES]
    lines = [f"| η | {' | '.join(columns)} |", "| --- " * (1 + len(columns)) + "|"]
    for lag in STALENESS:
        cells = [_rewards(_of(results, lag, objective), of) for _, of in rewards for objective in OBJECTIVES]
        runs = [_of(results, lag, objective) for objective in OBJECTIVES]
        cells += [f"{statistics.mean(r.mean_rewards for r in of):.3f}" if of else "–" for of in runs]
        cells += [", ".join(str(r.steps_to_half or "never") for r in of) or "–" for of in runs]
        if any(runs):
            lines.append(f"| {lag} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _of(results: Sequence[Result], lag: int, objective: str) -> list[Result]:
    """The results of one cell, by seed."""
    return sorted((r for r in results if (r.lag, r.objective) == (lag, objective)), key=lambda r: r.seed)


def _rewards(results: Sequence[Result], reward_of: RewardOf) -> str:
    rewards = [reward for result in results if (reward := reward_of(result)) is not None]
    if not rewards:
        return "–"
    return f"{statistics.mean(rewards):.3f} ({', '.join(f'{reward:.3f}' for reward in rewards)})"


def plot(results: Sequence[Result], path: Path) -> None:
    """Plot two rewards by η, held out after training and of all training episodes, both sampled: a line for
    each objective through the means, a point for each seed.

    The image is written whole or not at all.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    shown: dict[str, RewardOf] = {
        "held-out reward after training, sampled": lambda result: result.heldout_sampled,
        "training reward, mean of all steps": lambda result: result.mean_rewards,
    }
    for axes, (label, reward_of) in zip(figure.subplots(1, len(shown)), shown.items(), strict=True):
        for objective, colour in COLOURS.items():
            cells = [map(reward_of, _of(results, lag, objective)) for lag in STALENESS]
            rewards = [[reward for reward in cell if reward is not None] for cell in cells]
            means = {place: statistics.mean(of) for place, of in enumerate(rewards) if of}
            axes.plot(list(means), list(means.values()), color=colour, label=f"{objective} PPO, mean")
            for place, of in enumerate(rewards):
                axes.scatter([place] * len(of), of, color=colour, s=14, alpha=0.6)
        axes.set_xticks(range(len(STALENESS)), [str(lag) for lag in STALENESS])
        axes.set_xlabel("η: versions between sampling and training")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)
