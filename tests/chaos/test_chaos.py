"""kill -9 of everything, once each, in one real run; the long form is `make chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_chaos import kill_each, main


@pytest.mark.timeout(900)
def test_nothing_is_lost_when_anything_is_killed(tmp_path: Path) -> None:
    counts = kill_each(tmp_path, seed=0)
    assert counts.faults == {}
    assert {"agent", "engine", "proxy", "rollout"} < set(counts.deaths) and counts.starts == 2
    assert counts.tokens_checked > 200 and counts.telling > 0.02  # most are of version 0
    assert counts.episodes_completed > 4 and counts.completions_answered > 12


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_chaos_in_its_long_form() -> None:
    assert main(["--minutes", "8", "--seed", "7"]) == 0
