"""The training data does not depend on which of several concurrent calls or groups finished first."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.ordering import ordered_groups, ordered_turns
from areal_agents.algorithms.samples import build_training_data
from areal_agents.core.completion import Completion, SamplingParams
from areal_agents.core.messages import Message
from areal_agents.core.rollout import RecordedEpisode, Reward, Rollout, RolloutGroup, Task
from areal_agents.core.trajectory import Turn


def turn(
    turn_id: str, parent: str | None, prompt: list[int], drawn: list[int], seed: int | None = None
) -> Turn:
    return Turn(
        id=turn_id,
        parent=parent,
        new_messages=(Message("user", "q"),),
        new_prompt_ids=prompt,  # type: ignore[arg-type]
        completion=Completion(drawn, [-0.5] * len(drawn), [0] * len(drawn), "stop"),  # type: ignore[arg-type]
        reply=Message("assistant", "a"),
        sampling=SamplingParams(8, seed=seed),
    )


def group(group_id: str, shuffled: random.Random, scores: tuple[float, ...] = (0.25, 1.0)) -> RolloutGroup:
    """Episodes with a branching conversation and a second conversation, with random ids and in random
    order."""
    task, rollouts = Task("t", {}), []
    for index, score in enumerate(scores):
        ids = [f"turn-{shuffled.getrandbits(32)}" for _ in range(5)]
        turns = [
            turn(ids[0], None, [3, 1], [9, 8]),
            turn(ids[1], ids[0], [5], [7, index]),
            turn(ids[2], ids[0], [5], [6, index]),
            turn(ids[3], ids[2], [4], [2]),
            turn(ids[4], None, [3, 2], [8, 8]),
        ]
        order = sorted(range(5), key=lambda _: shuffled.random())
        waiting, recorded = [turns[i] for i in order], []
        while waiting:  # a parent is recorded before its children
            next_one = next(t for t in waiting if t.parent is None or t.parent in {r.id for r in recorded})
            waiting.remove(next_one)
            recorded.append(next_one)
        # the sum of these rewards in floating point depends on their order
        rewards = (
            Reward("episode", "", "return", score),
            Reward("turn", ids[1], "style", 0.1),
            Reward("turn", ids[2], "style", 0.2 + index),
            Reward("turn", ids[4], "style", 1e-9),
            Reward("turn", ids[0], "style", 0.7),
        )
        rollouts.append(
            Rollout(
                task,
                index,
                RecordedEpisode(f"e{shuffled.random()}", task, tuple(recorded), "finished", rewards),
                None,
            )
        )
    return RolloutGroup(group_id, task, tuple(rollouts))


def trained(groups: list[RolloutGroup]) -> list[tuple]:
    data = build_training_data(ordered_groups(groups), AlgorithmConfig())
    return [
        (
            s.group_id,
            s.token_ids.tolist(),
            s.loss_mask.tolist(),
            s.advantages.tobytes(),
            [score.hex() for score in data.group_scores[s.group_id]],
            # which tokens belong to the same turn; the index itself is the turn's position in recording order
            [s.token_ids[s.turn_index == place].tolist() for place in dict.fromkeys(s.turn_index)],
        )
        for s in data.samples
    ]


@pytest.mark.parametrize("seed", range(5))
def test_samples_do_not_depend_on_the_recording_order(seed: int) -> None:
    first = trained([group("a", random.Random(0)), group("b", random.Random(1))])
    other = trained([group("b", random.Random(seed + 2)), group("a", random.Random(-seed))])
    assert first == other and len(first) == 2 * 2 * 3


def test_only_credit_by_reward_to_go_depends_on_the_recording_order() -> None:
    """The same turns are recorded in two orders; a reward is earned by calls that began before its turn was
    recorded."""
    first, second = turn("a", None, [1], [5]), turn("b", None, [2], [6])

    def advantages(turns: list[Turn], credit: str) -> dict[int, float]:
        began = [replace(t, recorded_before=place) for place, t in enumerate(turns)]
        task, rewards = Task("t", {}), (Reward("turn", "b", "step", 1.0),)
        other = RecordedEpisode("f", task, tuple(began), "finished", ())
        own = RecordedEpisode("e", task, tuple(began), "finished", rewards)
        rollouts = (Rollout(task, 0, own, None), Rollout(task, 1, other, None))
        config = AlgorithmConfig(credit=credit, advantage_std="none")
        data = build_training_data([RolloutGroup("g", task, rollouts)], config)
        return {int(s.token_ids[-1]): float(s.advantages[-1]) for s in data.samples if s.episode_id == "e"}

    assert advantages([first, second], "reward_to_go") == {5: 0.5, 6: 0.5}
    assert advantages([second, first], "reward_to_go") == {5: 0.0, 6: 0.5}
    assert advantages([first, second], "episode") == advantages([second, first], "episode")


def test_a_conversation_without_branches_keeps_its_order() -> None:
    turns = [turn("z", None, [9], [1]), turn("y", "z", [5], [1]), turn("a", "y", [1], [0])]
    assert [t.id for t in ordered_turns(turns)] == ["z", "y", "a"]


def test_equal_turns_are_ordered_by_their_seeds() -> None:
    turns = [turn("a", None, [1], [2], seed=5), turn("b", None, [1], [2], seed=3), turn("c", None, [1], [2])]
    assert [t.id for t in ordered_turns(turns)] == ["c", "b", "a"]
