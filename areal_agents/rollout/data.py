"""Loads tasks from files, the Hugging Face Hub, a function or an environment, or from several such sources.

The order of rows, ids and shuffling are deterministic, so a restarted run continues where it stopped, given
only the (task, epoch) pairs that were started.
"""

from __future__ import annotations

import csv
import inspect
import io
import json
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_agents.core.rollout import DATA_SOURCE, Task
from areal_agents.errors import DataError
from areal_agents.rollout.agents.environment_agent import environment_tasks
from areal_agents.rollout.config import DataConfig, DifficultyConfig, TasksConfig, is_data_file
from areal_agents.user_functions import describe, load_function, names_a_function


@dataclass(frozen=True, slots=True)
class TaskSource:
    """The tasks of a data set.

    Attributes:
        tasks: the tasks in the order of the data; ids are unique.
        seed: the seed of the order in each epoch.
        epochs: the number of passes over the tasks; None: no end.
        difficulty: how tasks are sampled by what the policy solves; None: each once in an epoch.
        weight: the source's share of the groups, if it is one of several.
    """

    tasks: tuple[Task, ...]
    seed: int
    epochs: int | None = None
    difficulty: DifficultyConfig | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.tasks:
            raise DataError("the data set is empty")

    def epoch(self, epoch: int) -> list[Task]:
        """Return every task once, in the order of that epoch."""
        order = list(self.tasks)
        random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order

    def stream(self, started: Collection[tuple[str, int]] = ()) -> Iterator[tuple[Task, int]]:
        """Yield (task, epoch) of every epoch in order, without the pairs (task id, epoch) in `started`."""
        epoch = 0
        while self.epochs is None or epoch < self.epochs:
            for task in self.epoch(epoch):
                if (task.id, epoch) not in started:
                    yield task, epoch
            epoch += 1


