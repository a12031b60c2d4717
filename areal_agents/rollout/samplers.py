"""Samplers choose the task of the next training group: in epochs, by difficulty, or from several sources.

The choice depends on the seed, on the groups that were begun, and, with difficulty, on their scores, and on
nothing else; so a restarted run continues with the same shares and pools.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol, get_args

from areal_agents.core.rollout import Task, training_group_id
from areal_agents.rollout.config import DifficultyConfig
from areal_agents.rollout.data import TaskMixture, TaskSource, most_behind

logger = logging.getLogger(__name__)

# Called with the ids of groups. Returns the scores of each one that has ended: those of its episodes if it is
# complete, and an empty sequence if it was dropped.
Scores = Callable[[Sequence[str]], Mapping[str, Sequence[float]]]
Pool = Literal["new", "learnable", "unsolved", "solved"]
POOLS: tuple[Pool, ...] = get_args(Pool)
_DECAY = 0.5  # weight of a group in a task's solve rate, relative to the task's next group
_MIN_WEIGHT = 0.05  # weight of a learnable task whose solve rate is furthest from the target
_MOST_RECENT = 256  # most tasks that wait before they are begun again
_LOG_PERIOD = 100  # groups between two lines of the log
_MOST_BEHIND = 8  # groups that a source can lack when a run stops, for example because they have no row yet


class Sampler(Protocol):
    """Chooses tasks."""

    def next(self) -> tuple[Task, int] | None:
        """Return the task of the next group, and how often it was begun before; None: none is left."""
        ...

    def note_begun(self, task_id: str, epoch: int) -> None:
        """Record a group that another process has begun, and that this sampler has not chosen."""
        ...


def sampler_of(
    tasks: TaskSource | TaskMixture, started: Sequence[tuple[str, int]], scores: Scores
) -> Sampler:
    """Return the sampler of the configuration.

    Args:
        started: (task id, epoch) of the groups that were begun, oldest first.
        scores: see `Scores`.
    """
    if isinstance(tasks, TaskMixture):
        return MixtureSampler(tasks, started, scores)
    if tasks.difficulty is not None:
        return DifficultySampler(tasks, tasks.difficulty, started, scores)
    return UniformSampler(tasks, started)


class UniformSampler:
    """Takes every task once in an epoch, in the order of `TaskSource.epoch`."""

    def __init__(self, tasks: TaskSource, started: Sequence[tuple[str, int]]) -> None:
        self._started = set(started)
        self._tasks = tasks.stream(self._started)

    def next(self) -> tuple[Task, int] | None:
        """See `Sampler`."""
        return next(self._tasks, None)

    def note_begun(self, task_id: str, epoch: int) -> None:
        """See `Sampler`."""
        self._started.add((task_id, epoch))


class DifficultySampler:
    """Chooses a pool at random by the weights of the configuration, then a task of that pool.

    The latest complete group of a task decides its pool: new (the task has no such group), solved (every
    episode solved it), unsolved (none did) or learnable (some did). New tasks come in the order of an epoch.
    A learnable task is the likelier, the nearer its solve rate is to the target; in the rate, older groups
    have less weight. The tasks of the other pools are equally likely. A task that was begun recently waits
    while there are others.
    """

    def __init__(
        self,
        tasks: TaskSource,
        config: DifficultyConfig,
        started: Sequence[tuple[str, int]],
        scores: Scores,
    ) -> None:
        self._config = config
        self._seed = tasks.seed
        self._scores = scores
        self._tasks = {task.id: task for task in tasks.tasks}
        self._begun: dict[str, int] = dict.fromkeys(self._tasks, 0)
        self._recent: deque[str] = deque(maxlen=min(_MOST_RECENT, len(self._tasks) // 4))
        self._pending: dict[str, str] = {}  # the task of each group whose scores are not known
        self._sums: dict[str, tuple[float, float]] = {}  # of a task: decayed counts of solved and of all
        self._pools: dict[Pool, dict[str, None]] = {pool: {} for pool in POOLS}
        self._pool_of: dict[str, Pool] = {}
        self._total = 0  # groups that were begun
        for task in tasks.epoch(0):
            self._move(task.id, "new")
        for task_id, epoch in started:
            self.note_begun(task_id, epoch)

    def note_begun(self, task_id: str, epoch: int) -> None:
        """See `Sampler`."""
        if task_id in self._tasks:
            self._begin(task_id, epoch)

    def next(self) -> tuple[Task, int] | None:
        """See `Sampler`. There is always one."""
        self._read_scores()
        if self._total % _LOG_PERIOD == 0:
            logger.info(
                "tasks by difficulty: %s", ", ".join(f"{n} {pool}" for pool, n in self.counts().items())
            )
        random_ = random.Random(f"{self._seed}/{self._total}")
        recent = set(self._recent)
        free = {pool: [one for one in ids if one not in recent] for pool, ids in self._pools.items()}
        weights = [getattr(self._config, pool) if free[pool] else 0.0 for pool in POOLS]
        if any(weights):
            pool = random_.choices(POOLS, weights)[0]
            chosen = self._choose(pool, free[pool], random_)
        else:  # every task of the pools with a weight was begun recently, if they have any
            weighted = [one for pool in POOLS if getattr(self._config, pool) for one in self._pools[pool]]
            chosen = random_.choice(weighted or list(self._tasks))
        epoch = self._begun[chosen]
        self._begin(chosen, epoch)
        return self._tasks[chosen], epoch

    def counts(self) -> dict[Pool, int]:
        """Return how many tasks are in each pool."""
        return {pool: len(ids) for pool, ids in self._pools.items()}

    def _choose(self, pool: Pool, ids: Sequence[str], random_: random.Random) -> str:
        if pool == "new":
            return ids[0]
        if pool != "learnable":
            return random_.choice(ids)
        target = self._config.target
        furthest = max(target, 1 - target)
        rates = [solved / episodes for solved, episodes in (self._sums[one] for one in ids)]
        weights = [max(_MIN_WEIGHT, 1 - abs(rate - target) / furthest) for rate in rates]
        return random_.choices(ids, weights)[0]

    def _begin(self, task_id: str, epoch: int) -> None:
        """Record that a group of a task was begun."""
        self._begun[task_id] = max(self._begun[task_id], epoch + 1)
        self._recent.append(task_id)
        self._pending[training_group_id(task_id, epoch)] = task_id
        self._total += 1
        self._pools["new"].pop(task_id, None)  # it is in no pool until its first scores are known

    def _read_scores(self) -> None:
        """Move the tasks whose groups have ended since the last call."""
        ended = self._scores(list(self._pending))
        for group in [group for group in self._pending if group in ended]:  # oldest first
            task_id, scores = self._pending.pop(group), ended[group]
            if not scores:
                if task_id not in self._sums:  # none of its groups was ever complete
                    self._move(task_id, "new")
                continue
            solved = sum(score >= self._config.solved_score for score in scores)
            before = self._sums.get(task_id, (0.0, 0.0))
            self._sums[task_id] = (_DECAY * before[0] + solved, _DECAY * before[1] + len(scores))
            self._move(task_id, pool_of(solved, len(scores)))

    def _move(self, task_id: str, pool: Pool) -> None:
        before = self._pool_of.get(task_id)
        if before is not None:
            self._pools[before].pop(task_id, None)
        self._pools[pool][task_id] = None
        self._pool_of[task_id] = pool


class MixtureSampler:
    """Takes the next task from the source that is furthest behind its share of the groups.

    A source that has ended leaves its share to the others. A restart with another source or other weights
    counts from there: what a source had too little before is not made up for. See `most_behind`.
    """

    def __init__(self, mixture: TaskMixture, started: Sequence[tuple[str, int]], scores: Scores) -> None:
        self._weights = [source.weight for source in mixture.sources]
        self._places = {
            task.id: index for index, source in enumerate(mixture.sources) for task in source.tasks
        }
        of_sources: list[list[tuple[str, int]]] = [[] for _ in mixture.sources]
        for task_id, epoch in started:
            if task_id in self._places:
                of_sources[self._places[task_id]].append((task_id, epoch))
        taken = [len(begun) for begun in of_sources]
        furthest = max(count / weight for count, weight in zip(taken, self._weights, strict=True))
        self._taken = [
            max(count, int(furthest * weight) - _MOST_BEHIND)
            for count, weight in zip(taken, self._weights, strict=True)
        ]
        self._samplers = [
            sampler_of(source, begun, scores)
            for source, begun in zip(mixture.sources, of_sources, strict=True)
        ]
        self._left = list(range(len(self._samplers)))

    def next(self) -> tuple[Task, int] | None:
        """See `Sampler`."""
        while self._left:
            index = most_behind(self._weights, self._taken, self._left)
            found = self._samplers[index].next()
            if found is not None:
                self._taken[index] += 1
                return found
            self._left.remove(index)
        return None

    def note_begun(self, task_id: str, epoch: int) -> None:
        """See `Sampler`."""
        index = self._places.get(task_id)
        if index is not None:
            self._taken[index] += 1
            self._samplers[index].note_begun(task_id, epoch)


def pool_of(solved: int, episodes: int) -> Pool:
    """Return the pool of a task of which so many episodes of the latest complete group have solved it."""
    if solved == episodes:
        return "solved"
    return "learnable" if solved else "unsolved"
