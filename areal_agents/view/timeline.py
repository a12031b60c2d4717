"""What the processes of a run did when: steps of the trainer, swaps, evaluations, episodes and deaths."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from areal_agents.errors import ConfigError
from areal_agents.store import pages
from areal_agents.view.metrics import columns_of
from areal_agents.view.runs import Run

_PARTS = 600  # of the time of a run, in each of which the open episodes are counted
_MOST_FAILED = 2_000  # failed episodes that are marked


def timeline_of(run: Run) -> dict[str, Any]:
    """Return spans and marks, in seconds since the epoch. Raises StoreError or ConfigError."""
    rows = run.rows()
    with run.store.read() as connection:
        versions = pages.version_times(connection)
        checkpoints = pages.checkpoint_times(connection)
        evaluations = pages.evaluations(connection)
        episodes = pages.open_episodes_by_time(connection, _PARTS, _MOST_FAILED)
    times = [published for _, _, published in versions[-1:]]
    if rows:
        (first_s,) = columns_of(rows[:1], ["step_s"])["step_s"]
        times += [rows[0]["time"] - (first_s or 0.0), rows[-1]["time"]]
    if episodes is not None:
        times += [episodes.start, episodes.end]
    if times and run.is_running():
        times.append(time.time())
    return {
        "start": min(times, default=0.0),
        "end": max(times, default=0.0),
        "steps": [_step(row) for row in rows],
        "versions": [{"version": v, "step": s, "time": t} for v, s, t in versions],
        "checkpoints": [{"step": s, "time": t} for s, t in checkpoints],
        "evaluations": [asdict(evaluation) for evaluation in evaluations],
        "open_episodes": asdict(episodes) if episodes is not None else None,
        "events": _events(run),
    }


def _step(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a step: it waits for groups, trains, publishes; generation pauses for the swap."""
    names = ("step", "version", "time", "step_s", "wait_s", "train_s", "publish_s", "pause_s", "rollout_idle")
    return {name: row.get(name) for name in names} | {
        "sampled_tokens": row.get("sampled_tokens"),
        "reward_mean": row.get("reward_mean"),
    }


def _events(run: Run) -> list[dict[str, Any]]:
    """Return what the supervisor recorded about its processes; an incomplete last line is left out."""
    if run.folder is None or not run.folder.process_events.exists():
        return []
    path = run.folder.process_events
    whole = path.read_text(errors="replace").rpartition("\n")[0]
    try:
        return [json.loads(line) for line in whole.splitlines()]
    except ValueError as error:
        raise ConfigError(f"{path} is damaged, as a full disk leaves it; remove it: {error}") from None
