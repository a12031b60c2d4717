"""The return of a turn, compared with values computed by hand and with its definition."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from algorithms_support import began, defined_depths, defined_to_go, episode, random_episode, turn
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_agents.algorithms.credit.returns import EpisodeCredit, RewardToGo, rewards_to_go
from areal_agents.algorithms.credit.rewards import EpisodeRewards, RewardShaping, episode_rewards
from areal_agents.algorithms.credit.trained import TrainedTurns
from areal_agents.core.rollout import RecordedEpisode

# a ── b ── d        r ── s      (two roots), recorded in the order a, b, r, c, d, s
#  └── c
FOREST = [turn("a"), turn("b", "a"), turn("r"), turn("c", "a"), turn("d", "b"), turn("s", "r")]
REWARDED = episode(FOREST, 10.0, by_turn={"a": 1.0, "b": 2.0, "d": 4.0, "s": 7.0}, by_branch={"c": 8.0})


def rewards_of(recorded: RecordedEpisode, **shaping: float) -> EpisodeRewards:
    return episode_rewards(recorded, group_id="g", shaping=RewardShaping(**shaping))  # type: ignore[arg-type]


def to_go(recorded: RecordedEpisode, *, turn_discount: float = 1.0) -> dict[str, float]:
    """The return of each turn."""
    rewards = rewards_of(recorded)
    values = RewardToGo(turn_discount=turn_discount).after(rewards, rewards.recorded_before)
    return dict(zip((t.id for t in recorded.turns), values.tolist(), strict=True))


def test_rewards_are_assigned_to_their_turns_in_recording_order() -> None:
    rewards = rewards_of(REWARDED)
    assert rewards.turns.tolist() == [1.0, 2.0, 0.0, 8.0, 4.0, 7.0] and rewards.episode == 10.0
    assert rewards.rewarded.tolist() == [True, True, False, True, True, True]
    assert rewards.has_episode_reward and rewards.score == REWARDED.score == 32.0
    assert rewards.by_name == {"return": 10.0, "step": 14.0, "branch": 8.0}
    # the number of turns that were recorded before each call began, and the depth that follows from it
    assert rewards.recorded_before == (0, 1, 0, 1, 2, 3)
    assert rewards.depths.tolist() == [1, 2, 1, 2, 3, 3]


def test_recorded_before_follows_from_the_parent_unless_the_turn_has_it() -> None:
    turns = [turn("a", recorded_before=0), turn("x", recorded_before=0), turn("b", "a", recorded_before=2)]
    assert rewards_of(episode(turns)).recorded_before == (0, 0, 2)
    assert rewards_of(episode([replace(t, recorded_before=None) for t in turns])).recorded_before == (0, 0, 1)


def test_an_episode_reward_of_zero_differs_from_no_episode_reward() -> None:
    assert rewards_of(episode([turn("a")], 0.0)).has_episode_reward
    assert not rewards_of(episode([turn("a")], by_turn={"a": 1.0})).has_episode_reward


def test_the_score_is_the_return_of_every_turn_of_every_root() -> None:
    rewards = rewards_of(REWARDED)
    assert EpisodeCredit().after(rewards, rewards.recorded_before).tolist() == [32.0] * 6
    assert EpisodeCredit().after(rewards, [0, 6, 99]).tolist() == [32.0] * 3


def test_rewards_to_go_by_hand() -> None:
    # a and r began before any turn was recorded: 10 + 1 + 2/2 + 0 + 8/2 + 4/4 + 7/4
    # b and c began after a was recorded, at depth 2: 10 + 2 + 0 + 8 + 4/2 + 7/2
    # d began after a and b were recorded, and s also after r, at depth 3: 10 + 0 + 8 + 4 + 7
    assert to_go(REWARDED, turn_discount=0.5) == {
        "a": 18.75, "b": 25.5, "r": 18.75, "c": 25.5, "d": 29.0, "s": 29.0,
    }  # fmt: skip
    # without a discount, it is the score less the rewards recorded before: 1 of a, or 3 of a and b
    assert to_go(REWARDED) == {"a": 32.0, "b": 31.0, "r": 32.0, "c": 31.0, "d": 29.0, "s": 29.0}


def test_the_reward_to_go_after_the_end_of_an_episode_is_its_episode_reward() -> None:
    rewards = rewards_of(REWARDED)
    assert rewards_to_go(rewards, [5, 6, 7, 99], turn_discount=0.5).tolist() == [17.0, 10.0, 10.0, 10.0]
    nothing = rewards_of(episode([], 3.0))
    assert rewards_to_go(nothing, [0, 1], turn_discount=0.5).tolist() == [3.0, 3.0]


def test_the_episode_reward_goes_undiscounted_to_every_turn() -> None:
    assert to_go(episode(FOREST, 2.0), turn_discount=0.5) == dict.fromkeys("abrcds", 2.0)


def test_a_turn_earns_rewards_of_other_conversations_recorded_after_its_call_began() -> None:
    """The turn may have caused them: an orchestrator's call begins before that of its sub-agent."""
    turns = [
        turn("plan", recorded_before=0),
        turn("sub", recorded_before=1),
        turn("end", "plan", recorded_before=2),
    ]
    assert to_go(episode(turns, by_turn={"sub": 1.0})) == {"plan": 1.0, "sub": 1.0, "end": 0.0}
    assert to_go(episode(turns, by_turn={"end": 1.0}), turn_discount=0.5) == {
        "plan": 0.25, "sub": 0.5, "end": 1.0,
    }  # fmt: skip


