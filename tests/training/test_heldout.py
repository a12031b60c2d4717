"""The held-out reward by which a checkpoint is judged."""

from __future__ import annotations

from areal_agents.core.rollout import Reward, Task
from areal_agents.store import NewEpisode, Store
from areal_agents.training.checkpoint.best import heldout_reward


def evaluate(store: Store, step: int, scores: list[float], *, end: str = "finished") -> None:
    """Store the episodes of an evaluation; `end` is the state of the last one."""
    for index, score in enumerate(scores):
        name = f"{step}-{index}-{end}"
        metadata = {"source": "rollout", "eval": f"step-{step}", "step": step}
        new = NewEpisode(
            id=name, key_hash=name, task=Task(f"task-{index}", {}), split="eval", metadata=metadata
        )
        store.open_episode(new).result()
        last = index == len(scores) - 1
        if last and end == "failed":
            store.seal(name, "failed", error="the agent crashed").result()
        elif not last or end == "finished":
            store.seal(name, "finished", given=[Reward("episode", "", "return", score)]).result()


def test_a_checkpoint_is_judged_by_the_newest_evaluation_that_has_ended(store: Store) -> None:
    assert heldout_reward(store, 20) is None
    evaluate(store, 0, [1.0, 1.0])  # the initial weights
    assert heldout_reward(store, 20) is None
    evaluate(store, 10, [0.0, 1.0])
    evaluate(store, 15, [1.0, 1.0])
    evaluate(store, 18, [0.0, 0.0], end="open")
    assert heldout_reward(store, 9) is None
    assert heldout_reward(store, 12) == 0.5
    assert heldout_reward(store, 20) == 1.0


def test_a_failed_episode_counts_as_zero_and_its_retry_replaces_it(store: Store) -> None:
    evaluate(store, 10, [0.5, 1.0], end="failed")
    assert heldout_reward(store, 10) == 0.25
    evaluate(store, 10, [0.5, 1.0])
    assert heldout_reward(store, 10) == 0.75


def test_an_evaluation_with_fewer_tasks_than_the_one_before_has_not_ended(store: Store) -> None:
    """Its next episode has not been opened yet, or the evaluation was interrupted."""
    evaluate(store, 0, [0.0, 0.0])
    evaluate(store, 10, [1.0])
    assert heldout_reward(store, 10) is None
    evaluate(store, 15, [0.5, 1.0])
    evaluate(store, 20, [1.0])
    assert heldout_reward(store, 20) == 0.75
    evaluate(store, 25, [0.25])  # fewer tasks are configured: this evaluation has as many as the previous one
    assert heldout_reward(store, 25) == 0.25
