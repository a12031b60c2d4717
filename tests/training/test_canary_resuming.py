"""Where a run with a canary starts, given the version rows and checkpoints that a killed run left."""

from __future__ import annotations

import pytest

from areal_agents.errors import TrainingError
from areal_agents.store import ServedVersions, VersionRow
from areal_agents.store.rows import CanaryState
from areal_agents.training.canary.resuming import CanaryStart, find_start
from areal_agents.training.checkpoint.checkpoint import TrainingProgress


def row(version: int, step: int, canary: CanaryState | None = None) -> VersionRow:
    return VersionRow(version, step, f"v{version}", None, 0.0, canary=canary)


def start(rows: list[VersionRow], steps: list[int]) -> CanaryStart:
    """Return the start; the version of a checkpoint is its step + 1."""
    stable = [r for r in rows if r.canary in (None, "promoted")]
    candidate = rows[-1] if rows and rows[-1].canary == "candidate" else None
    served = ServedVersions(stable[-1], candidate) if stable else None
    return find_start(served, rows, steps, lambda step: TrainingProgress(step, step + 1, 7))


def test_a_run_without_a_checkpoint_starts_with_the_initial_weights() -> None:
    assert start([], []).is_new
    again = start([row(0, 0)], [])
    assert (again.is_new, again.load, again.is_saved, again.progress.version) == (False, None, False, 0)


def test_the_comparison_of_a_candidate_without_a_verdict_continues() -> None:
    found = start([row(0, 0), row(4, 3, "candidate")], [0, 3])
    assert (found.load, found.progress.step, found.stable_step) == (3, 3, 0)
    assert found.candidate is not None and found.candidate.version == 4


def test_saved_weights_without_a_row_become_a_candidate() -> None:
    found = start([row(0, 0)], [0, 3])
    assert (found.load, found.progress, found.stable_step) == (3, TrainingProgress(3, 4, 7), 0)


def test_a_run_resumes_from_the_checkpoint_of_a_promotion_or_a_rollback() -> None:
    promoted = [row(0, 0), row(4, 3, "promoted")]
    assert start(promoted, [0, 3]).progress == TrainingProgress(3, 4, 7)
    rolled_back = [*promoted, row(7, 6, "rolled_back"), row(8, 7)]
    found = start(rolled_back, [6, 7])
    assert (found.load, found.progress, found.is_saved) == (7, TrainingProgress(7, 8, 7), True)


def test_a_rollback_without_a_checkpoint_loads_the_weights_before_the_candidate() -> None:
    rows = [row(0, 0), row(4, 3, "promoted"), row(7, 6, "rolled_back"), row(8, 7)]
    found = start(rows, [3, 6])
    assert (found.load, found.progress, found.is_saved) == (3, TrainingProgress(7, 8, 7), False)


@pytest.mark.parametrize(
    ("rows", "steps", "message"),
    [
        (  # a run that had no canary, and was killed
            [row(0, 0), row(1, 1), row(2, 2)],
            [1],
            "the checkpoint of version 2, step 2, is missing",
        ),
        (
            [row(0, 0), row(4, 3, "candidate")],
            [0],
            "version 4 is a candidate, and the checkpoint of step 3 is missing",
        ),
        (
            [row(0, 0), row(4, 3, "candidate")],
            [3],
            "version 4 is a candidate, and the checkpoint of step 0 is missing",
        ),
        (
            [row(0, 0), row(4, 3, "promoted"), row(7, 6, "rolled_back"), row(8, 7)],
            [6],
            "the checkpoint of version 8, step 7, is missing",
        ),
        ([], [3], "there are checkpoints up to step 3, and the store has no version"),
    ],
)
def test_a_missing_checkpoint_is_an_error(rows: list[VersionRow], steps: list[int], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        start(rows, steps)
