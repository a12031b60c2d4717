"""Small turns and groups to fill a store with."""

from __future__ import annotations

from areal_agents.core.completion import Completion, SamplingParams
from areal_agents.core.messages import Message, ToolCall
from areal_agents.core.rollout import Reward, Task
from areal_agents.core.trajectory import Fork, Turn
from areal_agents.store import NewEpisode, Store


def make_turn(turn_id: str, parent: str | None = None, version: int = 0) -> Turn:
    """Return a turn with every field set that a root or a child may have."""
    call = ToolCall("call_1", "search", '{"query": "café"}')
    return Turn(
        id=turn_id,
        parent=parent,
        new_messages=(
            Message("user", f"question of {turn_id}"),
            Message("tool", "x", tool_call_id="c", name="f"),
        ),
        new_prompt_ids=[5, 6, 7],
        completion=Completion([8, 9], [-0.5, -1.25], [version, version + 1], "length"),
        reply=Message("assistant", f"answer of {turn_id}", reasoning="hm", tool_calls=(call,)),
        sampling=SamplingParams(max_new_tokens=2, temperature=0.5, stop=("x",), stop_token_ids=(3,), seed=1),
        tools_id="abc",
        label="sub",
        forked_from=Fork(None, "new conversation", 0) if parent is None else None,
        constrained=True,
        overrides=("temperature",),
        recorded_before=0 if parent is None else 1,
    )


def open_episode(
    store: Store, episode_id: str, group: str | None = "t@0", size: int = 2, **fields: object
) -> None:
    """Open an episode of a group, with the task that the group's id names."""
    task = Task(group.partition("@")[0], {"question": 1}) if group else None
    new = NewEpisode(episode_id, f"hash of {episode_id}", task, group, size if group else None, **fields)  # type: ignore[arg-type]
    store.open_episode(new).result()


def reward(value: float, name: str = "return") -> list[Reward]:
    """Return a reward of the whole episode."""
    return [Reward("episode", "", name, value)]


def complete_group(store: Store, group: str, scores: list[float], split: str = "train") -> None:
    """Open, play, reward and finish a whole group."""
    for index, score in enumerate(scores):
        episode_id = f"{group}/{index}"
        open_episode(store, episode_id, group, len(scores), split=split)
        store.add_turn(episode_id, make_turn(f"{episode_id}/a")).result()
        store.add_turn(episode_id, make_turn(f"{episode_id}/b", parent=f"{episode_id}/a", version=3)).result()
        store.set_rewards(episode_id, reward(score)).result()
        store.seal(episode_id, "finished").result()
