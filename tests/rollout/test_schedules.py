"""Random schedules of the whole loop: the bound holds, nothing deadlocks, and no count drifts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_support import World, setting_of

from areal_agents.rollout import control_calls
from areal_agents.rollout.groups import reconciling, settling

STEPS = 3


@pytest.fixture(autouse=True)
def at_once() -> Iterator[None]:
    """Remove the pauses between attempts and between checks for late rewards."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (control_calls, reconciling, settling):
            patch.setattr(module, "backoff_s", lambda failures: 0.0)
        patch.setattr(reconciling, "LOOK_PERIOD_S", 0.0)
        yield


def play(seed: int, *, steps: int = STEPS, **changes: Any) -> World:
    if changes.get("group_size") == 1:  # all groups have equal scores
        changes["refill_equal_groups"] = False
    if changes.get("swap_between_batches"):
        changes["max_staleness"] = 1
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), setting_of(**changes), Random(seed))
        try:
            world.train(steps)
            counts = world.store.group_counts()
            begun = world.store.task_ids_started()
        finally:
            world.close()
    assert world.step == steps and counts["trained"] == len(world.trained)
    assert sorted(set(world.trained.values())) == list(range(1, steps + 1))
    if world.setting.workers > 1:  # they begin the groups that one process would, each once
        assert begun == [(task.id, epoch) for task, epoch in islice(world.tasks.stream(), len(begun))]
    return world


SCHEDULES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10**6),
        "groups": st.integers(1, 2),
        "group_size": st.integers(1, 2),
        "max_staleness": st.sampled_from([0, 1, 2, 4, None]),
        "on_stale": st.sampled_from(["mask", "wait", "drop", "downweight"]),
        "over_sample": st.integers(0, 1),
        "on_failed": st.sampled_from(["refill", "drop"]),
        "refill_equal_groups": st.booleans(),
        "swap_between_batches": st.booleans(),
    }
)


@settings(max_examples=8, deadline=None)
@given(SCHEDULES)
def test_the_bound_holds_and_nothing_deadlocks(schedule: dict[str, Any]) -> None:
    play(**schedule)


@settings(max_examples=8, deadline=None)
@given(SCHEDULES, st.integers(2, 3))
def test_several_processes_keep_the_bound_together(schedule: dict[str, Any], workers: int) -> None:
    """Some of them die meanwhile, and others are considered dead although they run on."""
    play(**schedule, workers=workers)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(SCHEDULES, st.integers(2, 4))
def test_several_processes_keep_the_bound_together_in_many_more_schedules(
    schedule: dict[str, Any], workers: int
) -> None:
    play(**schedule, workers=workers, steps=6)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(SCHEDULES, st.integers(1, 3), st.integers(1, 3))
def test_the_bound_holds_in_many_more_schedules(
    schedule: dict[str, Any], groups: int, group_size: int
) -> None:
    play(**{**schedule, "groups": groups, "group_size": group_size}, steps=6)


def test_with_max_staleness_0_every_token_is_of_the_version_that_it_trains() -> None:
    world = play(2, max_staleness=0, over_sample=1, refill_equal_groups=True, deaths=0, changes=False)
    assert all(batch.staleness.staleness.max(initial=0) == 0 for batch in world.batches)
    assert all(batch.staleness.masked_tokens == batch.stale_groups == 0 for batch in world.batches)


def test_waiting_loses_nothing_where_masking_does() -> None:
    """This holds for a run without restarts, where each version is one trained batch."""

    def lost(on_stale: str, seed: int) -> int:
        world = play(seed, groups=1, max_staleness=1, on_stale=on_stale, steps=5, deaths=0, changes=False)
        return sum(batch.staleness.masked_tokens + batch.stale_groups for batch in world.batches)

    seed = next(seed for seed in range(2, 30) if lost("mask", seed))
    assert lost("wait", seed) == 0


def test_weights_swap_between_batches_only() -> None:
    """`World` checks that no episode runs at a swap, so each episode is of one version."""
    world = play(4, groups=1, max_staleness=1, swap_between_batches=True, steps=4, deaths=0, changes=False)
    for batch in world.batches[1:]:
        assert set(batch.staleness.staleness.tolist()) <= {0, 1}
        for sample in batch.samples:
            assert len(set(sample.versions[sample.loss_mask].tolist())) == 1