@dataclass(frozen=True, slots=True)
class TaskMixture:
    """The tasks of several sources, of which each has a share of the groups.

    Attributes:
        sources: each with its weight; the ids of all their tasks differ.
    """

    sources: tuple[TaskSource, ...]

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks of all sources."""
        return tuple(task for source in self.sources for task in source.tasks)

    def epoch(self, epoch: int) -> list[Task]:
        """Return every task once: of each prefix, every source has its share, until it has no more."""
        left = [source.epoch(epoch)[::-1] for source in self.sources]
        weights = [source.weight for source in self.sources]
        taken, order = [0] * len(left), []
        while any(left):
            index = most_behind(weights, taken, [index for index, tasks in enumerate(left) if tasks])
            order.append(left[index].pop())
            taken[index] += 1
        return order


def most_behind(weights: Sequence[float], taken: Sequence[int], among: Sequence[int]) -> int:
    """Return the index of the source that would still be furthest behind its share with one more task.

    Args:
        weights: the weights of all sources.
        taken: how many tasks were taken from each.
        among: the indices to choose from.
    """
    return min(among, key=lambda index: ((taken[index] + 1) / weights[index], index))


def load_tasks(config: DataConfig, *, seed: int = 0) -> TaskSource | TaskMixture:
    """Load the tasks that `config` names.

    A function is called with `split` and `seed`, as far as it accepts them, and returns dicts or Tasks. With
    several sources, a task's id is "<source>/<id>", and its input has the source as `data_source`.

    Args:
        config: the source or sources of the tasks.
        seed: the seed if the configuration has none.

    Raises:
        DataError: the data is missing, unreadable or empty, an id is repeated, or a row is not JSON.
    """
    seed = config.seed if config.seed is not None else seed
    if not config.sources:
        difficulty = config.difficulty if config.sampler == "difficulty" else None
        return TaskSource(_tasks(config, seed), seed, config.epochs, difficulty)
    return TaskMixture(
        tuple(
            TaskSource(
                tuple(_of_source(source.name, task) for task in _tasks(source, seed)),
                seed,
                source.epochs,
                source.difficulty if source.sampler == "difficulty" else None,
                source.weight,
            )
            for source in config.sources
        )
    )


def _of_source(name: str, task: Task) -> Task:
    """Return a task with the name of its source in its id and input. Raises DataError if it has another."""
    given = task.input.get(DATA_SOURCE, name)
    if given != name:
        raise DataError(
            f"task {task.id!r} of the source {name!r} has {DATA_SOURCE}: {given!r}; give the source this "
            "name, or rename the field"
        )
    return Task(f"{name}/{task.id}", {**task.input, DATA_SOURCE: name})


def _tasks(config: TasksConfig, seed: int) -> tuple[Task, ...]:
    """Load the tasks of one source. Raises DataError."""
    rows: Iterable[Any]
    if config.environment is not None:
        rows = environment_tasks(config.environment, "eval" if config.split == "eval" else "train")
    elif names_a_function(config.path):
        rows = _from_function(config, seed)
    elif is_data_file(config.path):
        for name in ("split", "subset"):
            if getattr(config, name) is not None:
                raise DataError(
                    f"{config.path} is a file, which has no {name}; leave data.{name} out, or name the file "
                    "that has these tasks"
                )
        rows = _from_file(Path(config.path))
    else:
        rows = _from_datasets(config.path, config.path, config.subset, split=config.split or "train")
    named = config.environment.use if config.environment is not None else config.path
    tasks = tuple(_task(row, number, config.id) for number, row in enumerate(rows))
    if not tasks:
        raise DataError(f"{named} has no tasks")
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:
            raise DataError(f"{named} has the id {task.id!r} twice (column {config.id!r})")
        seen.add(task.id)
    return tasks


def _from_function(config: TasksConfig, seed: int) -> Iterable[Any]:
    function = load_function(config.path, DataError)
    offered = {"split": config.split, "seed": seed}
    if config.split is None:
        del offered["split"]
    try:
        rows = function(**_accepted(function, offered))
        if isinstance(rows, Iterable) and not isinstance(rows, str | Mapping):
            return list(rows)  # a generator may raise too
    except Exception as error:
        raise DataError(f"{config.path} raised {describe(error)}") from error
    raise DataError(f"{config.path} must return a sequence of tasks, got {type(rows).__name__}")


def _accepted(function: Callable[..., Any], offered: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return offered
    keywords = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {name: value for name, value in offered.items() if name in keywords}


def _from_file(path: Path) -> Iterable[Any]:
    """Return the rows of a file. JSON is read as it is: no value changes its type, and no field is added."""
    if not path.is_file():
        raise DataError(
            f"there is no data file {path.absolute()}; a relative path in a configuration file is relative "
            "to the file's folder, and one in an override to the working directory"
        )
    if path.stat().st_size == 0:
        raise DataError(f"the data file {path} is empty")
    if path.suffix == ".parquet":
        return _from_datasets(str(path), "parquet", data_files=str(path), split="train")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not a UTF-8 text: {error}") from None
    if path.suffix == ".csv":
        return _from_csv(path, text)
    if path.suffix == ".json" and text.lstrip().startswith("["):
        return _json(text, str(path))
    lines = enumerate(text.split("\n"), start=1)
    return [_json(line, f"{path}, line {number}") for number, line in lines if line.strip()]


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not valid JSON: {error}") from None


def _from_csv(path: Path, text: str) -> Iterable[Any]:
    """Return a dict of strings for each row below the header."""
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        for row in reader:
            if None in row or None in row.values():
                raise DataError(
                    f"{path}, line {reader.line_num}: expected {len(reader.fieldnames or ())} fields, as the "
                    "header has"
                )
            yield row
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num} is not valid CSV: {error}") from None


def _from_datasets(name: str, *arguments: Any, **options: Any) -> Iterable[Any]:
    import datasets  # imported late: it takes a second, and most sources do not need it

    datasets.disable_progress_bars()  # progress bars would fill the log
    try:
        return datasets.load_dataset(*arguments, **options)
    except Exception as error:  # the library raises any error of its readers and the Hub
        raise DataError(
            f"cannot load {name!r} ({type(error).__name__}: {error}); expected a .jsonl, .json, "
            ".parquet or .csv file, a data set of the Hugging Face Hub, module:function or file.py:function. "
            "Without a network, save the data set as a .parquet file where there is one, and name the file"
        ) from error


def _task(row: Any, number: int, id_column: str) -> Task:
    if isinstance(row, Task):
        return row
    if not isinstance(row, Mapping):
        raise DataError(f"row {number} must be a dict or a Task, got {type(row).__name__}")
    try:
        json.dumps(row, allow_nan=False, ensure_ascii=False).encode()  # a lone surrogate has no UTF-8
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"row {number} cannot be written as JSON, as every task must be: {error}") from error
    task_id = row.get(id_column)
    if task_id is None and id_column != "id":
        raise DataError(f"row {number} has no id column {id_column!r}; it has {', '.join(map(str, row))}")
    return Task(id=str(number if task_id is None else task_id), input=dict(row))
