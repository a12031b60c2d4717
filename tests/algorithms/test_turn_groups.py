"""Turn-level advantages with step groups (GiGPO, MT-GRPO), compared with an oracle in plain Python."""

from __future__ import annotations

import random
import statistics
from typing import Any

import numpy as np
import pytest
from algorithms_support import TASK, episode, group, turn
from pydantic import ValidationError

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.credit.anchors import Anchor, turn_anchors
from areal_agents.algorithms.credit.returns import OwnReturn
from areal_agents.algorithms.credit.rewards import EpisodeRewards
from areal_agents.algorithms.credit.turn_groups import turn_group_advantages
from areal_agents.algorithms.samples import TrainingData, build_training_data
from areal_agents.core.completion import Completion, SamplingParams
from areal_agents.core.messages import Message, ToolCall
from areal_agents.core.rollout import RecordedEpisode
from areal_agents.core.trajectory import Turn

EPSILON = 1e-5


def config(**given: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"credit": "turn_groups", "drop_equal_groups": False, **given})


def by_turn(data: TrainingData, episode_id: str) -> list[float]:
    """The advantages of the turns of an episode whose turns form one trajectory."""
    (sample,) = (s for s in data.samples if s.episode_id == episode_id)
    found: dict[int, float] = {}
    for index, value in zip(
        sample.turn_index[sample.loss_mask].tolist(),
        sample.advantages[sample.loss_mask].tolist(),
        strict=True,
    ):
        assert found.setdefault(index, value) == value
    return [found[index] for index in sorted(found)]


def said(id: str, parent: str | None, *messages: Message, prompt: tuple[int, ...] = (1, 2)) -> Turn:
    """A turn whose prompt ends with these messages."""
    return Turn(
        id=id,
        parent=parent,
        new_messages=messages,
        new_prompt_ids=np.array(prompt, np.int32),
        completion=Completion([3, 4], [-0.1, -0.2], [0, 0], "stop"),  # type: ignore[arg-type]
        reply=Message("assistant", id),
        sampling=SamplingParams(max_new_tokens=64, temperature=1.0),
    )


# The oracle: recursive depths and loops, written like the formulas of the papers.


def normalised(values: list[float], *, divided: bool) -> list[float]:
    mean = statistics.fmean(values)
    if len(values) == 1 or len(set(values)) == 1:
        return [0.0] * len(values)
    std = statistics.stdev(values) + EPSILON if divided else 1.0
    return [(value - mean) / std for value in values]


def oracle(members: list[EpisodeRewards], settings: AlgorithmConfig) -> list[list[float]]:
    credit = settings.estimator.credit  # type: ignore[union-attr]
    divided = settings.estimator.advantage_std != "none"  # type: ignore[union-attr]
    outcome = credit.episode_return == "outcome"
    of_episodes = normalised(
        [m.episode if outcome else m.episode + sum(m.turns.tolist()) for m in members], divided=divided
    )
    returns: list[list[float]] = []
    for m in members:
        depths: list[int] = []
        for k in m.recorded_before:
            depths.append(1 + max(depths[:k], default=0))
        own = []
        for t, k in enumerate(m.recorded_before):
            if credit.turn_return.kind == "own":
                own.append(float(m.turns[t]))
                continue
            discount = credit.turn_return.turn_discount
            value = discount ** max(0, depths[-1] - depths[t]) * m.episode
            for u in range(k, len(depths)):
                value += discount ** max(0, depths[u] - depths[t]) * float(m.turns[u])
            own.append(value)
        returns.append(own)
    out = [[a] * len(m.turns) for a, m in zip(of_episodes, members, strict=True)]
    for anchor in {anchor for m in members for anchor in m.anchors}:
        places = [(i, t) for i, m in enumerate(members) for t, a in enumerate(m.anchors) if a == anchor]
        values = normalised([returns[i][t] for i, t in places], divided=divided)
        for (i, t), value in zip(places, values, strict=True):
            out[i][t] += credit.turn_weight * value
    return out


