"""What training did with the tokens of turns, from the files that the trainer writes to the run folder."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from areal_agents.training.records.files import TurnRecord, read_records
from areal_agents.view.runs import Run

_DIGITS = 7  # after the point; shares of the loss are small
_VALUES = ("advantage", "proximal", "current", "ratio", "weight", "loss_weight", "loss", "reference", "value")


def trained_turns(run: Run, turn_ids: Collection[str], steps: Collection[int]) -> dict[str, dict[str, Any]]:
    """Return by turn what the first of these steps that recorded it did with each of its sampled tokens.

    Turns without a record are left out: they were not in a batch, or the run keeps no records of the step.
    Raises ConfigError if a file cannot be read.
    """
    if run.folder is None or not steps:
        return {}
    found: dict[str, dict[str, Any]] = {}
    for record in read_records(run.folder.root, turn_ids=turn_ids, steps=steps):
        found.setdefault(record.turn_id, _shown(record))
    return found


def _shown(record: TurnRecord) -> dict[str, Any]:
    """Return a record as columns with a value for each sampled token; a column without any is null."""
    columns = {
        name: None if np.isnan(values).all() else np.round(values.astype(np.float64), _DIGITS).tolist()
        for name, values in record.values.items()
        if name in _VALUES
    }
    return {
        "step": record.step,
        "version": record.version,
        "minibatch": record.minibatch,
        "untrained": record.untrained,
        "states": list(record.states),
        "clipped": list(record.clipped),
        **columns,
    }
