"""Values are validated when they are created, and cannot be changed afterwards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from areal_agents.core.completion import Completion, SamplingParams, as_token_ids
from areal_agents.core.messages import Message
from areal_agents.core.rollout import RecordedEpisode, Reward, Rollout, RolloutGroup, Task
from areal_agents.core.sample import ImageInput, TrainingSample
from areal_agents.core.trajectory import Turn

TASK = Task("t", {})


def make_turn(turn_id: str) -> Turn:
    completion = Completion([1], [-1.0], [0], "stop")
    return Turn(
        turn_id, None, (Message("user", "q"),), [1], completion, Message("assistant", "a"), SamplingParams(1)
    )


def make_episode(*rewards: Reward, status: Any = "finished") -> RecordedEpisode:
    return RecordedEpisode("e", TASK, (make_turn("a"), make_turn("b")), status, rewards)


@pytest.mark.parametrize(
    ("logprobs", "versions", "reason", "message"),
    [
        ([-1.0], [0, 0], "stop", "one logprob and one version per token"),
        ([-1.0, -1.0], [0], "stop", "one logprob and one version per token"),
        ([-1.0, -1.0], [0, 0], "tool_calls", "finish_reason"),
        ([-1.0, 0.5], [0, 0], "stop", "at most 0"),
        ([-1.0, float("nan")], [0, 0], "stop", "finite"),
        ([-1.0, float("-inf")], [0, 0], "stop", "finite"),
        ([[-1.0], [-1.0]], [0, 0], "stop", "one-dimensional"),
    ],
)
def test_an_invalid_completion_is_refused(logprobs: Any, versions: Any, reason: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Completion([1, 2], logprobs, versions, reason)


def test_arrays_are_copied_and_frozen() -> None:
    ids = np.array([1, 2])
    completion = Completion(ids, [-1.0, 0.0], [0, 0], "stop")
    ids[0] = 9
    assert completion.token_ids.tolist() == [1, 2] and completion.token_ids.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        completion.token_ids[0] = 3
    with pytest.raises(ValueError, match="one-dimensional"):
        as_token_ids([[1]])


@pytest.mark.parametrize(
    "fields",
    [{"max_new_tokens": 0}, {"temperature": -1}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -1}, {"min_p": 2}],
)
def test_invalid_sampling_parameters_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        SamplingParams(**{"max_new_tokens": 1, **fields})


def test_the_score_is_the_sum_of_all_rewards() -> None:
    rewards = (
        Reward("episode", "", "return", 1.0),
        Reward("episode", "", "style", 0.5),
        Reward("turn", "a", "return", 0.25),
        Reward("branch", "b", "return", 0.125),
    )
    assert make_episode(*rewards).score == 1.875
    assert make_episode().score == 0


def test_invalid_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        Reward("episode", "", "return", float("nan"))
    with pytest.raises(ValueError, match="target"):
        Reward("episode", "a", "return", 1)
    with pytest.raises(ValueError, match="target"):
        Reward("turn", "", "return", 1)
    with pytest.raises(ValueError, match="not one of its turns"):
        make_episode(Reward("turn", "c", "return", 1))


def test_invalid_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="group g must have at least one rollout"):
        RolloutGroup("g", TASK, ())
    with pytest.raises(ValueError, match="failed"):
        RolloutGroup("g", TASK, (Rollout(TASK, 0, make_episode(status="failed"), "crash"),))
    with pytest.raises(ValueError, match="all rollouts must be of task other"):
        RolloutGroup("g", Task("other", {}), (Rollout(TASK, 0, make_episode(), None),))


def make_sample(**fields: Any) -> TrainingSample:
    arrays: dict[str, Any] = {
        "token_ids": np.array([1, 2]),
        "loss_mask": np.array([False, True]),
        "behavior_logprobs": np.array([0.0, -1.0]),
        "versions": np.array([-1, 0]),
        "temperatures": np.ones(2),
        "advantages": np.array([0.0, 0.5]),
        "turn_index": np.array([-1, 0]),
    }
    return TrainingSample(**{**arrays, **fields}, episode_id="e", group_id="g")


def test_a_sample_must_be_aligned_and_finite() -> None:
    assert len(make_sample()) == 2
    with pytest.raises(ValueError, match="all arrays must have one length"):
        make_sample(versions=np.array([0]))
    with pytest.raises(ValueError, match="first token"):
        make_sample(loss_mask=np.array([True, True]))
    with pytest.raises(ValueError, match="must be finite"):
        make_sample(advantages=np.array([0.0, np.inf]))
    with pytest.raises(ValueError, match="belongs to no turn"):
        make_sample(turn_index=np.array([-1, -1]))
    with pytest.raises(ValueError, match="one length.*'behavior_logprobs': 1"):
        make_sample(behavior_logprobs=np.array([0.0]))
    with pytest.raises(ValueError, match="layers"):
        make_sample(routed_experts=np.zeros((2, 1), np.int16))


def test_an_image_has_as_many_rows_as_its_grid_has_patches() -> None:
    assert ImageInput(np.zeros((8, 3), np.float32), (1, 2, 4), start=0, length=2).grid_thw == (1, 2, 4)
    with pytest.raises(ValueError, match=r"1 x 2 x 4 patches.*\(7, 3\)"):
        ImageInput(np.zeros((7, 3), np.float32), (1, 2, 4), start=0, length=2)