def random_rewards(rng: random.Random) -> EpisodeRewards:
    """An episode of up to six turns, some of them concurrent, with three different anchors."""
    turns = rng.randint(1, 6)
    return EpisodeRewards(
        "g",
        np.array([rng.choice([0.0, 0.0, 1.0, -0.5]) for _ in range(turns)]),
        rng.choice([0.0, 1.0]),
        tuple(rng.randint(max(0, t - 2), t) for t in range(turns)),
        rewarded=np.ones(turns, bool),
        has_episode_reward=True,
        anchors=tuple(rng.choice(["a", "b", "c"]) for _ in range(turns)),
    )


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"turn_discount": 0.9, "turn_weight": 0.3},
        {"turn_discount": 0.0, "advantage_std": "none"},
        {"turn_return": "own", "episode_return": "outcome", "turn_weight": 2.0},
        {"turn_return": "own", "advantage_std": "none"},
        {"turn_discount": 0.5, "episode_return": "outcome"},
    ],
)
def test_advantages_equal_those_of_the_papers(seed: int, given: dict[str, Any]) -> None:
    rng, settings = random.Random(seed), config(**given)
    batch = [[random_rewards(rng) for _ in range(rng.randint(2, 5))] for _ in range(3)]
    found = settings.estimator.turn_advantages(batch)  # type: ignore[union-attr]
    for members, of_group in zip(batch, found, strict=True):
        for values, expected in zip(of_group, oracle(members, settings), strict=True):
            assert values.tolist() == pytest.approx(expected, abs=1e-9)


def test_a_sparse_reward_is_discounted_by_its_distance_within_a_step_group() -> None:
    # One episode finds the answer from the hall at once, the other after a detour that returns to the hall.
    hall, shed = Message("user", "You are in the hall."), Message("user", "You are in the shed.")
    short = RecordedEpisode("short", TASK, (said("s0", None, hall),), "finished", episode([], 1.0).rewards)
    long = RecordedEpisode(
        "long", TASK, (said("l0", None, hall), said("l1", "l0", shed), said("l2", "l1", hall)), "finished",
        episode([], 1.0).rewards,
    )  # fmt: skip
    settings = config(turn_discount=0.5, advantage_std="none", turn_weight=2.0)
    data = build_training_data([group([short, long])], settings)
    # In the hall the returns are 1 (short), 0.25 and 1 (long): mean 0.75. The shed is seen once.
    assert by_turn(data, "short") == [0.5]
    assert by_turn(data, "long") == [-1.0, 0.0, 0.5]
    assert data.report.equal_groups == ()  # although the scores are equal


def test_mt_grpo_adds_the_turn_advantage_to_the_outcome_advantage() -> None:
    # The equation of the paper for two turns: A_1 = A^O + λ A^T, A_2 = A^O.
    members = [
        episode([turn(f"{i}a"), turn(f"{i}b", f"{i}a")], outcome, id=f"e{i}", by_turn={f"{i}a": tool})
        for i, (outcome, tool) in enumerate([(1.0, 0.2), (0.0, 0.2), (0.0, 0.0), (1.0, 0.4)])
    ]
    data = build_training_data([group(members)], AlgorithmConfig(preset="mt_grpo", turn_weight=0.5))
    of_outcome = normalised([1.0, 0.0, 0.0, 1.0], divided=True)
    of_tool = normalised([0.2, 0.2, 0.0, 0.4], divided=True)
    for i in range(4):
        expected = [of_outcome[i] + 0.5 * of_tool[i], of_outcome[i]]
        assert by_turn(data, f"e{i}") == pytest.approx(expected, abs=1e-6)


