"""The simulator is near measured runs, which `python -m benchmarks simulator --save` has recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.simulator import BOUNDS, Comparison, read_comparison

MEASURED = Path(__file__).with_name("measured_runs.json.gz")


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return read_comparison(MEASURED)


@pytest.mark.parametrize("bound", BOUNDS[1:])
def test_the_speedup_over_a_synchronous_run_is_near_the_measured_one(
    comparison: Comparison, bound: int
) -> None:
    """The simulator is given the trace of only one of the runs."""
    assert comparison.shape(bound) == pytest.approx(1, abs=0.15)


def test_the_speed_of_a_synchronous_run_is_predicted_from_an_asynchronous_one(comparison: Comparison) -> None:
    assert comparison.simulated(0) == pytest.approx(comparison.measured[0], rel=0.15)


def test_a_saved_comparison_is_read_unchanged(comparison: Comparison, tmp_path: Path) -> None:
    comparison.save(tmp_path / "again.gz")
    again = read_comparison(tmp_path / "again.gz")
    assert again == comparison and len(comparison.work.plans) > 500
