"""Validates the bodies of control requests, and converts episodes to JSON."""

from __future__ import annotations

import hashlib
import math
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from areal_agents.core.completion import SamplingParams
from areal_agents.core.reward_values import LARGEST_REWARD
from areal_agents.core.rollout import LARGEST_GROUP, RecordedEpisode, Reward, Split, Task
from areal_agents.core.trajectory import Turn
from areal_agents.errors import RequestError, shown
from areal_agents.proxy.auth import key_hash
from areal_agents.proxy.calls.sampling import BASE_SEED, PINS
from areal_agents.proxy.dialects.turn_ids import turn_id_of
from areal_agents.proxy.episodes.sessions import EpisodeLimits
from areal_agents.store import DEFAULT_REWARD_NAME, EpisodeRow, NewEpisode, NewGroup

_SCOPES = ("episode", "turn", "branch")
_OPENING = (
    "task", "id", "group", "group_size", "surplus", "index", "split", "metadata", "limits", "sampling"
)  # fmt: skip
_BEGINNING = ("id", "task", "group_size", "surplus", "runner", "at_most", "at_step")
_EPISODE_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_REWARD = ("reward", "completion_id", "scope", "name")
_LONGEST_REWARD_NAME = 200  # characters; every row of metrics has the names
_MOST_REWARDS = 10_000  # in one request, because its transaction delays other writes


def refuse_unknown(
    names: Iterable[str], known: Sequence[str], what: str = "field", *, param: str | None = None
) -> None:
    """Raise RequestError 400 if one of `names` is not in `known`, because it would have no effect.

    The error names `param`, by default the unknown name itself.
    """
    for name in names:
        if name not in known:
            raise RequestError(
                f"unknown {what} {shown(name)}; it must be one of {', '.join(known)}", param=param or name
            )


def new_episode(body: Mapping[str, Any], key: str, default_group_size: int) -> NewEpisode:
    """Return the episode that a request opens. A RequestError 400 names the field at fault."""
    refuse_unknown(body, _OPENING)
    group_id = _optional(body, "group", str)
    given_id = _optional(body, "id", str)
    if given_id is not None and not _EPISODE_ID.fullmatch(given_id):
        raise RequestError(
            f"id must have 1 to 64 letters, digits, - and _, got {shown(given_id)}", param="id"
        )
    return NewEpisode(
        id=given_id or f"episode-{secrets.token_hex(8)}",
        is_named=given_id is not None,
        key_hash=key_hash(key),
        task=_task(body.get("task")),
        group_id=group_id,
        group_size=_group_size(body) if group_id is not None else None,
        default_group_size=default_group_size,
        surplus=_surplus(body) if group_id is not None else None,
        index=_index(body),
        split=_split(body.get("split", "train")),
        metadata=_optional(body, "metadata", dict) or {},
        limits=_limits(_optional(body, "limits", dict) or {}),
        sampling=_sampling(_optional(body, "sampling", dict) or {}),
    )


def new_group(body: Mapping[str, Any]) -> NewGroup:
    """Return the group that a rollout process would begin. A RequestError 400 names the field at fault."""
    refuse_unknown(body, _BEGINNING)
    task, size, at_most = _task(body.get("task")), _group_size(body), _optional(body, "at_most", int)
    for name, value in (("task", task), ("group_size", size), ("at_most", at_most)):
        if value is None:
            raise RequestError(f"{name} is required", param=name)
    assert task is not None and size is not None and at_most is not None
    return NewGroup(
        id=_named(body, "id"),
        task=task,
        size=size,
        surplus=_surplus(body) or 0,
        runner=_named(body, "runner"),
        at_most=at_most,
        at_step=_optional(body, "at_step", int),
    )


