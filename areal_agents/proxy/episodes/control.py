"""The control API: routes that open, reward, end and show episodes, and drop groups.

An episode's key gives access to that episode only, and a project key to the implicit episodes that it opened.
Everything else needs the admin key.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, get_args

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from areal_agents.core.rollout import EpisodeStatus, Split
from areal_agents.errors import RequestError, shown
from areal_agents.proxy.auth import Authenticator, Caller, key_hash, new_episode_key
from areal_agents.proxy.bodies import Bodies, refuse_depth
from areal_agents.proxy.calls.labels import USER
from areal_agents.proxy.config import ProxyConfig
from areal_agents.proxy.dialects.turn_ids import turn_id_of
from areal_agents.proxy.episodes.control_forms import (
    claim_of,
    describe,
    final_rewards_of,
    flag_of,
    new_episode,
    new_group,
    refuse_unknown,
    rewards_of,
)
from areal_agents.proxy.episodes.implicit import ImplicitEpisodes
from areal_agents.proxy.episodes.sessions import Sessions
from areal_agents.sockets import address_of
from areal_agents.store import EpisodeRow, EpisodeState, NotFound, SealedStatus, Store
from areal_agents.telemetry import TRACEPARENT

_CONTROL_BODY_BYTES = 8 * 2**20

_LARGEST_PAGE = 1000  # episodes


class Control:
    """The routes of the control API.

    Args:
        new_key: returns the key of a new episode.
        keeps_trace: keep the header traceparent of the request that opens an episode in its metadata, for the
            spans of the episode.
    """

    def __init__(
        self,
        *,
        store: Store,
        sessions: Sessions,
        implicit: ImplicitEpisodes,
        auth: Authenticator,
        config: ProxyConfig,
        bodies: Bodies,
        new_key: Callable[[], str] = new_episode_key,
        keeps_trace: bool = False,
    ) -> None:
        self._store = store
        self._sessions = sessions
        self._implicit = implicit
        self._auth = auth
        self._config = config
        self._bodies = bodies
        self._new_key = new_key
        self._keeps_trace = keeps_trace

    def routes(self) -> list[Route]:
        """Return the routes of the app."""
        return [
            Route("/episodes", self.open, methods=["POST"]),
            Route("/episodes", self.list, methods=["GET"]),
            Route("/episodes/{id}", self.show, methods=["GET"]),
            Route("/episodes/{id}", self.delete, methods=["DELETE"]),
            Route("/episodes/{id}/reward", self.reward, methods=["POST"]),
            Route("/episodes/{id}/finish", self.finish, methods=["POST"]),
            Route("/episodes/{id}/fail", self.fail, methods=["POST"]),
            Route("/groups", self.begin_group, methods=["POST"]),
            Route("/groups/{id:path}/claim", self.claim_group, methods=["POST"]),
            Route("/groups/{id:path}/drop", self.drop_group, methods=["POST"]),
            Route("/rewards", self.reward_completion, methods=["POST"]),
        ]

    async def open(self, request: Request) -> Response:
        """POST /episodes: open an episode; answer with its key and its base URLs for each kind of client."""
        self._auth.require_admin(request)
        body = await self._bodies.object(request, _CONTROL_BODY_BYTES)
        refuse_depth(body)
        key = self._new_key()
        new = new_episode(body, key, self._config.group_size)
        trace = request.headers.get(TRACEPARENT)
        if self._keeps_trace and trace is not None and TRACEPARENT not in new.metadata:
            new = dataclasses.replace(new, metadata={**new.metadata, TRACEPARENT: trace})
        session = await self._sessions.open(new)
        root = f"{self._public_url(request)}/e/{key}"
        base_urls = {"openai": f"{root}/v1", "anthropic": root, "google": root}
        urls = {"base_url": f"{root}/v1", "base_urls": base_urls}
        return _json({"id": session.id, "key": key, **urls, "index": session.row.index})

    async def list(self, request: Request) -> Response:
        """GET /episodes: list summaries of the episodes, filtered by split, status, group and user, in pages.

        A page has at most `limit` episodes, the oldest first; `next` is the value of `after` for the next
        page, or null.
        """
        self._auth.require_admin(request)
        query = request.query_params
        refuse_unknown(query, ("split", "status", "group", "user", "limit", "after"), "filter")
        for name in query:
            if len(query.getlist(name)) > 1:
                raise RequestError(f"the filter {name} was given more than once", param=name)
        for name, known in (("split", get_args(Split)), ("status", get_args(EpisodeStatus))):
            if (value := query.get(name)) is not None:
                refuse_unknown((value,), known, name, param=name)
        limit = _limit_of(query.get("limit"))
        found = await asyncio.to_thread(
            self._store.episodes,
            split=query.get("split"),
            status=query.get("status"),
            group_id=query.get("group"),
            metadata={USER: query["user"]} if "user" in query else None,
            after=query.get("after"),
            limit=limit + 1,
        )
        return _json({"episodes": found[:limit], "next": found[limit - 1].id if len(found) > limit else None})

    async def show(self, request: Request) -> Response:
        """GET /episodes/{id}: show an episode with its turns; with ?tokens=1, also the exact tokens."""
        episode_id = await self._reachable(request)
        with_tokens = request.query_params.get("tokens", "0") not in ("", "0", "false")

        def load() -> Response:
            row = self._store.episode_row(episode_id)
            return _json(describe(row, self._store.load_episode(episode_id), with_tokens=with_tokens))

        return await asyncio.to_thread(load)

    async def delete(self, request: Request) -> Response:
        """DELETE /episodes/{id}: delete an episode with its turns and rewards.

        An open one is aborted first.
        """
        self._auth.require_admin(request)
        episode_id = request.path_params["id"]
        try:
            row = await asyncio.to_thread(self._store.episode_row, episode_id)
        except NotFound:
            await asyncio.to_thread(self._store.clear_log)  # an earlier request may have been cut off there
            raise
        if row.status == "open":
            await self._seal(episode_id, "aborted", error="it is deleted")
        await asyncio.wrap_future(self._store.delete_episodes([episode_id]))
        await asyncio.to_thread(self._store.clear_log)
        return _json({"id": episode_id, "deleted": True})

    async def reward(self, request: Request) -> Response:
        """POST /episodes/{id}/reward: reward an episode, completions of it, or several names at once."""
        episode_id = await self._reachable(request)
        body = await self._bodies.object(request, _CONTROL_BODY_BYTES)
        owner = None
        if self._sessions.owner is not None:
            owner = (await asyncio.to_thread(self._store.episode_row, episode_id)).owner
        given = await self._bodies.off_loop(request, lambda: rewards_of(body))
        writing = self._store.set_rewards(episode_id, given, owner=owner)
        return await self._rewarded(episode_id, writing)

    async def reward_completion(self, request: Request) -> Response:
        """POST /rewards: reward a completion, by its id in the form of any API; the episode is looked up."""
        caller = self._auth.identify(request)
        body = await self._bodies.object(request, _CONTROL_BODY_BYTES)
        completion_id = body.get("completion_id")
        if not isinstance(completion_id, str) or not completion_id:
            raise RequestError(
                "completion_id is required: the id of the completion to reward", param="completion_id"
            )
        turn_id = turn_id_of(completion_id) or completion_id
        row = await asyncio.to_thread(self._store.episode_of_turn, turn_id)
        if not _reaches(caller, row):
            raise _out_of_reach()
        given = await self._bodies.off_loop(request, lambda: rewards_of(body))
        writing = self._store.set_rewards(row.id, given, owner=row.owner if self._sessions.owner else None)
        return await self._rewarded(row.id, writing)

    async def finish(self, request: Request) -> Response:
        """POST /episodes/{id}/finish: finish an episode; with {"truncated": true}, as one that hit a limit.

        {"rewards": […]} has rewards in the form of /reward, which are written in the same transaction. An
        episode in which the model was never called fails; with {"require_turn": true} it stays open instead,
        and the answer is 409 no_turn.
        """
        episode_id = await self._reachable(request)
        body = await self._bodies.object(request, _CONTROL_BODY_BYTES)
        refuse_unknown(body, ("truncated", "rewards", "require_turn"))
        status: SealedStatus = "truncated" if flag_of(body, "truncated") else "finished"
        require_turn = flag_of(body, "require_turn")
        given = await self._bodies.off_loop(request, lambda: final_rewards_of(body))
        return await self._seal(episode_id, status, given=given, require_turn=require_turn)

    async def fail(self, request: Request) -> Response:
        """POST /episodes/{id}/fail: fail an episode that ended for a reason other than the policy."""
        episode_id = await self._reachable(request)
        body = await self._bodies.object(request, _CONTROL_BODY_BYTES)
        refuse_unknown(body, ("error", "aborted"))
        error = str(body.get("error") or "failed")[:10_000]
        return await self._seal(episode_id, "aborted" if flag_of(body, "aborted") else "failed", error=error)

    async def begin_group(self, request: Request) -> Response:
        """POST /groups: begin a training group for one of several rollout processes, if the gate admits it.

        The answer's `state` is begun, taken (the group exists) or full (the gate admits none now).
        """
        self._auth.require_admin(request)
        new = new_group(await self._bodies.object(request, _CONTROL_BODY_BYTES))
        admission = await asyncio.wrap_future(self._store.begin_group(new))
        return _json({"id": new.id, **dataclasses.asdict(admission)})

    async def claim_group(self, request: Request) -> Response:
        """POST /groups/{id}/claim: take a pending group over from a rollout process that has ended."""
        self._auth.require_admin(request)
        expected, runner = claim_of(await self._bodies.object(request, _CONTROL_BODY_BYTES))
        group_id = request.path_params["id"]
        claimed = await asyncio.wrap_future(self._store.claim_group(group_id, expected, runner))
        return _json({"id": group_id, "claimed": claimed})

    async def drop_group(self, request: Request) -> Response:
        """POST /groups/{id}/drop: drop a group that the trainer has not leased."""
        self._auth.require_admin(request)
        body = await self._bodies.object(request, _CONTROL_BODY_BYTES)
        group_id = request.path_params["id"]
        refuse_unknown(body, ("reason",))
        reason = str(body.get("reason") or "dropped")[:10_000]
        await asyncio.wrap_future(self._store.drop_open_group(group_id, reason))
        return _json({"id": group_id, "state": "dropped"})

    async def _rewarded(self, episode_id: str, writing: Future[EpisodeState]) -> Response:
        state = await asyncio.wrap_future(writing)
        if self._sessions.has_over_sampled:  # a reward can complete the group of an episode that has ended
            row = await asyncio.to_thread(self._store.episode_row, episode_id)
            if row.group_id is not None:
                await self._sessions.end_aborted(row.group_id)
        return _state(episode_id, state)

    async def _seal(self, episode_id: str, status: SealedStatus, **how: Any) -> Response:
        reward = self._config.truncated_reward
        state = await self._sessions.seal(episode_id, status, truncated_reward=reward, **how)
        self._implicit.forget(episode_id)
        return _state(episode_id, state)

    async def _reachable(self, request: Request) -> str:
        """Return the episode id in the path. Raise RequestError 401 or 403 if the caller has no access."""
        episode_id: str = request.path_params["id"]
        caller = self._auth.identify(request)
        if not caller.is_admin:
            row = await asyncio.to_thread(self._store.episode_row, episode_id)
            if not _reaches(caller, row):
                raise _out_of_reach()
        return episode_id

    def _public_url(self, request: Request) -> str:
        if self._config.public_url is not None:
            return self._config.public_url.rstrip("/")
        host, port = request.scope["server"]
        return f"{request.scope['scheme']}://{address_of(host, port)}"


def _reaches(caller: Caller, row: EpisodeRow) -> bool:
    """Whether a caller has access to an episode.

    An admin has access to all, an episode's key to that episode, and a project key to the implicit episodes
    that it opened.
    """
    if caller.is_admin:
        return True
    if caller.episode_key is not None:
        return secrets.compare_digest(row.key_hash, key_hash(caller.episode_key))
    return row.implicit_key is not None and row.implicit_key.partition("/")[0] == caller.identity


def _limit_of(given: str | None) -> int:
    """Return the size of a page. Raises RequestError if it is no number from 1 to the largest size."""
    if given is None:
        return _LARGEST_PAGE
    if not given.isascii() or not given.isdigit() or not 1 <= int(given[:6]) <= _LARGEST_PAGE:
        raise RequestError(f"limit must be from 1 to {_LARGEST_PAGE}, got {shown(given)}", param="limit")
    return int(given)


def _out_of_reach() -> RequestError:
    return RequestError(
        "this API key has no access to that episode; use the episode's own key or the admin key",
        status=403,
        code="wrong_episode",
    )


def _json(data: Any) -> Response:
    """Return a JSON response; dataclasses become objects, and arrays become lists."""
    return Response(orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")


def _state(episode_id: str, state: EpisodeState) -> Response:
    return _json({"id": episode_id, **dataclasses.asdict(state)})
