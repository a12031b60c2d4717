"""Recomputes the rewards of stored episodes with a reward function, without a model.

The store stays as it is: it records what a run was trained on. The new rewards go to a file of their own,
beside the old scores.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from areal_agents.core.rollout import RecordedEpisode
from areal_agents.errors import ConfigError
from areal_agents.evaluation.estimators import sign_flip_p, t_interval
from areal_agents.evaluation.scoring import Scored, ScoringFunction, score
from areal_agents.evaluation.stored import SCORED, stored_episode
from areal_agents.rewards import FinishedEpisode
from areal_agents.rollout.config import RewardConfig
from areal_agents.store import EpisodeSummary
from areal_agents.whole_files import write_whole

FORMAT = "areal-agents rescoring 1"
RETURN = "return"


@dataclass(frozen=True, slots=True)
class Rescored:
    """One episode with its old and its new score.

    Attributes:
        old: the score in the store; None if it has no reward.
        new: the sum of what the function returned; None if the function failed.
        rewards: what it returned, by name.
        error: why it failed; None if it did not.
    """

    episode: str
    task: str
    group: str | None
    index: int
    split: str
    status: str
    old: float | None
    new: float | None
    rewards: Mapping[str, float]
    error: str | None


@dataclass(frozen=True, slots=True)
class Rescoring:
    """The new rewards of some episodes.

    Attributes:
        source: the store or the run, as the user named it.
        reward: the settings of the reward function.
        mean_old, mean_new: the means over tasks of the mean score of a task's episodes, of the episodes that
            have both scores; None without any. A task weighs the same however many episodes it has, as in
            the interval.
        changed: the number of episodes whose score differs.
        failed: the number of episodes for which the function failed.
        low, high: the interval of mean_new - mean_old; None where none can be computed.
        p: the p-value of a paired permutation test over tasks.
    """

    source: str
    reward: Mapping[str, Any]
    episodes: tuple[Rescored, ...]
    mean_old: float | None
    mean_new: float | None
    changed: int
    failed: int
    low: float | None
    high: float | None
    p: float

    def write(self, path: Path) -> None:
        """Write everything as one JSON file, whole or not at all."""
        tree = {"format": FORMAT, **asdict(self)}
        write_whole(path, json.dumps(tree, indent=1) + "\n")


def rescore(
    load: Callable[[Sequence[str]], Sequence[RecordedEpisode]],
    found: Sequence[EpisodeSummary],
    config: RewardConfig,
    *,
    source: str,
    old_function: bool,
    workers: int,
) -> Rescoring:
    """Call a reward function on the stored episodes that were scored; others have no reward to recompute.

    A function of groups gets the episodes of each group that are in `found`, and an episode outside of groups
    by itself.

    Args:
        load: returns the episodes with the given ids, in the order of the ids.
        old_function: whether the run had a reward function, whose reward named "return" is then not told.
        workers: the most processes.

    Raises:
        ConfigError: none of the episodes was scored.
        RewardError: the function cannot be loaded.
    """
    scored = [summary for summary in found if summary.status in SCORED]
    if not scored:
        raise ConfigError(f"{source} has no finished or truncated episode to rescore, of {len(found)}")
    readable = [summary for summary in scored if summary.turns]
    batches = _batches(readable, grouped=bool(config.group))
    without = (RETURN,) if old_function else ()

    def given() -> Iterator[list[FinishedEpisode]]:
        for batch in batches:
            episodes = load([summary.id for summary in batch])
            yield [stored_episode(episode, without) for episode in episodes]

    values = asyncio.run(score(ScoringFunction.rewards(config), given(), workers=workers))
    by_id = {
        row.episode: row
        for batch, outcome in zip(batches, values, strict=True)
        for row in _rows(batch, outcome)
    }
    removed = Scored(None, "its turns were removed from the store (store.retain)")
    for summary in scored:
        if not summary.turns:
            by_id[summary.id] = next(_rows([summary], removed))
    rows = tuple(by_id[summary.id] for summary in scored)
    both = [row for row in rows if row.old is not None and row.new is not None]
    by_task: dict[str, list[tuple[float, float]]] = {}
    for row in both:
        assert row.old is not None and row.new is not None
        by_task.setdefault(row.task, []).append((row.old, row.new))
    old = [fmean(before for before, _ in of_task) for of_task in by_task.values()]
    new = [fmean(after for _, after in of_task) for of_task in by_task.values()]
    gains = [after - before for before, after in zip(old, new, strict=True)]
    low, high = t_interval(gains) or (None, None)
    return Rescoring(
        source=source,
        reward=config.model_dump(mode="json"),
        episodes=rows,
        mean_old=fmean(old) if old else None,
        mean_new=fmean(new) if new else None,
        changed=sum(row.old != row.new for row in both),
        failed=sum(row.error is not None for row in rows),
        low=low,
        high=high,
        p=sign_flip_p(gains),
    )


def _batches(scored: Sequence[EpisodeSummary], *, grouped: bool) -> list[list[EpisodeSummary]]:
    """Return the episodes of each call: one, or those of a group in the order of their indices."""
    if not grouped:
        return [[summary] for summary in scored]
    by_group: dict[str, list[EpisodeSummary]] = {}
    for summary in scored:
        by_group.setdefault(summary.group_id or f"alone/{summary.id}", []).append(summary)
    return [sorted(batch, key=lambda summary: summary.index) for batch in by_group.values()]


def _rows(batch: Sequence[EpisodeSummary], outcome: Scored) -> Iterator[Rescored]:
    values = outcome.values if outcome.values is not None else (None,) * len(batch)
    for summary, value in zip(batch, values, strict=True):
        rewards = {} if value is None else value if isinstance(value, dict) else {RETURN: value}
        yield Rescored(
            episode=summary.id,
            task=summary.task_id,
            group=summary.group_id,
            index=summary.index,
            split=summary.split,
            status=summary.status,
            old=summary.score,
            new=None if value is None else sum(rewards.values()),
            rewards=rewards,
            error=outcome.error,
        )
