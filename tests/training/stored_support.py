"""Groups written directly to a store, with known scores, lengths and versions, and invalid rows."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Sequence

import numpy as np

from areal_agents.core.completion import Completion, SamplingParams, as_token_ids
from areal_agents.core.messages import Message
from areal_agents.core.rollout import Reward, Split, Task
from areal_agents.core.trajectory import Turn
from areal_agents.store import NewEpisode, Store

SAMPLED = 5
PROMPT = 6


def put_group(
    store: Store,
    name: str,
    scores: Sequence[float],
    *,
    prompt: int = PROMPT,
    version: int | Sequence[int] = 0,
    token: int = 7,
) -> None:
    """Store a complete group of one-turn episodes with these scores, of one version or of one each."""
    versions = [version] * len(scores) if isinstance(version, int) else version
    for index, (score, own) in enumerate(zip(scores, versions, strict=True)):
        _put(store, f"{name}-{index}", name, len(scores), index, score, prompt, own, token)


def put_episode(
    store: Store, name: str, score: float, *, split: Split = "train", temperature: float = 1.0
) -> None:
    """Store a scored episode that belongs to no group."""
    _put(store, name, None, 1, 0, score, PROMPT, 0, 7, split=split, temperature=temperature)


def _put(
    store: Store,
    episode: str,
    group: str | None,
    size: int,
    index: int,
    score: float,
    prompt: int,
    version: int,
    token: int,
    *,
    split: Split = "train",
    temperature: float = 1.0,
) -> None:
    task = group or episode
    key_hash = hashlib.sha256(episode.encode()).hexdigest()
    new = (
        NewEpisode(id=episode, key_hash=key_hash, task=Task(task, {}), split=split)
        if group is None
        else NewEpisode(
            id=episode, key_hash=key_hash, task=Task(task, {}), group_id=group, group_size=size, index=index
        )
    )
    store.open_episode(new).result()
    turn = Turn(
        id=f"{episode}-t",
        parent=None,
        new_messages=(Message("user", task),),
        new_prompt_ids=as_token_ids(np.arange(2, 2 + prompt)),
        completion=Completion(
            as_token_ids([token] * SAMPLED),
            np.full(SAMPLED, -1.5, np.float32),
            np.full(SAMPLED, version, np.int32),
            "stop",
        ),
        reply=Message("assistant", episode),
        sampling=SamplingParams(max_new_tokens=SAMPLED, temperature=temperature),
    )
    store.add_turn(episode, turn).result()
    store.seal(episode, "finished", given=[Reward("episode", "", "return", score)]).result()


def execute(store: Store, statement: str, *values: object) -> None:
    """Change rows without the store's checks, as a faulty disk or another program would."""
    with sqlite3.connect(store.path) as connection:
        connection.execute(statement, values)


def drop_reasons(store: Store) -> dict[str, str]:
    """Return the reasons for which the trainer dropped groups, by group id."""
    with sqlite3.connect(store.path) as connection:
        return dict(connection.execute("select group_id, reason from leases where state = 'dropped'"))


def break_reward(store: Store, episode: str) -> None:
    """Make the rewards of an episode infinite."""
    execute(store, "update rewards set value = 9e999 where episode_id = ?", episode)


def shorten_logprobs(store: Store, episode: str) -> None:
    """Store one logprob fewer than there are tokens."""
    blob = np.full(SAMPLED - 1, -1.5, np.float32).tobytes()
    execute(store, "update turns set logprobs = ? where episode_id = ?", blob, episode)


def empty_group(store: Store, group: str) -> None:
    """Remove every episode from a complete group."""
    execute(store, "update episodes set group_id = null where group_id = ?", group)
