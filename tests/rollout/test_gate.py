"""The gate alone; `test_schedules.py` tests it together with the rest of the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_agents.core.rollout import Task
from areal_agents.rollout.config import RolloutConfig
from areal_agents.rollout.data import TaskSource
from areal_agents.rollout.groups.gate import admissible_groups
from areal_agents.rollout.groups.submission import Submission
from areal_agents.store import NewEpisode, Store


@pytest.mark.parametrize(
    ("submitted", "groups", "max_staleness", "expected"),
    [(0, 8, 0, 8), (8, 8, 0, 0), (8, 8, 1, 8), (15, 8, 1, 1), (16, 8, 1, 0), (40, 8, 1, 0), (3, 1, 4, 2)],
)
def test_groups_are_admitted_up_to_the_staleness_bound(
    submitted: int, groups: int, max_staleness: int, expected: int
) -> None:
    room = admissible_groups(submitted=submitted, groups=groups, max_staleness=max_staleness, needed=1)
    assert room == expected


@pytest.mark.parametrize(("submitted", "needed", "expected"), [(0, 80, 80), (79, 80, 1), (90, 80, 0)])
def test_without_a_bound_as_many_groups_are_admitted_as_the_run_needs(
    submitted: int, needed: int, expected: int
) -> None:
    room = admissible_groups(submitted=submitted, groups=8, max_staleness=None, needed=needed)
    assert room == expected


@pytest.mark.parametrize("bad", [{"submitted": -1}, {"groups": 0}, {"max_staleness": -1}])
def test_invalid_counts_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected submitted"):
        admissible_groups(**{"submitted": 0, "groups": 1, "max_staleness": 0, "needed": 1, **bad})


@settings(max_examples=100, deadline=None)
@given(
    groups=st.integers(1, 5),
    max_staleness=st.integers(0, 4),
    finishing=st.lists(st.integers(0, 10**6), min_size=1, max_size=200),
)
def test_in_order_completion_is_never_staler_than_eta(
    groups: int, max_staleness: int, finishing: list[int]
) -> None:
    """The paper's bound: when groups complete in the order of submission, staleness never exceeds η."""
    alive: list[int] = []
    complete = version = 0
    for choice in finishing:
        room = admissible_groups(submitted=len(alive), groups=groups, max_staleness=max_staleness, needed=0)
        alive += [version] * min(room, choice % 7)
        complete = min(len(alive), complete + choice % 3)
        if complete >= groups:
            batch, alive = alive[:groups], alive[groups:]
            complete -= groups
            assert all(version - submitted <= max_staleness for submitted in batch)
            version += 1


@pytest.mark.parametrize(("max_staleness", "held"), [(0, 3), (1, 1), (2, 0), (None, 0)])
def test_groups_beyond_the_gate_are_held_back(tmp_path: Path, max_staleness: int | None, held: int) -> None:
    """A resume or a smaller batch size may leave too many groups, of which the newest ones wait."""
    config = RolloutConfig(groups=2, group_size=1, max_staleness=max_staleness)
    source = TaskSource((Task("t", {}),), seed=0)
    with Store.open(tmp_path / "store.db") as store:
        for number in range(5):
            name = f"g{number}"
            store.open_episode(NewEpisode(name, f"hash of {name}", Task(name, {}), name, 1)).result()
        store.drop_open_group("g1", "it is none of them").result()
        store.open_episode(NewEpisode("h", "hash of h", Task("h", {}), "h", 1)).result()
        submission = Submission(store=store, source=source, config=config, steps=9, shortage=lambda: None)
        assert submission.held_back() == frozenset(["g0", "g2", "g3", "g4", "h"][5 - held :])