def test_a_turn_earns_no_rewards_of_turns_recorded_before_its_call_began() -> None:
    turns = [turn("a"), turn("late", recorded_before=1), turn("early", recorded_before=0)]
    assert to_go(episode(turns, by_turn={"a": 1.0})) == {"a": 1.0, "late": 0.0, "early": 1.0}


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 10), st.sampled_from([0.0, 0.3, 1.0]))
def test_rewards_to_go_equal_their_definition(seed: int, turns: int, discount: float) -> None:
    recorded = random_episode(random.Random(seed), turns=turns, dense=True)
    rewards = rewards_of(recorded)
    assert list(rewards.recorded_before) == began(recorded)
    assert rewards.depths.tolist() == defined_depths(recorded)
    expected = [defined_to_go(recorded, k, discount=discount) for k in range(turns + 3)]
    got = rewards_to_go(rewards, range(turns + 3), turn_discount=discount)
    assert got.tolist() == pytest.approx(expected, abs=1e-12)
    at_turns = RewardToGo(turn_discount=discount).after(rewards, rewards.recorded_before)
    assert at_turns.tolist() == pytest.approx([expected[k] for k in began(recorded)], abs=1e-12)


def test_several_rewards_of_one_turn_add_up() -> None:
    recorded = episode([turn("a")], 1.0, by_turn={"a": 0.25}, by_branch={"a": 0.5})
    assert to_go(recorded) == {"a": 1.75}
    assert recorded.score == rewards_of(recorded).score == 1.75


def test_inconsistent_rewards_of_an_episode_are_refused() -> None:
    with pytest.raises(ValueError, match=r"recorded_before must be from 0 to .*, got \(0, 2\)"):
        EpisodeRewards("g", np.zeros(2), 0.0, (0, 2), np.zeros(2, bool), False)
    with pytest.raises(ValueError, match="one entry per turn, got 2, 2 and 1"):
        EpisodeRewards("g", np.zeros(2), 0.0, (0,), np.zeros(2, bool), False)


@pytest.mark.parametrize(
    ("made", "options", "trained"),
    [
        (turn("a"), {}, True),
        (turn("a", constrained=True), {}, False),
        (turn("a", constrained=True), {"constrained": True}, True),
        (turn("a", temperature=0.0, constrained=True), {"constrained": True}, False),
        (turn("a", temperature=9e-6), {}, False),
        (turn("a", temperature=1e-2), {}, True),
        (turn("a", temperature=0.0), {"greedy": True}, True),
        (turn("a", finish="abort"), {"greedy": True}, False),
        (turn("a", discarded="the client disconnected"), {"greedy": True}, False),
        (turn("a", finish="length"), {}, True),
        (turn("a", label="judge"), {"exclude_labels": ("judge",)}, False),
        (turn("a", label="judge"), {"exclude_labels": ("critic",)}, True),
        (turn("a", label="sub-agent/search"), {"exclude_labels": ("sub-agent/*",)}, False),
        (turn("a", label="Sub-agent/search"), {"exclude_labels": ("sub-agent/*",)}, True),
    ],
)
def test_which_turns_are_trained(made, options, trained) -> None:  # type: ignore[no-untyped-def]
    rule = TrainedTurns(**options)
    assert rule.includes(made) is trained
    assert rule.of(episode([made])) == ([made] if trained else [])


def test_the_turns_of_a_truncated_episode_are_trained_unless_they_are_masked() -> None:
    turns = [turn("a"), turn("b", "a")]
    cut = episode(turns, status="truncated")
    assert TrainedTurns().of(cut) == turns and TrainedTurns(truncated=False).of(cut) == []
    assert TrainedTurns(truncated=False).of(episode(turns)) == turns
