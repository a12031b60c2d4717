"""What an evaluation has played so far, in its store or in the journal of an endpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from areal_agents.core.rollout import Split, Task
from areal_agents.errors import ConfigError
from areal_agents.evaluation.endpoint.journal import read_journal
from areal_agents.evaluation.results import AttemptResult, TaskResult
from areal_agents.evaluation.stored import SCORED, finished_episodes, results_in
from areal_agents.rewards import FinishedEpisode
from areal_agents.store import Store


@dataclass(frozen=True, slots=True)
class Played:
    """The ended attempts of an evaluation.

    Attributes:
        attempts: by (task id, attempt); of repetitions the last one.
        episodes: returns what a function of finished episodes is given, for each of some episode ids.
    """

    attempts: Mapping[tuple[str, int], AttemptResult]
    episodes: Callable[[Sequence[str]], Iterator[FinishedEpisode]]

    @property
    def scored(self) -> list[str]:
        """The ids of the episodes that have not failed."""
        return [attempt.episode for attempt in self.attempts.values() if attempt.status in SCORED]

    def is_complete(self, tasks: Sequence[Task], attempts: int) -> bool:
        """Whether every attempt at these tasks has a scored episode."""
        wanted = [(task.id, index) for task in tasks for index in range(attempts)]
        return bool(tasks) and all(
            key in self.attempts and self.attempts[key].status in SCORED for key in wanted
        )

    def results(
        self,
        tasks: Sequence[Task],
        attempts: int,
        *,
        answers: Mapping[str, str | None],
        by: Mapping[str, Mapping[str, str]],
    ) -> tuple[TaskResult, ...]:
        """Return the results of all tasks.

        Args:
            answers: the answer of an episode, by its id.
            by: the value for each task id, by the name of the field.

        Raises:
            ConfigError: an attempt has no ended episode.
        """
        results = []
        for task in tasks:
            missing = [index for index in range(attempts) if (task.id, index) not in self.attempts]
            if missing:
                raise ConfigError(
                    f"attempt {missing[0]} at task {task.id} has not ended; the same command continues"
                )
            found = [self.attempts[task.id, index] for index in range(attempts)]
            of_task = tuple(replace(attempt, answer=answers.get(attempt.episode)) for attempt in found)
            values = {name: of_tasks[task.id] for name, of_tasks in by.items()}
            results.append(TaskResult(task.id, of_task, values))
        return tuple(results)


@contextmanager
def played_in_store(path: Path, label: str, split: Split) -> Iterator[Played]:
    """Read what an evaluation has played from its store; nothing before there is one."""
    if not path.exists():
        yield Played({}, lambda ids: iter(()))
        return
    with Store.open(path) as store:
        yield Played(results_in(store, label, split), lambda ids: finished_episodes(store, ids))


@contextmanager
def played_in_journal(path: Path) -> Iterator[Played]:
    """Read what an evaluation of an endpoint has played."""
    latest = read_journal(path)
    by_id = {entry.result.episode: entry for entry in latest.values()}
    yield Played(
        {key: entry.result for key, entry in latest.items()},
        lambda ids: (by_id[id].finished() for id in ids),
    )
