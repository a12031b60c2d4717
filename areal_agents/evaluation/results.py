"""The results of an evaluation: one record for each attempt, the metrics that follow, and the file of both.

An attempt that failed for reasons that are not the policy's counts with score 0, as in training, and is
reported as failed. The file is written whole, so what can be read is complete.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from areal_agents.errors import ConfigError
from areal_agents.evaluation.estimators import interval, majority_score, pass_at_k, pass_hat_k
from areal_agents.whole_files import write_whole

FORMAT = "areal-agents evaluation 1"


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """One attempt at a task.

    Attributes:
        index: the number of the attempt, from 0.
        status: "finished", "truncated" or "failed".
        score: the sum of its rewards; 0 if it failed.
        rewards: the rewards of the whole episode, by name.
        answer: its answer, for maj@k; None without one.
        turns: the number of model calls.
        sampled_tokens, prompt_tokens: the tokens of all its calls, as an API would bill them.
        tokens_estimated: whether an endpoint did not report some of these, so that they are estimates.
        tool_calls: the number of its tool calls, by the name of the tool.
        seconds: the time from its opening to its end.
        versions: the smallest and the largest policy version of its tokens; None if they are not known.
    """

    episode: str
    index: int
    status: str
    score: float
    rewards: Mapping[str, float]
    turns: int
    sampled_tokens: int
    prompt_tokens: int
    seconds: float
    answer: str | None = None
    error: str | None = None
    versions: tuple[int, int] | None = None
    tokens_estimated: bool = False
    tool_calls: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TaskResult:
    """All attempts at one task; `by` has the values of the fields by which results are divided."""

    id: str
    attempts: tuple[AttemptResult, ...]
    by: Mapping[str, str] = field(default_factory=dict)

    @property
    def scores(self) -> list[float]:
        """The score of each attempt."""
        return [attempt.score for attempt in self.attempts]

    def value(self, metric: str, pass_score: float) -> float:
        """Return this task's value of a metric: "avg@k", "pass@k", "pass^k" or "maj@k"."""
        if metric.startswith("avg@"):
            return fmean(self.scores)
        if metric.startswith("maj@"):
            return majority_score([attempt.answer for attempt in self.attempts], self.scores)
        estimator = pass_hat_k if metric.startswith("pass^") else pass_at_k
        passed = sum(score >= pass_score for score in self.scores)
        return estimator(len(self.attempts), passed, int(metric[len("pass@") :]))


@dataclass(frozen=True, slots=True)
class Estimate:
    """The mean of one value for each task, with its confidence interval where one can be computed."""

    value: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, values: Sequence[float], *, is_probability: bool) -> Estimate:
        """Return the estimate from the values of the tasks; that of a probability stays within 0 and 1."""
        found = interval(values)
        if found is None:
            return cls(fmean(values))
        low, high = (max(0.0, found[0]), min(1.0, found[1])) if is_probability else found
        return cls(fmean(values), low, high)


COSTS = ("turns", "sampled_tokens", "prompt_tokens", "seconds")