def test_gigpo_equals_grpo_if_no_situation_occurs_twice() -> None:
    members = [
        episode([turn(f"{i}a"), turn(f"{i}b", f"{i}a")], score, id=f"e{i}")
        for i, score in enumerate([1.0, 0.0, 0.5])
    ]
    alone, plain = (
        build_training_data([group(members)], AlgorithmConfig(preset=preset)) for preset in ("gigpo", "grpo")
    )
    for ours, theirs in zip(alone.samples, plain.samples, strict=True):
        assert ours.advantages.tolist() == theirs.advantages.tolist()
        assert ours.advantages.any() or members[2].id == ours.episode_id


def anchors(episode: RecordedEpisode, by: Any) -> tuple[Anchor, ...]:
    return turn_anchors(episode, by)


def test_an_observation_is_the_messages_after_the_last_reply() -> None:
    system, ask, seen = (
        Message("system", "S"),
        Message("user", "hi"),
        Message("tool", "3 files", tool_call_id="x"),
    )
    call = Message("assistant", tool_calls=(ToolCall("x", "ls", "{}"),))
    other_id = Message("tool", "3 files ", tool_call_id="y")
    recorded = RecordedEpisode(
        "e",
        TASK,
        (
            said("a", None, system, ask),
            said("b", "a", seen),
            said("c", "b", other_id),
            said("fork", None, system, ask, call, seen),  # a root that begins with a history
            said("prefix", "b", ask, Message("assistant", "Sure")),  # continues a reply that the client began
            said("again", "b", call, seen),  # a reply that the client inserted
            said("ask", "b", ask),
            said("two", "b", ask, seen),
        ),
        "finished",
        (),
    )
    a, b, c, fork, prefix, again, ask_only, two = anchors(recorded, "observation")
    assert b == c == fork == again
    assert len({a, b, prefix, ask_only, two}) == 5


def test_a_prompt_is_compared_by_all_its_tokens() -> None:
    turns = (
        turn("a", prompt=[1, 2], sampled=[3]),
        turn("b", "a", prompt=[4], sampled=[5]),
        turn("same", prompt=[1, 2, 3, 4], sampled=[5]),
        turn("c", "b", prompt=[], sampled=[6]),
        turn("d", "same", prompt=[], sampled=[7]),
        turn("other", prompt=[1, 2, 3], sampled=[4]),
    )
    a, b, same, c, d, other = anchors(episode(turns), "prompt")
    assert b == same and c == d
    assert len({a, b, c, other}) == 4


def test_labels_and_positions_are_anchors_too() -> None:
    recorded = episode([turn("a", label="main"), turn("b", "a", label="sub"), turn("c", "b", label="main")])
    assert anchors(recorded, "label") == ("main", "sub", "main")
    assert anchors(recorded, "position") == (0, 1, 2)


def test_anchors_are_computed_only_if_they_are_used() -> None:
    members = group([episode([turn("a")], 1.0, id="e0"), episode([turn("b")], 0.0, id="e1")])
    plain = build_training_data([members], AlgorithmConfig())
    grouped = build_training_data([members], config(turn_group_by="position"))
    assert plain.rewards["e0"].anchors == () and grouped.rewards["e0"].anchors == (0,)
    with pytest.raises(ValueError, match="group g: .* must have one anchor per turn, got 0"):
        turn_group_advantages(
            [[plain.rewards["e0"]]],
            config().estimator.credit,  # type: ignore[union-attr]
            mean="group",
            std="group",
            std_estimator="sample",
        )


def test_a_group_is_equal_if_all_its_advantages_are_zero() -> None:
    def report(tools: list[float], outcomes: list[float], **given: Any) -> tuple[str, ...]:
        members = [
            episode([turn(f"{i}")], outcome, id=f"e{i}", by_turn={f"{i}": tool})
            for i, (outcome, tool) in enumerate(zip(outcomes, tools, strict=True))
        ]
        settings = config(turn_group_by="position", turn_return="own", drop_equal_groups=True, **given)
        return build_training_data([group(members)], settings).report.equal_groups

    assert report([0.1] * 10, [0.7] * 10) == ("g",)
    assert report([0.1] * 10, [0.7] * 10, advantage_std="none") == ("g",)
    assert report([0.1, 0.2], [0.2, 0.1]) == ()  # equal scores, but the turns differ
    assert report([0.1, 0.2, 0.3], [0.3, 0.2, 0.1], episode_return="outcome") == ("g",)  # the parts cancel


