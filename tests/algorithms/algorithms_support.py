"""Concise constructors of episodes, groups and samples."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from areal_agents.core.completion import Completion, FinishReason, SamplingParams
from areal_agents.core.messages import Message
from areal_agents.core.rollout import EpisodeStatus, RecordedEpisode, Reward, Rollout, RolloutGroup, Task
from areal_agents.core.sample import TrainingSample
from areal_agents.core.trajectory import Turn

TASK = Task("task", {})


def turn(
    id: str,
    parent: str | None = None,
    *,
    prompt: Sequence[int] = (1, 2),
    sampled: Sequence[int] = (3, 4),
    versions: Sequence[int] | None = None,
    temperature: float = 1.0,
    finish: FinishReason = "stop",
    **fields: object,
) -> Turn:
    """A turn with logprobs −0.1, −0.2, …"""
    logprobs = [-0.1 * (i + 1) for i in range(len(sampled))]
    return Turn(
        id=id,
        parent=parent,
        new_messages=(Message("user", id),),
        new_prompt_ids=np.array(prompt, np.int32),
        completion=Completion(sampled, logprobs, versions or [0] * len(sampled), finish),  # type: ignore[arg-type]
        reply=Message("assistant", id),
        sampling=SamplingParams(max_new_tokens=64, temperature=temperature),
        **fields,  # type: ignore[arg-type]
    )


def episode(
    turns: Sequence[Turn],
    reward: float | None = None,
    *,
    id: str = "e",
    by_turn: dict[str, float] | None = None,
    by_branch: dict[str, float] | None = None,
    status: EpisodeStatus = "finished",
) -> RecordedEpisode:
    """An episode with an episode reward, turn rewards and branch rewards."""
    rewards = [] if reward is None else [Reward("episode", "", "return", reward)]
    rewards += [Reward("turn", target, "step", value) for target, value in (by_turn or {}).items()]
    rewards += [Reward("branch", target, "branch", value) for target, value in (by_branch or {}).items()]
    return RecordedEpisode(id, TASK, tuple(turns), status, tuple(rewards))


def group(episodes: Sequence[RecordedEpisode], *, id: str = "g") -> RolloutGroup:
    """A group of episodes of one task."""
    return RolloutGroup(id, TASK, tuple(Rollout(TASK, i, e, None) for i, e in enumerate(episodes)))


def random_episode(
    rng: random.Random, *, id: str = "e", turns: int = 8, start: int = 0, dense: bool = False
) -> RecordedEpisode:
    """A random forest; token ids count up from `start`, so that every sampled token has a unique id.

    A call begins at a random moment after its parent was recorded, so calls overlap. With `dense`, half of
    the turns and all branches have rewards, and a quarter of the turns are constrained, on average.
    """
    counter = iter(range(start, start + 10**6))
    made: list[Turn] = []
    for index in range(turns):
        parent = rng.choice([None, *made]) if made else None
        earliest = made.index(parent) + 1 if parent else 0
        made.append(
            turn(
                f"{id}-{index}",
                parent.id if parent else None,
                prompt=[next(counter) for _ in range(rng.randint(0 if parent else 1, 3))],
                sampled=[next(counter) for _ in range(rng.randint(1, 3))],
                constrained=dense and rng.random() < 0.25,
                recorded_before=rng.randint(earliest, index),
            )
        )
    some = [t.id for t in made if dense and rng.random() < 0.5]
    leaves = {t.id for t in made} - {t.parent for t in made}
    return episode(
        made,
        rng.random(),
        id=id,
        by_turn={turn_id: rng.uniform(-1, 1) for turn_id in some},
        by_branch={turn_id: rng.uniform(-1, 1) for turn_id in sorted(leaves) if dense},
    )


def random_groups(seed: int, *, groups: int = 3, size: int = 3, dense: bool = True) -> list[RolloutGroup]:
    """Groups of random episodes, in which every sampled token has a unique id."""
    rng = random.Random(seed)
    return [
        group(
            [
                random_episode(
                    rng, id=f"{g}-{e}", turns=rng.randint(1, 9), start=(g * size + e) * 10**4, dense=dense
                )
                for e in range(size)
            ],
            id=f"g{g}",
        )
        for g in range(groups)
    ]


def began(recorded: RecordedEpisode) -> list[int]:
    """For each turn, the number of turns that were recorded when its call began, computed from the turns."""
    ids = [t.id for t in recorded.turns]
    return [
        (0 if t.parent is None else ids.index(t.parent) + 1)
        if t.recorded_before is None
        else t.recorded_before
        for t in recorded.turns
    ]


def defined_depths(recorded: RecordedEpisode) -> list[int]:
    """For each turn, 1 + the greatest depth among the turns that were recorded when its call began."""
    depths: list[int] = []
    for k in began(recorded):
        depths.append(1 + max([0, *depths[:k]]))
    return depths


def defined_to_go(recorded: RecordedEpisode, k: int, *, discount: float) -> float:
    """D(k) of an unshaped episode by its definition: the episode reward, plus the rewards of the turns after
    the first k, each discounted once per level of depth below that of a call that begins after k turns."""
    ids, depths = [t.id for t in recorded.turns], defined_depths(recorded)
    here = 1 + max([0, *depths[:k]])
    total = 0.0
    for reward in recorded.rewards:
        if reward.scope == "episode":
            total += reward.value
        elif (place := ids.index(reward.target)) >= k:
            total += discount ** max(0, depths[place] - here) * reward.value
    return total


def sample(
    token_ids: Sequence[int],
    trained: Sequence[int],
    *,
    group_id: str = "g",
    episode_id: str = "e",
    versions: Sequence[int] | None = None,
    advantage: float = 1.0,
) -> TrainingSample:
    """A sample with logprob −1 on its trained positions."""
    length = len(token_ids)
    mask = np.zeros(length, bool)
    mask[list(trained)] = True
    return TrainingSample(
        token_ids=np.array(token_ids, np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -1, 0).astype(np.float32),
        versions=np.array(versions if versions is not None else np.where(mask, 0, -1), np.int32),
        temperatures=np.ones(length, np.float32),
        advantages=np.where(mask, advantage, 0).astype(np.float32),
        turn_index=np.where(mask, 0, -1).astype(np.int32),
        episode_id=episode_id,
        group_id=group_id,
    )