@dataclass(frozen=True, slots=True)
class Metrics:
    """The metrics of some tasks.

    Attributes:
        tasks, episodes, failed: how many there are.
        scores: by name, those of `Results.metric_names`.
        costs: means over the episodes that have not failed, by the names of COSTS.
        tokens_estimated: in how many of these the tokens are estimates.
        tool_calls: the mean number of tool calls in these, by the name of the tool, the most frequent first.
    """

    tasks: int
    episodes: int
    failed: int
    scores: Mapping[str, Estimate]
    costs: Mapping[str, float]
    tokens_estimated: int = 0
    tool_calls: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Results:
    """The results of an evaluation.

    Attributes:
        name: the name of the configuration.
        model: the model, as the user named it.
        attempts: k, the number of attempts at each task.
        pass_score: the least score with which an attempt has passed.
        has_answers: whether answers were read, for maj@k.
    """

    name: str
    model: str
    attempts: int
    temperature: float
    pass_score: float
    has_answers: bool
    tasks: tuple[TaskResult, ...]

    def __post_init__(self) -> None:
        for task in self.tasks:
            if [attempt.index for attempt in task.attempts] != list(range(self.attempts)):
                raise ValueError(f"task {task.id} needs {self.attempts} attempts, got {len(task.attempts)}")
        if not self.tasks:
            raise ValueError("an evaluation needs at least one task, got none")

    @property
    def metric_names(self) -> list[str]:
        """The names of the metrics: avg@k; pass@j for j = 1, 2, 4, … up to k; pass^j for the same j above 1,
        since pass^1 is pass@1; and maj@k if there are answers."""
        k = self.attempts
        powers = [2**i for i in range(k.bit_length()) if 2**i < k]
        majority = [f"maj@{k}"] if self.has_answers else []
        at, hat = ([f"pass{mark}{n}" for n in (*powers, k)] for mark in "@^")
        return [f"avg@{k}", *at, *hat[1:], *majority]

    def metrics(self, tasks: Sequence[TaskResult] | None = None) -> Metrics:
        """Return the metrics of all tasks, or of some."""
        tasks = self.tasks if tasks is None else tasks
        played = [attempt for task in tasks for attempt in task.attempts]
        counted = [attempt for attempt in played if attempt.status != "failed"]
        return Metrics(
            tasks=len(tasks),
            episodes=len(played),
            failed=len(played) - len(counted),
            scores={
                name: Estimate.of(
                    [task.value(name, self.pass_score) for task in tasks],
                    is_probability=name.startswith("pass"),
                )
                for name in self.metric_names
            },
            costs={name: fmean(getattr(a, name) for a in counted) if counted else 0.0 for name in COSTS},
            tokens_estimated=sum(attempt.tokens_estimated for attempt in counted),
            tool_calls={
                name: count / len(counted)
                for name, count in sum((Counter(a.tool_calls) for a in counted), Counter[str]()).most_common()
            },
        )

    def slices(self) -> dict[str, dict[str, Metrics]]:
        """Return the metrics for each value of each field of `TaskResult.by`."""
        found: dict[str, dict[str, list[TaskResult]]] = {}
        for task in self.tasks:
            for name, value in task.by.items():
                found.setdefault(name, {}).setdefault(value, []).append(task)
        return {
            name: {value: self.metrics(of_value[value]) for value in sorted(of_value, key=_natural)}
            for name, of_value in found.items()
        }

    def write(self, path: Path) -> None:
        """Write the results, with their metrics, as one JSON file, whole or not at all."""
        slices = {name: {v: asdict(m) for v, m in found.items()} for name, found in self.slices().items()}
        tree = {
            "format": FORMAT,
            **{name: getattr(self, name) for name in _SETTINGS},
            "metrics": asdict(self.metrics()),
            "slices": slices,
            "tasks": [asdict(task) for task in self.tasks],
        }
        write_whole(path, json.dumps(tree, ensure_ascii=False, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read results that `write` wrote; given a folder, its results.json.

        Raises:
            ConfigError: there is no such file, or it is not a results file.
        """
        path = path / "results.json" if path.is_dir() else path
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                f"there is no {path}; give the folder of `areal-agents eval --out`, or its results.json"
            ) from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read as results of an evaluation: {error}") from None
        if not isinstance(tree, dict) or tree.get("format") != FORMAT:
            raise ConfigError(f"{path} is not a results file (expected the format {FORMAT!r})")
        tasks = tuple(
            TaskResult(task["id"], tuple(map(attempt_of, task["attempts"])), task["by"])
            for task in tree["tasks"]
        )
        return cls(**{name: tree[name] for name in _SETTINGS}, tasks=tasks)


_SETTINGS = ("name", "model", "attempts", "temperature", "pass_score", "has_answers")


def attempt_of(tree: Mapping[str, Any]) -> AttemptResult:
    """Return an attempt that `asdict` has made a tree of."""
    versions = tree["versions"]
    return AttemptResult(**{**tree, "versions": None if versions is None else tuple(versions)})


def field_of_tasks(inputs: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, str]:
    """Return the value of a field for each task id; a dot in the name reaches into a nested object.

    Raises:
        ConfigError: a task has no such field, or its value is no string, number, boolean or null.
    """
    found = {}
    for task_id, task in inputs.items():
        value: Any = task
        for part in name.split("."):
            if not isinstance(value, Mapping) or part not in value:
                raise ConfigError(
                    f"--by {name}: task {task_id} has no such field; it has {', '.join(_names(task))}"
                )
            value = value[part]
        if isinstance(value, Mapping | list):
            raise ConfigError(
                f"--by {name}: the value must be a string, a number, a boolean or null, got a "
                f"{type(value).__name__} in task {task_id}"
            )
        found[task_id] = value if isinstance(value, str) else json.dumps(value)
    return found


def _names(task: Mapping[str, Any]) -> Iterable[str]:
    return task or ("no fields",)


def _natural(value: str) -> tuple[int, float, str]:
    """Order numbers by size, before other text."""
    try:
        return 0, float(value), value
    except ValueError:
        return 1, 0.0, value
