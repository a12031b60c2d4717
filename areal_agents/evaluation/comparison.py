"""Compares two evaluations of the same tasks: paired by task, because tasks differ more than policies do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from areal_agents.errors import ConfigError
from areal_agents.evaluation.estimators import mcnemar_p, sign_flip_p, t_interval
from areal_agents.evaluation.folder import differing_settings
from areal_agents.evaluation.results import COSTS, Results


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of one metric between two evaluations, over the tasks that both have.

    Attributes:
        first, second: the values of the metric over the common tasks.
        low, high: the confidence interval of second - first; None where none can be computed.
        p: the two-sided p-value of the paired test.
        test: the name of the test.
        better, worse: the numbers of tasks in which the second is better, and worse.
    """

    metric: str
    first: float
    second: float
    low: float | None
    high: float | None
    p: float
    test: str
    better: int
    worse: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two evaluations side by side.

    Attributes:
        common: the number of tasks that both have.
        only_first, only_second: the ids of the tasks that only one has; they are not compared.
        differences: one for each metric that both have.
        costs: by the names of COSTS, the means of the first and of the second.
        settings: by name, the settings besides the model in which they differ, with both values.
    """

    common: int
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    differences: tuple[Difference, ...]
    costs: Mapping[str, tuple[float, float]]
    settings: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)


def compare(first: Results, second: Results) -> Comparison:
    """Compare two evaluations over the tasks that both have.

    avg@j of the first is compared with avg@k of the second, since both estimate the mean score of one
    attempt; pass@k, pass^k and maj@k only with the same k.

    Raises:
        ConfigError: they have no task in common, or differ in the score with which an attempt passes.
    """
    if first.pass_score != second.pass_score:
        raise ConfigError(
            "the evaluations differ in eval.pass_score, and with it in what pass@k means: "
            f"{first.pass_score:g} and {second.pass_score:g}"
        )
    ours = {task.id: task for task in first.tasks}
    theirs = {task.id: task for task in second.tasks}
    common = [task_id for task_id in ours if task_id in theirs]
    if not common:
        raise ConfigError("the evaluations have no task in common, so nothing can be compared")
    names = [(first.metric_names[0], second.metric_names[0])]
    names += [(name, name) for name in first.metric_names[1:] if name in second.metric_names[1:]]
    differences = []
    for of_first, of_second in names:
        a = [ours[task_id].value(of_first, first.pass_score) for task_id in common]
        b = [theirs[task_id].value(of_second, second.pass_score) for task_id in common]
        differences.append(_difference(of_first if of_first == of_second else "avg", a, b))
    costs = (
        results.metrics([tasks[task_id] for task_id in common]).costs
        for results, tasks in ((first, ours), (second, theirs))
    )
    before, after = costs
    return Comparison(
        common=len(common),
        only_first=tuple(task_id for task_id in ours if task_id not in theirs),
        only_second=tuple(task_id for task_id in theirs if task_id not in ours),
        differences=tuple(differences),
        costs={name: (before[name], after[name]) for name in COSTS},
        settings={
            f"eval.{name}": (getattr(first, name), getattr(second, name))
            for name in ("temperature", "attempts")
            if getattr(first, name) != getattr(second, name)
        },
    )


def compare_files(first: Path, second: Path) -> tuple[Results, Results, Comparison]:
    """Read and compare two files of results, or the folders that have them. Raises ConfigError.

    All settings are compared if both folders have them, otherwise those in the results.
    """
    a, b = Results.read(first), Results.read(second)
    found = compare(a, b)
    settings = differing_settings(first, second)
    return a, b, found if settings is None else replace(found, settings={**found.settings, **settings})


def _difference(metric: str, first: list[float], second: list[float]) -> Difference:
    gains = [b - a for a, b in zip(first, second, strict=True)]
    better, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
    low, high = t_interval(gains) or (None, None)
    if set(first) | set(second) <= {0.0, 1.0}:
        p, test = mcnemar_p(worse, better), "exact McNemar test"
    else:
        p, test = sign_flip_p(gains), "paired permutation test"
    return Difference(metric, fmean(first), fmean(second), low, high, p, test, better, worse)
