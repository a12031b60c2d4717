"""The control API, plain JSON: episodes are opened, rewarded, ended and read; groups are dropped.

An episode's own key reaches that episode and nothing else, a project key the implicit episodes that it
opened; everything else needs the admin key.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from areal_agents.core.rollout import Episode, Reward, Split, Task
from areal_agents.core.trajectory import Turn
from areal_agents.errors import RequestError
from areal_agents.proxy.admission import read_object
from areal_agents.proxy.auth import Authenticator, Caller, key_hash, new_episode_key
from areal_agents.proxy.config import ProxyConfig
from areal_agents.proxy.implicit import ImplicitEpisodes
from areal_agents.proxy.sampling import PINS
from areal_agents.proxy.sessions import Limits, Sessions
from areal_agents.store import EpisodeRow, EpisodeState, NewEpisode, SealedStatus, Store

_CONTROL_BODY_BYTES = 8 * 2**20
_SCOPES = ("episode", "turn", "branch")


class Control:
    """The routes of the control API over one store and the sessions of this process."""

    def __init__(
        self,
        *,
        store: Store,
        sessions: Sessions,
        implicit: ImplicitEpisodes,
        auth: Authenticator,
        config: ProxyConfig,
    ) -> None:
        self._store = store
        self._sessions = sessions
        self._implicit = implicit
        self._auth = auth
        self._config = config

    def routes(self) -> list[Route]:
        """The routes, for the app."""
        return [
            Route("/episodes", self.open, methods=["POST"]),
            Route("/episodes", self.list, methods=["GET"]),
            Route("/episodes/{id}", self.show, methods=["GET"]),
            Route("/episodes/{id}/reward", self.reward, methods=["POST"]),
            Route("/episodes/{id}/finish", self.finish, methods=["POST"]),
            Route("/episodes/{id}/fail", self.fail, methods=["POST"]),
            Route("/groups/{id:path}/drop", self.drop_group, methods=["POST"]),
            Route("/rewards", self.reward_completion, methods=["POST"]),
        ]

    async def open(self, request: Request) -> Response:
        """POST /episodes: open one."""
        self._auth.require_admin(request)
        body = await read_object(request, _CONTROL_BODY_BYTES)
        key = new_episode_key()
        session = await self._sessions.open(_new_episode(body, key, self._config.group_size))
        base_url = f"{self._public_url(request)}/e/{key}/v1"
        return _json({"id": session.id, "key": key, "base_url": base_url, "index": session.row.index})

    async def list(self, request: Request) -> Response:
        """GET /episodes: summaries, by split, status and group."""
        self._auth.require_admin(request)
        query = request.query_params
        found = await asyncio.to_thread(
            self._store.episodes,
            split=query.get("split"),
            status=query.get("status"),
            group_id=query.get("group"),
        )
        return _json({"episodes": found})

    async def show(self, request: Request) -> Response:
        """GET /episodes/{id}: everything about one; with tokens=1 the exact tokens too."""
        episode_id = await self._reachable(request)
        with_tokens = request.query_params.get("tokens", "0") not in ("", "0", "false")

        def load() -> Response:
            row = self._store.episode_row(episode_id)
            return _json(_describe(row, self._store.load_episode(episode_id), with_tokens=with_tokens))

        return await asyncio.to_thread(load)

    async def reward(self, request: Request) -> Response:
        """POST /episodes/{id}/reward: by episode, by completion, or by name."""
        episode_id = await self._reachable(request)
        body = await read_object(request, _CONTROL_BODY_BYTES)
        return _state(
            episode_id, await asyncio.wrap_future(self._store.set_rewards(episode_id, _rewards(body)))
        )

    async def reward_completion(self, request: Request) -> Response:
        """POST /rewards: reward a completion by its id, in whichever episode of the caller it is."""
        caller = self._auth.identify(request)
        body = await read_object(request, _CONTROL_BODY_BYTES)
        completion_id = body.get("completion_id")
        if not isinstance(completion_id, str) or not completion_id:
            raise RequestError("completion_id is required", param="completion_id")
        row = await asyncio.to_thread(self._store.episode_of_turn, completion_id)
        if not _reaches(caller, row):
            raise _out_of_reach()
        return _state(row.id, await asyncio.wrap_future(self._store.set_rewards(row.id, _rewards(body))))

    async def finish(self, request: Request) -> Response:
        """POST /episodes/{id}/finish: it ended by itself, or at a limit with {"truncated": true}.

        {"rewards": […]}, each as for /reward, are given in the same transaction.
        """
        episode_id = await self._reachable(request)
        body = await read_object(request, _CONTROL_BODY_BYTES)
        given = _optional(body, "rewards", list) or []
        if not all(isinstance(item, dict) for item in given):
            raise RequestError("rewards must be a list of objects", param="rewards")
        rewards = [reward for item in given for reward in _rewards(item)]
        return await self._seal(
            episode_id, "truncated" if body.get("truncated") else "finished", given=rewards
        )

    async def fail(self, request: Request) -> Response:
        """POST /episodes/{id}/fail: it ended for a reason that is not the policy's."""
        episode_id = await self._reachable(request)
        body = await read_object(request, _CONTROL_BODY_BYTES)
        error = str(body.get("error") or "failed")[:10_000]
        return await self._seal(episode_id, "aborted" if body.get("aborted") else "failed", error=error)

    async def drop_group(self, request: Request) -> Response:
        """POST /groups/{id}/drop: give a group up that the trainer has not taken."""
        self._auth.require_admin(request)
        body = await read_object(request, _CONTROL_BODY_BYTES)
        group_id = request.path_params["id"]
        reason = str(body.get("reason") or "dropped")[:10_000]
        await asyncio.wrap_future(self._store.drop_open_group(group_id, reason))
        return _json({"id": group_id, "state": "dropped"})

    async def _seal(
        self, episode_id: str, status: SealedStatus, *, given: Sequence[Reward] = (), error: str | None = None
    ) -> Response:
        state = await self._sessions.seal(
            episode_id, status, given=given, error=error, truncated_reward=self._config.truncated_reward
        )
        self._implicit.forget(episode_id)
        return _state(episode_id, state)

    async def _reachable(self, request: Request) -> str:
        """The id in the path, if the caller may touch that episode. RequestError 401 or 403."""
        episode_id: str = request.path_params["id"]
        caller = self._auth.identify(request)
        if not caller.is_admin:
            row = await asyncio.to_thread(self._store.episode_row, episode_id)
            if not _reaches(caller, row):
                raise _out_of_reach()
        return episode_id

    def _public_url(self, request: Request) -> str:
        return (self._config.public_url or str(request.base_url)).rstrip("/")


