"""Returns of turns against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from algorithms_support import episode, turn

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.credit.returns import EpisodeCredit, is_trained, owners, turn_returns
from areal_agents.algorithms.credit.rewards import episode_credit
from areal_agents.core.rollout import Episode

# a ── b ── d        r ── s      (two roots)
#  └── c
FOREST = [turn("a"), turn("b", "a"), turn("r"), turn("c", "a"), turn("d", "b"), turn("s", "r")]


def returns(recorded: Episode, *, turn_discount: float = 1.0) -> dict[str, float]:
    credit = episode_credit(recorded, group_id="g", config=AlgorithmConfig())
    values = turn_returns(credit, turn_discount=turn_discount)
    return dict(zip((t.id for t in recorded.turns), values.tolist(), strict=True))


def test_the_episode_reward_goes_undiscounted_to_every_turn_of_every_root() -> None:
    assert returns(episode(FOREST, 2.0), turn_discount=0.5) == dict.fromkeys("abrcds", 2.0)


def test_later_rewards_are_discounted_along_the_branch_and_averaged_over_forks() -> None:
    recorded = episode(FOREST, 10.0, by_turn={"a": 1.0, "b": 2.0, "d": 4.0, "s": 7.0}, by_branch={"c": 8.0})
    # d = 4; b = 2 + 0.5·4 = 4; c = 8; a = 1 + 0.5·(4 + 8)/2 = 4; s = 7; r = 0.5·7 = 3.5; + 10
    assert returns(recorded, turn_discount=0.5) == {
        "a": 14.0, "b": 14.0, "r": 13.5, "c": 18.0, "d": 14.0, "s": 17.0,
    }  # fmt: skip


def test_an_interleaved_call_of_another_root_takes_no_share() -> None:
    alone = episode([turn("a"), turn("b", "a")], by_turn={"b": 1.0})
    mixed = episode([turn("a"), turn("x"), turn("b", "a"), turn("y", "x")], by_turn={"b": 1.0})
    assert returns(alone, turn_discount=0.9) == {"a": 0.9, "b": 1.0}
    assert returns(mixed, turn_discount=0.9) == {"a": 0.9, "x": 0.0, "b": 1.0, "y": 0.0}


def test_several_rewards_of_one_turn_add_up() -> None:
    recorded = episode([turn("a")], 1.0, by_turn={"a": 0.25}, by_branch={"a": 0.5})
    assert returns(recorded) == {"a": 1.75}
    assert recorded.score == 1.75


def test_a_shared_turn_is_owned_by_its_first_leaf() -> None:
    # leaves in the order of recording: c, d, s
    assert owners(episode(FOREST)) == {"a": "c", "c": "c", "b": "d", "d": "d", "r": "s", "s": "s"}


def test_a_credit_that_is_no_forest_is_refused() -> None:
    with pytest.raises(ValueError, match="before its parent"):
        EpisodeCredit((1, -1), np.zeros(2), 0.0, "g")
    with pytest.raises(ValueError, match="1 turns with 2 rewards"):
        EpisodeCredit((-1,), np.zeros(2), 0.0, "g")


@pytest.mark.parametrize(
    ("made", "options", "trained"),
    [
        (turn("a"), {}, True),
        (turn("a", constrained=True), {}, False),
        (turn("a", constrained=True), {"train_constrained": True}, True),
        (turn("a", temperature=0.0, constrained=True), {"train_constrained": True}, False),
        (turn("a", temperature=9e-6), {}, False),
        (turn("a", temperature=1e-2), {}, True),
        (turn("a", temperature=0.0), {"train_greedy": True}, True),
        (turn("a", finish="abort"), {"train_greedy": True}, False),
        (turn("a", finish="length"), {}, True),
        (turn("a", label="judge"), {"exclude_labels": ("judge",)}, False),
        (turn("a", label="judge"), {"exclude_labels": ("critic",)}, True),
    ],
)
def test_which_turns_are_trained(made, options, trained) -> None:  # type: ignore[no-untyped-def]
    assert is_trained(made, **options) is trained
