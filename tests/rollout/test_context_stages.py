"""Iterative context lengthening: the token limit of an episode depends on the published step."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import ValidationError
from test_runner import arguments, config

from areal_agents.rollout.config import ContextStage, LimitsConfig, RolloutConfig
from areal_agents.rollout.runner import run

STAGES = [{"until_step": 100, "max_tokens": 8192}, {"until_step": 150, "max_tokens": 16384}]


def bound(rollout: RolloutConfig, step: int) -> int | None:
    return rollout.limits_at(step).context_tokens


def test_the_bound_grows_with_the_published_step() -> None:
    open_ended = RolloutConfig(context_stages=(*STAGES, {"max_tokens": 24576}))  # type: ignore[arg-type]
    steps = (0, 99, 100, 149, 150, 10_000)
    assert [bound(open_ended, step) for step in steps] == [8192, 8192, 16384, 16384, 24576, 24576]
    ends = RolloutConfig(context_stages=tuple(STAGES))  # type: ignore[arg-type]
    assert [bound(ends, step) for step in (149, 150)] == [16384, None]
    assert bound(RolloutConfig(), 0) is None


def test_the_context_limit_of_the_episodes_applies_too() -> None:
    limits = LimitsConfig(max_turns=3, context_tokens=10_000)
    stages = tuple(ContextStage(**stage) for stage in STAGES)
    both = RolloutConfig(limits=limits, context_stages=stages)
    assert [bound(both, step) for step in (0, 100, 150)] == [8192, 10_000, 10_000]
    assert both.limits_at(0).max_turns == 3


@pytest.mark.parametrize(
    ("stages", "error"),
    [
        (
            [{"max_tokens": 8}, {"until_step": 3, "max_tokens": 9}],
            "every stage but the last needs until_step",
        ),
        (
            [{"until_step": 5, "max_tokens": 8}, {"until_step": 5, "max_tokens": 9}],
            r"until_step must increase.*\[5, 5\]",
        ),
        ([{"until_step": 5, "max_tokens": 8}, {"max_tokens": 8}], r"max_tokens must increase.*\[8, 8\]"),
        ([{"until_step": 0, "max_tokens": 8}], "greater than or equal to 1"),
        ([{"until_step": 5}], "Field required"),
    ],
)
def test_stages_out_of_order_are_refused(stages: list[dict[str, int]], error: str) -> None:
    with pytest.raises(ValidationError, match=error):
        RolloutConfig.model_validate({"context_stages": stages})


async def test_a_run_goes_through_its_stages(served: Any) -> None:
    stages = ({"until_step": 2, "max_tokens": 300}, {"max_tokens": 600})
    opened_early: set[str] = set()

    def seen(step: int) -> None:
        if step <= 2:  # the published step is at most 1
            opened_early.update(episode.id for episode in served.store.episodes())

    given = arguments(served, "good", rollout=config(context_stages=stages), steps=5)
    async with served.trainer(groups=2, steps=5, seen=seen), asyncio.timeout(60):
        await run(**given)
    bounds = {e.id: served.store.episode_row(e.id).limits["context_tokens"] for e in served.store.episodes()}
    assert {bounds[episode] for episode in opened_early} == {300}
    trained = [episode for episode in served.store.episodes(status="finished")]
    assert bounds[trained[-1].id] == 600
