"""Kills each kind of process once, in a real run and in a proxy of two workers; `make chaos` is longer."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_chaos import kill_each, kill_proxy_each, main


@pytest.mark.timeout(900)
def test_nothing_is_lost_when_each_process_of_a_run_is_killed(tmp_path: Path) -> None:
    counts = kill_each(tmp_path, seed=0)
    assert counts.faults == {}
    assert {"agent", "engine", "worker", "proxy", "rollout"} < set(counts.deaths) and counts.starts == 2
    assert counts.tokens_checked > 200 and counts.telling > 0.02  # most tokens are of version 0
    assert counts.episodes_completed > 4 and counts.completions_answered > 12


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_nothing_is_lost_when_workers_and_supervisors_of_a_proxy_are_killed(tmp_path: Path) -> None:
    counts = kill_proxy_each(tmp_path, seed=0)
    assert counts.faults == {}
    assert counts.deaths == {"worker": 2, "supervisor": 3}
    assert counts.retries > 0 and counts.replies > 24 and counts.rewards == counts.replies


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nothing_is_lost_in_the_long_form_of_chaos() -> None:
    assert main(["--minutes", "8", "--seed", "7"]) == 0
