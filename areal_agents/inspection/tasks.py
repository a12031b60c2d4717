"""Statistics of the tasks that training has begun: what each has earned, and its pool by difficulty.

They follow from the rows of the store, so they can be looked at while a run trains. The pool is what
`sampler: difficulty` reads from the same rows, whether the run samples by it or not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from areal_agents.rollout.config import DifficultyConfig
from areal_agents.rollout.samplers import POOLS, Pool, pool_of
from areal_agents.store import Store, TaskGroup

Order = Literal["begun", "task", "pool", "attempts", "reward", "last", "solved", "version"]


@dataclass(slots=True)
class TaskStatistics:
    """What training has seen of one task.

    Attributes:
        task: its id, which begins with the name of the source if there are several.
        groups: the groups that were begun.
        attempts: the episodes of its complete groups.
        reward: the mean score of these.
        last_reward: the mean score of the latest complete group; None: no group is complete.
        solved: the share of all attempts that solved the task.
        pool: new (no group is complete), or, by the latest complete group, learnable, unsolved or solved.
        version: the newest policy version that sampled a token of the latest group; None: it has none.
    """

    task: str
    groups: int = 0
    attempts: int = 0
    reward: float | None = None
    last_reward: float | None = None
    solved: float | None = None
    pool: Pool = "new"
    version: int | None = None


def statistics_of(store: Store, config: Mapping[str, Any]) -> list[TaskStatistics]:
    """Return the statistics of every task that training has begun, that of the newest group last.

    Args:
        store: the store.
        config: the configuration of its run, which says what score has solved a task; {}: 1 has.
    """
    groups: dict[str, list[TaskGroup]] = {}
    for group in store.task_groups():
        before = groups.pop(group.task_id, [])  # a task moves to the end with each group
        groups[group.task_id] = [*before, group]
    scores = store.group_scores([group.id for of_task in groups.values() for group in of_task])
    solved_score = _SolvedScores(config)
    return [_of_task(task, of_task, scores, solved_score.of(task)) for task, of_task in groups.items()]


def ordered(found: Iterable[TaskStatistics], order: Order) -> list[TaskStatistics]:
    """Return them in another order: the largest first, except names, and tasks without a value last."""
    rows = list(found)
    if order == "begun":
        return rows
    if order == "task":
        return sorted(rows, key=lambda one: one.task)
    if order == "pool":
        return sorted(rows, key=lambda one: (POOLS.index(one.pool), one.task))
    attribute = "last_reward" if order == "last" else order

    def value(one: TaskStatistics) -> float:
        found = getattr(one, attribute)
        return -math.inf if found is None else found

    return sorted(rows, key=value, reverse=True)


def pool_sizes(found: Iterable[TaskStatistics]) -> dict[Pool, int]:
    """Return how many of these tasks are in each pool."""
    sizes = dict.fromkeys(POOLS, 0)
    for one in found:
        sizes[one.pool] += 1
    return sizes


class _SolvedScores:
    """The lowest score that has solved a task, by the source of the task."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        data = config.get("data") or {}
        self._alone = _solved_score(data)
        self._of_sources = {source["name"]: _solved_score(source) for source in data.get("sources") or ()}

    def of(self, task_id: str) -> float:
        return self._of_sources.get(task_id.partition("/")[0], self._alone)


def _solved_score(data: Mapping[str, Any]) -> float:
    given = (data.get("difficulty") or {}).get("solved_score")
    return DifficultyConfig().solved_score if given is None else float(given)


def _of_task(
    task: str, groups: Sequence[TaskGroup], scores: Mapping[str, Sequence[float]], solved_score: float
) -> TaskStatistics:
    complete = [scores[group.id] for group in groups if scores.get(group.id)]
    every = [score for group in complete for score in group]
    row = TaskStatistics(task, groups=len(groups), attempts=len(every), version=groups[-1].version)
    if complete:
        row.reward = sum(every) / len(every)
        row.last_reward = sum(complete[-1]) / len(complete[-1])
        row.solved = sum(score >= solved_score for score in every) / len(every)
        row.pool = pool_of(sum(score >= solved_score for score in complete[-1]), len(complete[-1]))
    return row