@pytest.mark.parametrize("credit", ["reward_to_go", "step_normalized"])
@pytest.mark.parametrize("size", [3, 7, 10])
def test_rounding_does_not_make_equal_episodes_different(credit: str, size: int) -> None:
    # In floating point the mean of ten times 0.1 is not 0.1, and without a std nothing hides the difference.
    settings = AlgorithmConfig.model_validate({"credit": credit, "advantage_std": "none"})
    for reward in (0.1, 0.7, 1 / 3):
        recorded = [
            group([episode([turn(f"{i}")], id=f"e{i}", by_turn={f"{i}": r}) for i, r in enumerate(rewards)])
            for rewards in ([reward] * size, [reward] * size + [reward + 0.25])
        ]
        equal, apart = (build_training_data([made], settings) for made in recorded)
        assert equal.report.equal_groups == ("g",) and equal.samples == ()
        assert apart.report.equal_groups == () and len(apart.samples) == size + 1


def test_a_group_under_reward_to_go_is_equal_only_if_all_advantages_are_zero() -> None:
    settings = AlgorithmConfig.model_validate({"credit": "reward_to_go", "advantage_std": "none"})

    def made(first: list[float], second: list[float]) -> tuple[str, ...]:
        members = [
            episode(
                [turn(f"{i}a"), turn(f"{i}b", f"{i}a", recorded_before=1)],
                id=f"e{i}",
                by_turn={f"{i}a": rewards[0], f"{i}b": rewards[1]},
            )
            for i, rewards in enumerate((first, second))
        ]
        return build_training_data([group(members)], settings).report.equal_groups

    assert made([0.5, 0.5], [0.5, 0.5]) == ("g",)
    assert made([1.0, 0.0], [0.0, 1.0]) == ()  # equal scores, but the second turns differ


def test_a_reward_bias_is_refused_unless_the_episode_reward_is_discounted() -> None:
    assert config(reward_bias=0.5, turn_discount=0.9).rewards.reward_bias == 0.5
    for given in ({}, {"turn_return": "own"}):
        with pytest.raises(ValidationError, match="reward_bias: 0.5 is subtracted again"):
            config(reward_bias=0.5, **given)


def test_changing_the_turn_return_of_a_preset_drops_its_discount() -> None:
    credit = AlgorithmConfig(preset="gigpo", turn_return="own").estimator.credit  # type: ignore[union-attr]
    assert credit.turn_return == OwnReturn()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (
            {"kl_in": "reward", "kl_coefficient": 0.1},
            "credit: turn_groups cannot be combined with kl_in",
        ),
        ({"leave_one_out": True}, "leave_one_out: true cannot be combined with credit: turn_groups"),
        (
            {"advantage_statistics": "token"},
            "advantage_statistics: token cannot be combined with credit",
        ),
        ({"advantage_mean": "none"}, "advantage_mean: none cannot be combined with credit: turn_groups"),
        ({"turn_return": "own", "turn_discount": 0.9}, "turn_discount: 0.9 needs turn_return: reward_to_go"),
        ({"turn_weight": 0.0}, "greater than 0"),
        ({"credit": "episode", "turn_weight": 0.5}, "turn_weight: 0.5 needs credit: turn_groups"),
        ({"estimator": "gae"}, "credit: turn_groups needs estimator: group"),
    ],
)
def test_settings_that_turn_groups_cannot_use_are_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError) as caught:
        config(**given)
    assert reason in str(caught.value)
