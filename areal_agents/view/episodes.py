"""An episode for the page: its turns as messages, why it forked, and the tokens of its branches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from areal_agents.core.rollout import Reward
from areal_agents.core.trajectory import Turn
from areal_agents.errors import ConfigError, StoreError
from areal_agents.store import NotFound, pages, reads
from areal_agents.view.forks import shown_forks, shown_origin
from areal_agents.view.runs import Run
from areal_agents.view.trained import trained_turns

_TOKENS = 6_000  # a part of a branch has whole turns, and ends with the one that exceeds this number
_DIGITS = 5  # of logprobs, after the point


def shown_episode(run: Run, episode_id: str) -> dict[str, Any]:
    """Return an episode with its turns, rewards and neighbours. Raises NotFound or StoreError."""
    with run.reading(episode_id) as (connection, of_run):
        listed = pages.listed_episode(connection, episode_id)
        row = reads.episode_row(connection, id=episode_id)
        task = pages.task_of(connection, episode_id)
        marks = pages.turn_marks(connection, episode_id)
        turns = pages.kept_turns(connection, episode_id)
        given = pages.rewards_of(connection, episode_id)
        before, after = pages.neighbours(connection, listed.seq)
        group = pages.group_of(connection, listed.group_id) if listed.group_id is not None else None
        version = pages.batch_version(connection, listed.group_id) if listed.group_id is not None else None
    score = listed.score
    if (again := run.new_rewards().get(episode_id)) is not None:
        given = [_reward(name, value, turns) for name, value in again.items()]
        score = sum(again.values())
    if group is not None:
        group = run.with_new_scores(group)
    forks, forks_problem = [], None
    try:
        forks = shown_forks(run, episode_id)
    except StoreError as error:  # the episode can be shown all the same
        forks_problem = str(error)
    return {
        **asdict(listed),
        "score": score,
        "task": {"id": task.id, "input": task.input},
        "metadata": row.metadata,
        "limits": row.limits,
        "sampling": row.sampling,
        "is_implicit": row.implicit_key is not None,
        "rewards": [asdict(reward) for reward in given],
        "turns": [
            _shown_turn(turns[turn_id], created_at, given) if kept else _deleted_turn(turn_id, created_at)
            for turn_id, created_at, kept in marks
        ],
        "before": before,
        "after": after,
        "group_state": group.state if group else None,
        "group_episodes": [{"id": e.id, "score": e.score} for e in group.episodes] if group else [],
        "batch_version": version,
        "max_staleness": _max_staleness(run),
        "staleness": _staleness(turns.values(), version),
        "forked_from": shown_origin(row.metadata, of_run=of_run),
        "forks": forks,
        "forks_problem": forks_problem,
    }


def _reward(name: str, value: float, turns: Mapping[str, Turn]) -> Reward:
    """Return a reward that was computed again, of the turn that it names or of the episode."""
    return Reward("turn", name, "return", value) if name in turns else Reward("episode", "", name, value)


def shown_tokens(run: Run, episode_id: str, leaf: str, start: int) -> dict[str, Any]:
    """Return the tokens of a branch, from its turn number `start` on.

    A part has whole turns; `next` is the number of the turn with which the next part begins, or None. For a
    sampled token, the mask says whether the trainer may train on it: "trained", or why it is not.

    Raises:
        NotFound: the episode or the turn does not exist, or its tokens were deleted.
    """
    with run.reading(episode_id) as (connection, _):
        listed = pages.listed_episode(connection, episode_id)
        turns = pages.kept_turns(connection, episode_id)
        version = pages.batch_version(connection, listed.group_id) if listed.group_id is not None else None
        state = pages.group_of(connection, listed.group_id).state if listed.group_id is not None else None
        steps = pages.steps_of_group(connection, listed.group_id) if listed.group_id is not None else []
    path = _path(turns, leaf)
    end, count = start, 0
    while end < len(path) and count <= _TOKENS:
        count += len(path[end].new_prompt_ids) + len(path[end].completion)
        end += 1
    shown, texts, parts = path[start:end], run.texts(), []
    trained: dict[str, dict[str, Any]] = {}
    record_problem = None
    try:
        trained = trained_turns(run, [turn.id for turn in shown], steps)
    except ConfigError as error:  # the store's part can be shown all the same
        record_problem = str(error)
    for number, turn in enumerate(shown, start):
        prompt, sampled = turn.new_prompt_ids.tolist(), turn.completion.token_ids.tolist()
        found = texts.of([*prompt, *sampled])
        parts.append(
            {
                "turn": turn.id,
                "number": number,
                "prompt_tokens": len(prompt),
                "ids": [*prompt, *sampled],
                "texts": found,
                "logprobs": _logprobs(turn),
                "versions": _versions(turn),
                "mask": _mask(turn, listed.split, state),
                "trained": trained.get(turn.id),
            }
        )
    return {
        "parts": parts,
        "next": end if end < len(path) else None,
        "turns": len(path),
        "problem": texts.problem,
        "record_problem": record_problem,
        "batch_version": version,
        "max_staleness": _max_staleness(run),
    }


def _logprobs(turn: Turn) -> list[float | None]:
    """Return the behavior logprob of each token; None for imported ones."""
    known = turn.completion.logprobs
    if known is None:
        return [None] * len(turn.completion)
    return np.round(known.astype(np.float64), _DIGITS).tolist()


def _versions(turn: Turn) -> list[int | None]:
    """Return the version that sampled each token; None for imported ones."""
    if turn.completion.is_imported:
        return [None] * len(turn.completion)
    return turn.completion.versions.tolist()


def _path(turns: Mapping[str, Turn], leaf: str) -> list[Turn]:
    """Return the turns from the root to `leaf`. Raises NotFound if one of them is missing."""
    path: list[Turn] = []
    wanted: str | None = leaf
    while wanted is not None:
        if wanted not in turns:
            raise NotFound(f"turn {wanted} does not exist, or its tokens were deleted (store.retain)")
        path.append(turns[wanted])
        wanted = path[-1].parent
    return path[::-1]


def _mask(turn: Turn, split: str, state: str | None) -> str:
    """Say whether the sampled tokens of a turn are trained, as far as the store knows."""
    if split == "eval":
        return "evaluation"
    if turn.discarded:
        return f"discarded: {turn.discarded}"
    if turn.constrained:
        return "constrained"
    if turn.completion.is_imported:
        return "imported"
    if state is None:
        return "no group"
    return {"trained": "trained", "dropped": "group dropped"}.get(state, "not trained yet")


def _shown_turn(turn: Turn, created_at: float, given: Sequence[Reward]) -> dict[str, Any]:
    fork, versions, logprobs = turn.forked_from, turn.completion.versions, turn.completion.logprobs
    is_sampled = logprobs is not None and len(logprobs) > 0
    return {
        "id": turn.id,
        "parent": turn.parent,
        "created_at": created_at,
        "messages": [message.to_dict() for message in turn.new_messages],
        "reply": turn.reply.to_dict(),
        "finish_reason": turn.completion.finish_reason,
        "prompt_tokens": len(turn.new_prompt_ids),
        "sampled_tokens": len(turn.completion),
        "version_min": int(versions.min()) if is_sampled else None,
        "version_max": int(versions.max()) if is_sampled else None,
        "mean_logprob": None if logprobs is None or not is_sampled else float(logprobs.mean()),
        "imported": turn.completion.is_imported,
        "label": turn.label,
        "constrained": turn.constrained,
        "discarded": turn.discarded,
        "overrides": turn.overrides,
        "temperature": turn.sampling.temperature,
        "fork": None if fork is None else asdict(fork),
        "special_tokens_as_text": turn.special_tokens_as_text,
        "volatile_as_first_seen": turn.volatile_as_first_seen,
        "rewards": [asdict(reward) for reward in given if reward.target == turn.id],
        "deleted": False,
    }


def _deleted_turn(turn_id: str, created_at: float) -> dict[str, Any]:
    return {"id": turn_id, "parent": None, "created_at": created_at, "deleted": True}


def _staleness(turns: Iterable[Turn], version: int | None) -> dict[int, int]:
    """Return the number of sampled tokens by their staleness; {} if they are not trained."""
    if version is None:
        return {}
    found = [turn.completion.versions for turn in turns if len(turn.completion)]
    if not found:
        return {}
    values, counts = np.unique(version - np.concatenate(found), return_counts=True)
    return {int(value): int(count) for value, count in zip(values, counts, strict=True)}


def _max_staleness(run: Run) -> float | None:
    """Return the bound of the run's configuration; None without one."""
    bound = (run.config().get("rollout") or {}).get("max_staleness")
    return bound if isinstance(bound, int | float) and bound != float("inf") else None
