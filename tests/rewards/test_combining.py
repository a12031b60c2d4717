"""Reward functions that combine other reward functions."""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import Any

import pytest

from areal_agents.rewards import FinishedEpisode, clipped, gated, per_turn, potential, weighted

USER, TOOL = {"role": "user", "content": "?"}, {"role": "tool", "content": "found"}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


EPISODE = FinishedEpisode(
    "e",
    {"answer": "4"},
    [
        [USER, said("old"), USER, said("a"), TOOL, said("bb"), USER, said("4")],
        [USER, said("old"), USER, said("a"), TOOL, said("no")],
    ][::-1],
    "finished",
    {},
    completions=[
        [None, None, None, "t1", None, "t4"],
        [None, None, None, "t1", None, "t2", None, "t3"],
    ],
)


def right(episode: FinishedEpisode) -> float:
    return float(episode.answer == episode.task["answer"])


async def length(episode: FinishedEpisode) -> float:
    return len(episode.answer)


async def test_weighted_scores_are_rewards_by_name() -> None:
    assert await weighted({"right": 2.0, "length": -0.5}, right=right, length=length)(EPISODE) == {
        "right": 2.0,
        "length": -0.5,
    }
    with pytest.raises(ValueError, match="must have the same names"):
        weighted({"right": 1.0}, length=length)


async def test_a_closed_gate_calls_no_other_function() -> None:
    def never(episode: FinishedEpisode) -> float:
        raise AssertionError

    assert await gated(lambda _: 0.0, never, otherwise=-1.0)(EPISODE) == -1.0
    assert await gated(right, length)(EPISODE) == 1.0


async def test_clipped_scores_are_within_the_bounds_and_must_be_finite() -> None:
    for score, expected in ((5.0, 1.0), (-5.0, -1.0), (0.5, 0.5)):
        assert await clipped(lambda _, score=score: score, -1, 1)(EPISODE) == expected  # type: ignore[misc]
    with pytest.raises(ValueError, match="low must be at most high"):
        clipped(right, 1, 0)
    with pytest.raises(ValueError, match="must be finite, got nan"):
        await clipped(lambda _: float("nan"), 0, 1)(EPISODE)


async def test_each_turn_is_rewarded_once_even_if_conversations_share_it() -> None:
    seen = []

    def score(messages: Any, reply: Any) -> float:
        seen.append((len(messages), reply["content"]))
        return float(len(reply["content"]))

    assert await per_turn(score)(EPISODE) == {"t1": 1.0, "t4": 2.0, "t2": 2.0, "t3": 1.0}
    assert seen == [(3, "a"), (5, "no"), (5, "bb"), (7, "4")]
    unrecorded = FinishedEpisode("e", {}, EPISODE.branches, "finished", {})
    with pytest.raises(ValueError, match="only in episodes that a proxy has recorded"):
        await per_turn(score)(unrecorded)


async def test_potentials_add_the_same_to_every_path_from_one_state() -> None:
    """With discount γ, the discounted sum of the shaping is minus the potential of the first state."""

    async def phi(messages: Any) -> float:
        return 10.0 * len(messages) ** 0.5

    for discount in (1.0, 0.9):
        rewards = await potential(phi, discount=discount)(EPISODE)
        assert list(rewards) == ["t1", "t2", "t3"]
        total = sum(discount**n * reward for n, reward in enumerate(rewards.values()))
        assert total == pytest.approx(-10.0 * 3**0.5)
    with_outcome = await potential(phi, right)(EPISODE)
    without = await potential(phi)(EPISODE)
    assert {name: with_outcome[name] - without[name] for name in without} == pytest.approx(
        {"t1": 0.0, "t2": 0.0, "t3": 1.0}
    )


async def test_an_episode_without_a_model_call_gets_no_rewards_for_turns() -> None:
    empty = FinishedEpisode("e", {}, [], "finished", {})
    assert await potential(lambda _: 1.0, lambda _: 1.0)(empty) == {}
    assert await per_turn(lambda _messages, _reply: 1.0)(empty) == {}


def test_weights_must_have_the_names_of_the_scores() -> None:
    for names, scores in itertools.product(({}, {"a": 1.0}), ({}, {"b": right})):
        with pytest.raises(ValueError, match="same names"):
            weighted(names, **scores)  # type: ignore[arg-type]


async def test_a_synchronous_function_that_waits_does_not_delay_other_episodes() -> None:
    """The time limit of the reward function applies to it too."""
    open_gate = threading.Event()

    def waits(episode: FinishedEpisode) -> float:
        return float(open_gate.wait(30))

    async def opens(episode: FinishedEpisode) -> float:
        open_gate.set()
        return 1.0

    waiting = asyncio.create_task(weighted({"waits": 1.0}, waits=waits)(EPISODE))
    await asyncio.sleep(0)
    assert await gated(opens, right)(EPISODE) == 1.0
    assert await waiting == {"waits": 1.0}
    open_gate.clear()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await clipped(waits, 0, 1)(EPISODE)
    open_gate.set()
