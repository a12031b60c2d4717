"""The simulator against runs that were measured: `python -m benchmarks simulator --save` wrote them down."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.simulator import BOUNDS, Comparison, read_comparison

MEASURED = Path(__file__).with_name("measured_runs.json.gz")


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return read_comparison(MEASURED)


@pytest.mark.parametrize("bound", BOUNDS[1:])
def test_the_shape_is_that_of_the_measured_runs(comparison: Comparison, bound: int) -> None:
    """It is given the trace of one of them alone."""
    assert comparison.shape(bound) == pytest.approx(1, abs=0.15)


def test_the_speed_of_a_synchronous_run_is_foretold_by_an_asynchronous_one(comparison: Comparison) -> None:
    assert comparison.simulated(0) == pytest.approx(comparison.measured[0], rel=0.15)


def test_what_is_saved_is_read_again(comparison: Comparison, tmp_path: Path) -> None:
    comparison.save(tmp_path / "again.gz")
    again = read_comparison(tmp_path / "again.gz")
    assert again == comparison and len(comparison.work.plans) > 500
