"""`python -m benchmarks async --table`: the cost of staleness, with naive and with decoupled PPO.

The quick start is trained at each η with K = 4 minibatches per batch, with both objectives, on each seed;
each result is a line of a JSONL file. Runs that the file contains are not repeated, and an interrupted run
continues from its last checkpoint, so the whole table, which takes hours, can be produced in several
sessions.
"""

from __future__ import annotations

import itertools
import json as jsonlib
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from areal_agents.config import Config, load_config
from areal_agents.errors import ConfigError
from areal_agents.launch.summary import Summary
from areal_agents.launch.train import train

CONFIG = Path("examples/search_agent/config.yaml")
STALENESS: tuple[int | None, ...] = (0, 1, 2, 4, 8, None)
OBJECTIVES = {"naive": "behavior", "decoupled": "batch"}  # algorithm.proximal
SEEDS = (0, 1, 2)
MINIBATCHES = 4


@dataclass(frozen=True, slots=True)
class Setting:
    """One run of the table."""

    max_staleness: int | None
    objective: str
    seed: int

    @property
    def name(self) -> str:
        """Summarise the run in a folder."""
        return f"{self.objective}-eta{_shown(self.max_staleness)}-seed{self.seed}"


@dataclass(frozen=True, slots=True)
class Result:
    """The results of a run. Rewards are held-out means; times cover only the training."""

    max_staleness: int | None
    objective: str
    seed: int
    heldout_before: float | None
    heldout_after: float | None
    steps: int
    train_s: float
    staleness_mean: float
    staleness_max: int


def run(
    out: Path,
    *,
    json: bool,
    config: Path = CONFIG,
    settings: Sequence[Setting] | None = None,
    overrides: Sequence[str] = (),
) -> str:
    """Make the runs that `out` lacks, append their results to it, and print and return the table.

    Args:
        out: a file with one `Result` per line. The folders of runs are kept next to it, in a folder with the
            same name, until their line is written.
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
    known = {(r.max_staleness, r.objective, r.seed) for r in results}
    for setting in settings if settings is not None else all_settings():
        if (setting.max_staleness, setting.objective, setting.seed) in known:
            continue
        console.print(f"η = {_shown(setting.max_staleness)}, {setting.objective} PPO, seed {setting.seed}")
        result = _train(setting, out.with_suffix("") / setting.name, config, overrides, console)
        results.append(result)
        out.parent.mkdir(parents=True, exist_ok=True)
        _write(out, results)
    table = markdown(results)
    print(table)
    if json:
        print(jsonlib.dumps({"results": [asdict(result) for result in results]}))
    return table


def all_settings() -> list[Setting]:
    """Every run of the table, seed by seed, so that early results cover the whole table."""
    return [
        Setting(bound, objective, seed)
        for seed, bound, objective in itertools.product(SEEDS, STALENESS, OBJECTIVES)
    ]


def _train(
    setting: Setting, folder: Path, config: Path, overrides: Sequence[str], console: Console
) -> Result:
    loaded: Config = load_config(
        config,
        [
            f"run_dir={folder}",
            f"seed={setting.seed}",
            f"rollout.max_staleness={'inf' if setting.max_staleness is None else setting.max_staleness}",
            f"algorithm.minibatches={MINIBATCHES}",
            f"algorithm.proximal={OBJECTIVES[setting.objective]}",
            "eval.every=null",
            *overrides,
        ],
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".log"), "a") as log:
        summary: Summary = train(loaded, console=Console(file=log, width=200))
    console.print(
        f"held out {summary.heldout_before} → {summary.heldout_after} in {summary.steps_s:.0f} s of training"
    )
    return Result(
        max_staleness=setting.max_staleness,
        objective=setting.objective,
        seed=setting.seed,
        heldout_before=summary.heldout_before,
        heldout_after=summary.heldout_after,
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
        "| η | naive PPO | decoupled PPO | staleness mean / max | seconds a step |",
        "| --- | --- | --- | --- | --- |",
    ]
    for bound in STALENESS:
        own = [result for result in results if result.max_staleness == bound]
        if own:
            staleness = statistics.mean(result.staleness_mean for result in own)
            step_s = statistics.mean(result.train_s / max(1, result.steps) for result in own)
            lines.append(
                f"| {_shown(bound)} | {_rewards(own, 'naive')} | {_rewards(own, 'decoupled')} | "
                f"{staleness:.2f} / {max(result.staleness_max for result in own)} | {step_s:.2f} |"
            )
    return "\n".join(lines)


def _rewards(results: Sequence[Result], objective: str) -> str:
    found: list[Any] = [r for r in results if r.objective == objective and r.heldout_after is not None]
    rewards = [r.heldout_after for r in sorted(found, key=lambda r: r.seed)]
    if not rewards:
        return "–"
    return f"{statistics.mean(rewards):.3f} ({', '.join(f'{reward:.3f}' for reward in rewards)})"


def _shown(bound: int | None) -> str:
    return "∞" if bound is None else str(bound)
