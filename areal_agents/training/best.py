"""What a checkpoint is one of the best by (`trainer.keep_best`): its held-out reward, or any metric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areal_agents.errors import TrainingError
from areal_agents.store import Store
from areal_agents.training.heldout import heldout_reward

HELDOUT = "heldout"


@dataclass(frozen=True, slots=True)
class BestMetric:
    """The figure that checkpoints are compared by; more is better.

    Attributes:
        name: of a metric, or "heldout".
        store: of the run; on the first rank only.
    """

    name: str
    store: Store | None

    def check(self, values: Mapping[str, Any]) -> None:
        """TrainingError unless the metrics of a step have it."""
        if self.name != HELDOUT and self.name not in values:
            raise TrainingError(
                f"trainer.best_metric: there is no metric {self.name!r}; choose heldout or one of "
                f"{', '.join(sorted(values))}"
            )

    def score(self, step: int, facts: Mapping[str, Any]) -> float | None:
        """That of the checkpoint of `step`, whose metric is "score" in `facts`; None where there is none."""
        if self.name == HELDOUT and self.store is not None:
            return heldout_reward(self.store, step)
        score = facts["score"]
        return score if isinstance(score, int | float) and math.isfinite(score) else None
