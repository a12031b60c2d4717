"""The gate against random schedules: groups that fail, are dropped and retried, restarts, changes of B."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from areal_agents.rollout.gate import admissible_groups


@pytest.mark.parametrize(
    ("submitted", "groups", "max_staleness", "expected"),
    [(0, 8, 0, 8), (8, 8, 0, 0), (8, 8, 1, 8), (15, 8, 1, 1), (16, 8, 1, 0), (40, 8, 1, 0), (3, 1, 4, 2)],
)
def test_the_bound(submitted: int, groups: int, max_staleness: int, expected: int) -> None:
    assert admissible_groups(submitted=submitted, groups=groups, max_staleness=max_staleness) == expected


@pytest.mark.parametrize("bad", [{"submitted": -1}, {"groups": 0}, {"max_staleness": -1}])
def test_counts_that_cannot_be(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected submitted"):
        admissible_groups(**{"submitted": 0, "groups": 1, "max_staleness": 0, **bad})


class Schedule(RuleBasedStateMachine):
    """Groups go pending → complete → trained, or are dropped, in any order that the system allows.

    A restart changes nothing here, which is the point: the gate has no memory. It may come back with
    another batch size or staleness.
    """

    def __init__(self) -> None:
        super().__init__()
        self.groups, self.max_staleness = 2, 1
        self.pending = self.complete = 0

    @property
    def submitted(self) -> int:
        return self.pending + self.complete

    def admissible(self) -> int:
        return admissible_groups(
            submitted=self.submitted, groups=self.groups, max_staleness=self.max_staleness
        )

    @rule(wanted=st.integers(1, 4))
    def submit(self, wanted: int) -> None:
        admitted = min(wanted, self.admissible())
        self.pending += admitted
        assert not admitted or self.submitted <= (self.max_staleness + 1) * self.groups

    @precondition(lambda self: self.pending)
    @rule()
    def finish(self) -> None:
        self.pending, self.complete = self.pending - 1, self.complete + 1

    @precondition(lambda self: self.pending)
    @rule()
    def drop(self) -> None:
        self.pending -= 1

    @precondition(lambda self: self.complete >= self.groups)
    @rule()
    def train(self) -> None:
        self.complete -= self.groups

    @rule(groups=st.integers(1, 4), max_staleness=st.integers(0, 3))
    def restart(self, groups: int, max_staleness: int) -> None:
        self.groups, self.max_staleness = groups, max_staleness

    @invariant()
    def never_deadlocks(self) -> None:
        """If nothing may be submitted, finishing what is pending gives the trainer a batch."""
        assert self.admissible() > 0 or self.submitted >= self.groups


Schedule.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSchedules = Schedule.TestCase


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
        room = admissible_groups(submitted=len(alive), groups=groups, max_staleness=max_staleness)
        alive += [version] * min(room, choice % 7)
        complete = min(len(alive), complete + choice % 3)
        if complete >= groups:
            batch, alive = alive[:groups], alive[groups:]
            complete -= groups
            assert all(version - submitted <= max_staleness for submitted in batch)
            version += 1
