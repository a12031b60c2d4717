"""Writes the span of a training step, with the publication of its weights as a child."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_agents.telemetry.spans import Spans

_OF_STEP = (
    "step", "loss", "grad_norm", "tokens", "reward_mean", "episodes", "staleness_mean", "wait_s", "train_s",
)  # fmt: skip
_OF_PUBLICATION = ("pause_s", "publish_bytes", "engines_left_out")


def export_step(
    spans: Spans,
    values: Mapping[str, Any],
    *,
    began_s: float,
    ended_s: float,
    published_s: tuple[float, float] | None,
) -> None:
    """Write the spans of a step.

    Args:
        values: the metrics of the step.
        began_s, ended_s: seconds since the epoch.
        published_s: when the publication of its weights began and ended; None: they were not published.
    """

    def named(names: tuple[str, ...]) -> dict[str, Any]:
        known = {name: values[name] for name in names if math.isfinite(values[name])}
        version = {"areal_agents.policy_version": values["version"]}
        return version | {f"areal_agents.{name}": value for name, value in known.items()}

    step = spans.add("train_step", start_s=began_s, end_s=ended_s, attributes=named(_OF_STEP))
    if published_s is not None:
        began, ended = published_s
        spans.add(
            "publish_weights", start_s=began, end_s=ended, parent=step, attributes=named(_OF_PUBLICATION)
        )