def _reaches(caller: Caller, row: EpisodeRow) -> bool:
    """Admin reaches all; an episode itself; a project key the implicit episodes that it opened."""
    if caller.is_admin:
        return True
    if caller.episode_key is not None:
        return secrets.compare_digest(row.key_hash, key_hash(caller.episode_key))
    return row.implicit_key is not None and row.implicit_key.partition("/")[0] == caller.identity


def _out_of_reach() -> RequestError:
    return RequestError("this key does not reach that episode", status=403, code="wrong_episode")


def _json(data: Any) -> Response:
    """Plain JSON; dataclasses become objects and arrays become lists."""
    return Response(orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")


def _state(episode_id: str, state: EpisodeState) -> Response:
    return _json({"id": episode_id, **dataclasses.asdict(state)})


def _new_episode(body: Mapping[str, Any], key: str, default_group_size: int) -> NewEpisode:
    group_id = _optional(body, "group", str)
    return NewEpisode(
        id=f"episode-{secrets.token_hex(8)}",
        key_hash=key_hash(key),
        task=_task(_optional(body, "task", dict)),
        group_id=group_id,
        group_size=_group_size(body, default_group_size) if group_id is not None else None,
        index=_optional(body, "index", int),
        split=_split(body.get("split", "train")),
        metadata=_optional(body, "metadata", dict) or {},
        limits=_limits(_optional(body, "limits", dict) or {}),
        sampling=_sampling(_optional(body, "sampling", dict) or {}),
    )


def _optional(body: Mapping[str, Any], name: str, kind: type) -> Any:
    value = body.get(name)
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise RequestError(f"{name} must be of type {kind.__name__}, got {value!r}", param=name)
    return value


def _task(data: Mapping[str, Any] | None) -> Task | None:
    if data is None:
        return None
    task_id, task_input = data.get("id"), data.get("input", {})
    if not isinstance(task_id, str) or not task_id:
        raise RequestError(f"task.id must be a text, got {task_id!r}", param="task.id")
    if not isinstance(task_input, dict):
        raise RequestError("task.input must be an object", param="task.input")
    return Task(task_id, task_input)


def _group_size(body: Mapping[str, Any], default: int) -> int:
    size = _optional(body, "group_size", int)
    if size is not None and size < 1:
        raise RequestError(f"group_size must be at least 1, got {size}", param="group_size")
    return default if size is None else size


def _split(value: Any) -> Split:
    if value not in ("train", "eval"):
        raise RequestError(f'split must be "train" or "eval", got {value!r}', param="split")
    return value


def _limits(data: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        Limits.from_dict(data)
    except ValueError as error:
        raise RequestError(str(error), param="limits") from None
    return data


def _sampling(data: Mapping[str, Any]) -> Mapping[str, Any]:
    for name, value in data.items():
        if name not in PINS or name == "logit_bias":
            raise RequestError(f"unknown sampling parameter {name!r}", param=f"sampling.{name}")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise RequestError(f"{name} must be a number, got {value!r}", param=f"sampling.{name}")
    return data


def _rewards(body: Mapping[str, Any]) -> list[Reward]:
    """The rewards of a request: a number, or an object by completion id or by name."""
    value, name = body.get("reward"), body.get("name", "return")
    completion_id = body.get("completion_id")
    scope = body.get("scope", "turn" if completion_id else "episode")
    if not isinstance(name, str) or not name:
        raise RequestError(f"name must be a text, got {name!r}", param="name")
    if scope not in _SCOPES or (scope == "episode") == bool(completion_id):
        raise RequestError(
            f"scope must be one of {_SCOPES} and fit completion_id, got {scope!r}", param="scope"
        )
    if not isinstance(value, dict):
        return [Reward(scope, completion_id or "", name, _finite(value))]
    if not value:
        raise RequestError("reward must not be an empty object", param="reward")
    if completion_id is None and all(key.startswith("chatcmpl-") for key in value):
        return [Reward("turn", key, name, _finite(item)) for key, item in value.items()]
    return [Reward(scope, completion_id or "", key, _finite(item)) for key, item in value.items()]


def _finite(value: Any) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(f"reward must be a finite number, got {value!r}", param="reward")
    return float(value)


def _describe(row: EpisodeRow, episode: Episode, *, with_tokens: bool) -> dict[str, Any]:
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


def _describe_turn(episode: Episode, turn: Turn, *, with_tokens: bool) -> dict[str, Any]:
    out: dict[str, Any] = {
        "id": turn.id,
        "parent": turn.parent,
        "new_messages": [message.to_dict() for message in turn.new_messages],
        "reply": turn.reply.to_dict(),
        "finish_reason": turn.completion.finish_reason,
        "sampled_tokens": len(turn.completion),
        "sampling": turn.sampling,
        "overrides": turn.overrides,
        "constrained": turn.constrained,
        "label": turn.label,
        "forked_from": turn.forked_from,
    }
    if with_tokens:
        out["prompt_ids"] = episode.forest.prompt_ids(turn.id)
        out["token_ids"] = turn.completion.token_ids
        out["logprobs"] = turn.completion.logprobs
        out["versions"] = turn.completion.versions
    return out
