"""What a runner plans for the slots of a group."""

from __future__ import annotations

import pytest

from areal_agents.core.rollout import Task
from areal_agents.rollout.groups.group import GroupRun


def group(size: int = 2, surplus: int = 0) -> GroupRun:
    return GroupRun("t@0", Task("t", {}), size, surplus, 0)


def test_any_slots_complete_a_group() -> None:
    run = group(size=2, surplus=1)
    assert not run.note_scored(2) and run.note_scored(0)


def test_a_slot_is_retried_and_then_its_group_is_dropped() -> None:
    run = group()
    follows = []
    for failures in (0, 1, 2, 3):
        run.failures[1] = failures
        follows.append(run.after_failures(1, retries=2, refill=False))
    assert follows == ["retry", "retry", "retry", "drop"]


def test_a_surplus_is_used_up_before_a_group_is_dropped() -> None:
    run = group(size=2, surplus=1)
    run.failures = [1, 1, 0]
    assert run.after_failures(0, retries=0, refill=False) == "lost"
    assert run.after_failures(0, retries=0, refill=False) == "lost"  # as after a restart
    assert run.after_failures(1, retries=0, refill=False) == "drop"


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_a_group_whose_task_always_fails_is_dropped_after_a_limited_number_of_refills(retries: int) -> None:
    run = group(size=3)
    attempts = 0
    while True:
        place = attempts % 3
        attempts += 1
        run.failures[place] += 1
        follows = run.after_failures(place, retries=retries, refill=True)
        if follows == "drop":
            break
        assert follows == "retry"
    # Three episodes beside those of the slots, each with its own retries, and the failure that exceeds them.
    assert 3 * (retries + 1) < attempts <= 6 * (retries + 1)
    assert sum(failures // (retries + 1) for failures in run.failures) == 4
