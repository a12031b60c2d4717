"""How the slots of groups are refilled."""

from __future__ import annotations

from typing import Any

import pytest

from areal_agents.core.rollout import Task
from areal_agents.rollout.agents.attempt import Outcome
from areal_agents.rollout.config import RolloutConfig
from areal_agents.rollout.groups.group import GroupRun
from areal_agents.rollout.groups.settling import SlotSettler


async def test_the_pause_of_a_slot_grows_with_each_attempt_that_does_not_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A scheduler may cancel jobs at once, and each attempt is an episode in the store."""
    nothing: Any = None
    settler = SlotSettler(groups=nothing, calls=nothing, store=nothing, config=RolloutConfig(retries=9))
    pauses = []

    async def put(group: GroupRun, index: int, *, pause_s: float) -> None:
        pauses.append(pause_s)

    monkeypatch.setattr(settler, "_put", put)
    group = GroupRun("group", Task("task", {}), size=2, surplus=0, order=0)
    not_begun, failed = Outcome("aborted", rewarded=False, error="full"), Outcome("failed", False, "boom")
    for outcome in (not_begun, not_begun, not_begun, failed, not_begun):
        await settler.settle(group, 0, outcome)
    await settler.settle(group, 1, not_begun)
    assert pauses == [0.5, 1.0, 2.0, 0.5, 0.5, 0.5]
