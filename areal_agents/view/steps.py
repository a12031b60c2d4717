"""A step for the page and for coding agents: its groups, its metrics, and the last step of its run."""

from __future__ import annotations

from typing import Any

from areal_agents.store import NotFound, pages
from areal_agents.view.runs import Run


def shown_step(run: Run, step: int) -> dict[str, Any]:
    """Return the groups that a step trained on, and its metrics. Raises NotFound if there is no such step."""
    rows = run.rows()
    metrics = next((row for row in reversed(rows) if row["step"] == step), None)
    groups: list[Any] = []
    if metrics is not None or run.rerun is None:  # a rerun has not trained all steps of the run
        with run.episodes.read() as connection:
            groups = [run.with_new_scores(group) for group in pages.groups_of_step(connection, step)]
    if metrics is None and not groups:
        raise NotFound(f"the run has no step {step}; its last is {rows[-1]['step'] if rows else 0}")
    return {"step": step, "last": rows[-1]["step"] if rows else step, "groups": groups, "metrics": metrics}