def claim_of(body: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the rollout process that has a group, and the one that claims it; None: a run's only one."""
    refuse_unknown(body, ("expected", "runner"))
    return _optional(body, "expected", str), _optional(body, "runner", str)


def _named(body: Mapping[str, Any], name: str) -> str:
    value: str | None = _optional(body, name, str)
    if not value:
        raise RequestError(f"{name} is required: a string", param=name)
    return value


def _optional(body: Mapping[str, Any], name: str, kind: type) -> Any:
    value = body.get(name)
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise RequestError(f"{name} must be of type {kind.__name__}, got {shown(value)}", param=name)
    return value


def _task(value: Any) -> Task | None:
    """Return a task given as an id, as {id, input}, or as any other object, which is then the input itself.

    Without an id, the id is a digest of the input.
    """
    if value is None:
        return None
    if isinstance(value, str) and value:
        return Task(value, {})
    if not isinstance(value, dict) or not value:
        raise RequestError(f"task must be an id or an object, got {shown(value)}", param="task")
    task_input = value.get("input", {}) if set(value) <= {"id", "input"} else value
    if not isinstance(task_input, dict):
        raise RequestError("task.input must be an object", param="task.input")
    task_id = value.get("id", _digest(task_input))
    if isinstance(task_id, int) and not isinstance(task_id, bool):
        task_id = str(task_id)
    if not isinstance(task_id, str) or not task_id:
        raise RequestError(f"task.id must be a string or an integer, got {shown(task_id)}", param="task.id")
    return Task(task_id, task_input)


def _digest(data: Mapping[str, Any]) -> str:
    return hashlib.blake2b(orjson.dumps(data, option=orjson.OPT_SORT_KEYS), digest_size=8).hexdigest()


def _group_size(body: Mapping[str, Any]) -> int | None:
    size: int | None = _optional(body, "group_size", int)
    if size is not None and not 1 <= size <= LARGEST_GROUP:
        raise RequestError(f"group_size must be from 1 to {LARGEST_GROUP}, got {size}", param="group_size")
    return size


def _surplus(body: Mapping[str, Any]) -> int | None:
    surplus = _optional(body, "surplus", int)
    if surplus is not None and not 0 <= surplus < LARGEST_GROUP:
        raise RequestError(f"surplus must be from 0 to {LARGEST_GROUP - 1}, got {surplus}", param="surplus")
    return surplus


def _index(body: Mapping[str, Any]) -> int | None:
    index = _optional(body, "index", int)
    if index is not None and not 0 <= index < LARGEST_GROUP:
        raise RequestError(f"index must be from 0 to {LARGEST_GROUP - 1}, got {index}", param="index")
    return index


def _split(value: Any) -> Split:
    if value not in ("train", "eval"):
        raise RequestError(f'split must be "train" or "eval", got {shown(value)}', param="split")
    return value


def _limits(data: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        EpisodeLimits.from_dict(data)
    except ValueError as error:
        raise RequestError(str(error), param="limits") from None
    return data


def _sampling(data: Mapping[str, Any]) -> Mapping[str, Any]:
    for name, value in data.items():
        if (name not in PINS and name != BASE_SEED) or name == "logit_bias":
            names = ", ".join(known for known in (*PINS, BASE_SEED) if known != "logit_bias")
            raise RequestError(
                f"unknown sampling parameter {shown(name)}; it must be one of {names}",
                param=f"sampling.{name}",
            )
        kind = int if name in ("seed", BASE_SEED, "top_k") else (int, float)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
            raise RequestError(f"{name} must be a number, got {shown(value)}", param=f"sampling.{name}")
    given = {name: data[name] for name in data if name in PINS and data[name] is not None}
    try:
        SamplingParams(max_new_tokens=1, **given)
    except ValueError as error:
        raise RequestError(str(error), param="sampling") from None
    return data


def rewards_of(body: Mapping[str, Any]) -> list[Reward]:
    """Return the rewards of a request, whose `reward` is a number or an object by completion id or by name.

    Completion ids may have the form of any API. Raise RequestError 400 if a field is invalid.
    """
    refuse_unknown(body, _REWARD)
    value, name = body.get("reward"), body.get("name", "return")
    completion_id = body.get("completion_id")
    scope = body.get("scope", "turn" if completion_id else "episode")
    if not isinstance(name, str) or not name:
        raise RequestError(f"name must be a string, got {shown(name)}", param="name")
    if completion_id is not None and (not isinstance(completion_id, str) or not completion_id):
        raise RequestError(
            f"completion_id must be a string, got {shown(completion_id)}", param="completion_id"
        )
    if scope not in _SCOPES:
        raise RequestError(f"scope must be episode, turn or branch, got {shown(scope)}", param="scope")
    if scope == "episode" and completion_id:
        raise RequestError(
            "a reward with scope episode cannot have a completion_id; leave out one of them", param="scope"
        )
    if scope != "episode" and not completion_id:
        raise RequestError(
            f"a reward with scope {scope} needs the completion_id of the turn, or of the branch's last turn",
            param="scope",
        )
    target = turn_id_of(completion_id) or completion_id or ""
    if value == {}:
        raise RequestError("reward must not be an empty object", param="reward")
    if isinstance(value, dict) and len(value) > _MOST_REWARDS:
        raise RequestError(
            f"a request may have at most {_MOST_REWARDS} rewards, got {len(value)}", param="reward"
        )
    if not isinstance(value, dict):
        rewards = [Reward(scope, target, name, _finite(value))]
    elif completion_id is None and any(_is_completion(key) for key in value):
        if names := [key for key in value if not _is_completion(key)]:
            raise RequestError(
                f"the keys of reward must be completion ids or names, not both; {shown(names[0])} is a name",
                param="reward",
            )
        rewards = [Reward("turn", turn_id_of(key) or key, name, _finite(v)) for key, v in value.items()]
    else:
        if "" in value:
            raise RequestError("the name of a reward must not be empty", param="reward")
        rewards = [Reward(scope, target, key, _finite(item)) for key, item in value.items()]
    if (longest := max(len(reward.name) for reward in rewards)) > _LONGEST_REWARD_NAME:
        raise RequestError(
            f"the name of a reward may have at most {_LONGEST_REWARD_NAME} characters, got {longest}",
            param="name",
        )
    if any(reward.name == DEFAULT_REWARD_NAME for reward in rewards):
        raise RequestError(
            f"the reward name {DEFAULT_REWARD_NAME!r} is reserved for truncated episodes; use another name",
            param="name",
        )
    return rewards


def _is_completion(key: str) -> bool:
    return turn_id_of(key) is not None or key.startswith("chatcmpl-")


def flag_of(body: Mapping[str, Any], name: str) -> bool:
    """Return a field that is true or false; an absent one is false. Raise RequestError 400 otherwise."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, got {shown(value)}", param=name)
    return bool(value)


def final_rewards_of(body: Mapping[str, Any]) -> list[Reward]:
    """Return the rewards in a request that finishes an episode; each has the form that `rewards_of` reads."""
    items = _optional(body, "rewards", list) or []
    if not all(isinstance(item, dict) for item in items):
        raise RequestError("rewards must be a list of objects", param="rewards")
    rewards = [reward for item in items for reward in rewards_of(item)]
    if len(rewards) > _MOST_REWARDS:
        raise RequestError(
            f"a request may have at most {_MOST_REWARDS} rewards, got {len(rewards)}", param="rewards"
        )
    return rewards


def _finite(value: Any) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(f"reward must be a finite number, got {shown(value)}", param="reward")
    if abs(value) > LARGEST_REWARD:  # sums of rewards must be finite too
        raise RequestError(
            f"reward must be from -{LARGEST_REWARD:g} to {LARGEST_REWARD:g}, got {shown(value)}",
            param="reward",
        )
    return float(value)


def describe(row: EpisodeRow, episode: RecordedEpisode, *, with_tokens: bool) -> dict[str, Any]:
    """Return an episode with its turns in a form for JSON, with the exact tokens if requested."""
    return {
        "id": row.id,
        "task": {"id": episode.task.id, "input": episode.task.input},
        "group": row.group_id,
        "index": row.index,
        "split": row.split,
        "status": row.status,
        "error": row.error,
        "limit_reached": row.limit_reached,
        "metadata": row.metadata,
        "limits": row.limits,
        "sampling": row.sampling,
        "rewards": episode.rewards,
        "score": episode.score if episode.rewards else None,
        "created_at": row.created_at,
        "ended_at": row.ended_at,
        "turns": [_describe_turn(episode, turn, with_tokens=with_tokens) for turn in episode.turns],
    }


def _describe_turn(episode: RecordedEpisode, turn: Turn, *, with_tokens: bool) -> dict[str, Any]:
    out: dict[str, Any] = {
        "id": turn.id,
        "parent": turn.parent,
        "new_messages": [message.to_chat() for message in turn.new_messages],
        "reply": turn.reply.to_chat(),
        "finish_reason": turn.completion.finish_reason,
        "sampled_tokens": len(turn.completion),
        "sampling": turn.sampling,
        "overrides": turn.overrides,
        "constrained": turn.constrained,
        "imported": turn.completion.is_imported,
        "label": turn.label,
        "forked_from": turn.forked_from,
        "special_tokens_as_text": turn.special_tokens_as_text,
        "volatile_as_first_seen": turn.volatile_as_first_seen,
    }
    if with_tokens:
        out["prompt_ids"] = episode.forest.prompt_ids(turn.id)
        out["token_ids"] = turn.completion.token_ids
        out["logprobs"] = turn.completion.logprobs
        out["versions"] = None if turn.completion.is_imported else turn.completion.versions
        out["recorded_before"] = turn.recorded_before
    return out
