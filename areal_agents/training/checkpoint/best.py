"""The score that ranks checkpoints for `trainer.keep_best`: the held-out reward, or any metric.

A held-out reward comes from the store, and is None until the evaluation of the step has ended.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areal_agents.errors import TrainingError
from areal_agents.store import Store

HELDOUT = "heldout"


def metric_name(given: str, *, evaluates: bool) -> str:
    """Return the metric that `trainer.best_metric` names; "" is the held-out reward if there is one.

    Args:
        evaluates: whether the run evaluates while it trains.
    """
    return given or (HELDOUT if evaluates else "reward_mean")


@dataclass(frozen=True, slots=True)
class BestMetric:
    """The metric by which checkpoints are compared; larger is better.

    Attributes:
        name: the name of a metric, or "heldout".
        store: the store of the run, on the first rank only.
    """

    name: str
    store: Store | None

    def check(self, values: Mapping[str, Any]) -> None:
        """Raise TrainingError unless the metrics of a step contain it."""
        if self.name != HELDOUT and self.name not in values:
            raise TrainingError(
                f"trainer.best_metric: there is no metric {self.name!r}; choose heldout or one of "
                f"{', '.join(sorted(values))}"
            )

    def score(self, step: int, facts: Mapping[str, Any]) -> float | None:
        """Return the score of the checkpoint `step`, whose metric is "score" in `facts`; None if not
        known."""
        if self.name == HELDOUT and self.store is not None:
            return heldout_reward(self.store, step)
        score = facts["score"]
        return score if isinstance(score, int | float) and math.isfinite(score) else None


def heldout_reward(store: Store, step: int) -> float | None:
    """Return the mean score of the newest finished evaluation that began by `step`; None without one.

    An evaluation is finished when none of its episodes is open and it has as many attempts as the previous
    one; while it runs or after an interruption, it has fewer. A failed episode counts as 0, and an attempt
    that was repeated counts by its last episode. The evaluation of the initial weights belongs to no
    checkpoint.
    """
    scores: dict[int, dict[tuple[str, int], float]] = {}
    going_on: set[int] = set()
    for episode in store.episodes(split="eval", metadata={"source": "rollout"}):
        at = episode.metadata.get("step", 0)
        if not 0 <= at <= step or episode.status == "aborted":
            continue
        if episode.status == "open":
            going_on.add(at)
        failed = episode.status == "failed"
        attempt = episode.task_id, episode.metadata.get("attempt", 0)
        scores.setdefault(at, {})[attempt] = 0.0 if failed else episode.score or 0.0
    newest: dict[tuple[str, int], float] = {}
    attempts_before = 0
    for at, of_attempts in sorted(scores.items()):
        if at > 0 and at not in going_on and len(of_attempts) >= attempts_before:
            newest = of_attempts
        attempts_before = len(of_attempts)
    return math.fsum(newest.values()) / len(newest) if newest else None
