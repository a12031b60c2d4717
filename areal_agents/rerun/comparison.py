"""The metrics of a run and of its rerun side by side, step by step.

Only metrics that follow from the batch and the weights are compared. Durations, memory and the state of the
queue depend on the collection of a batch, which a rerun does not repeat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

# Printed in this order if either has a value other than 0; --json has all metrics.
SHOWN = (
    "reward_mean", "loss", "grad_norm", "lr", "entropy", "tokens", "groups_equal_dropped",
    "clip_fraction", "ratio_mean", "kl_behavior_k3", "kl_reference", "logprob_diff_mean",
    "weight_mean", "weight_capped", "ess", "rejected_tokens", "dropped_tokens", "groups_bad",
    "value_loss", "explained_variance", "dpo_loss", "dpo_accuracy", "dpo_margin", "observation_loss",
)  # fmt: skip
_OF_THE_QUEUE = frozenset(
    {"groups_refilled", "stale_groups_dropped", "failed_episodes", "stale_share_by_length", "version"}
)


@dataclass(frozen=True, slots=True)
class StepPair:
    """The comparable metrics of one step; `original` is empty if the run's metrics lack the step."""

    step: int
    original: Mapping[str, Any]
    rerun: Mapping[str, Any]

    @property
    def is_same(self) -> bool:
        """Whether all metrics are equal."""
        return self.original == self.rerun


def side_by_side(original: Sequence[Mapping[str, Any]], rerun: Sequence[Mapping[str, Any]]) -> list[StepPair]:
    """Pair the metrics of each step of a rerun with those of the same step of the run."""
    from areal_agents.training.metrics.step_metrics import SECTIONS

    names = [
        name
        for section in ("policy", "data")
        for name in SECTIONS[section]
        if name not in _OF_THE_QUEUE and not name.startswith("queue_")
    ]
    before = {row["step"]: row for row in original}

    def compared(row: Mapping[str, Any]) -> dict[str, Any]:
        return {name: row[name] for name in names if name in row}

    return [StepPair(row["step"], compared(before.get(row["step"], {})), compared(row)) for row in rerun]


def draw_side_by_side(pairs: Sequence[StepPair], console: Console) -> None:
    """Print the first step, the last step, and the mean over all steps."""
    if all(pair.is_same for pair in pairs):
        console.print(
            f"the same as the run: all {len(pairs[0].rerun)} metrics of the batch and the policy are equal "
            "in each step"
        )
    first, last = pairs[0], pairs[-1]
    table = Table("metric", title="the run and its rerun")
    for name in (f"step {first.step}", f"step {last.step}", f"mean of {len(pairs)} steps"):
        table.add_column(f"{name}: run", justify="right")
        table.add_column("rerun", justify="right")
    for name in SHOWN:
        columns = [
            (_number(pair.original.get(name)), _number(pair.rerun.get(name))) for pair in (first, last)
        ]
        columns.append((_mean([p.original for p in pairs], name), _mean([p.rerun for p in pairs], name)))
        if any(value for column in columns for value in column):
            table.add_row(name, *(_text(value) for column in columns for value in column))
    console.print(table)


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The mean over the steps that have a value."""
    known = [value for row in rows if (value := _number(row.get(name))) is not None]
    return fmean(known) if known else None


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) else None


def _text(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
