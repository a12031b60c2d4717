"""What the processes of a run did when: steps of the trainer, swaps, evaluations, episodes and deaths."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from areal_agents.store import pages
from areal_agents.view.runs import Run

_BINS = 600  # of the curve of open episodes
_MOST_MARKS = 2_000  # of failed episodes


def timeline_of(run: Run) -> dict[str, Any]:
    """Return spans and marks, in seconds since the epoch. Raises StoreError or ConfigError."""
    rows = run.rows()
    with run.store.read() as connection:
        versions = pages.version_times(connection)
        checkpoints = pages.checkpoint_times(connection)
        evaluations = pages.evaluations(connection)
        opened, ended, failed = pages.episode_times(connection)
    times = [
        *opened[:1].tolist(),
        *(row["time"] - row["step_s"] for row in rows[:1]),
        *(row["time"] for row in rows[-1:]),
        *(published for _, _, published in versions[-1:]),
    ]
    if len(ended):
        times.append(float(ended.max()))
    if times and run.is_running():
        times.append(time.time())
    start, end = (min(times), max(times)) if times else (0.0, 0.0)
    return {
        "start": start,
        "end": end,
        "steps": [_step(row) for row in rows],
        "versions": [{"version": v, "step": s, "time": t} for v, s, t in versions],
        "checkpoints": [{"step": s, "time": t} for s, t in checkpoints],
        "evaluations": [asdict(evaluation) for evaluation in evaluations],
        "open_episodes": _open_episodes(opened, ended, start, end),
        "failed": failed[:_MOST_MARKS].tolist(),
        "events": _events(run),
    }


def _step(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a step: it waits for groups, trains, publishes; generation pauses for the swap."""
    names = ("step", "version", "time", "step_s", "wait_s", "train_s", "publish_s", "pause_s", "rollout_idle")
    return {name: row.get(name) for name in names} | {
        "sampled_tokens": row.get("sampled_tokens"),
        "reward_mean": row.get("reward_mean"),
    }


def _open_episodes(
    opened: np.ndarray, ended: np.ndarray, start: float, end: float
) -> dict[str, Sequence[Any]]:
    """Return how many episodes were open at equally spaced times."""
    if end <= start:
        return {"times": [], "counts": []}
    times = np.linspace(start, end, _BINS)
    counts = np.searchsorted(np.sort(opened), times, "right") - np.searchsorted(
        np.sort(ended), times, "right"
    )
    return {"times": np.round(times, 3).tolist(), "counts": counts.tolist()}


def _events(run: Run) -> list[dict[str, Any]]:
    """Return what the supervisor recorded about its processes; an incomplete last line is left out."""
    if run.folder is None or not run.folder.process_events.exists():
        return []
    whole = run.folder.process_events.read_text(errors="replace").rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]
