"""Finds the worker that serves a request: the one that has its episode in memory.

A request for an unknown episode is served by the worker that received it, which refuses it as a single proxy
process would.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from starlette.requests import Request

from areal_agents.core.forest import Forest
from areal_agents.errors import RequestError
from areal_agents.proxy.auth import Authenticator, Caller, key_hash
from areal_agents.proxy.bodies import Bodies
from areal_agents.proxy.calls.request import ModelRequest
from areal_agents.proxy.config import ProxyConfig
from areal_agents.proxy.dialects.base import Dialect, ReadContext
from areal_agents.proxy.dialects.gemini.urls import endpoint_of, url_fields
from areal_agents.proxy.dialects.replayed import MessageMemo
from areal_agents.proxy.episodes.implicit import (
    ImplicitEpisodes,
    home_key,
    home_key_of,
    implicit_key,
    is_named,
    session_name,
)
from areal_agents.proxy.episodes.sessions import Sessions
from areal_agents.proxy.paths import split_path
from areal_agents.proxy.redaction import Redaction
from areal_agents.proxy.values import refuse_many_values
from areal_agents.proxy.volatile import VolatileText
from areal_agents.proxy.workers.ownership import Ownership
from areal_agents.proxy.workers.peers import Peers, home, homes
from areal_agents.store import NotFound, Store

ReadBody = Callable[[], Awaitable[bytes | None]]
_ENDINGS = ("/finish", "/fail")
_VERSIONS = ("/v1/", "/v1beta/", "/v1alpha/")  # which paths of model calls begin with
_MOVED_KEPT = 10_000


class WorkerLookup:
    """Finds the worker of each request that this one receives.

    Args:
        dialects: the dialects of the model calls, by endpoint.
    """

    def __init__(
        self,
        *,
        peers: Peers,
        ownership: Ownership,
        store: Store,
        sessions: Sessions,
        implicit: ImplicitEpisodes,
        auth: Authenticator,
        dialects: Mapping[str, Dialect],
        config: ProxyConfig,
        bodies: Bodies,
        redaction: Redaction | None = None,
    ) -> None:
        self._redaction = redaction
        self._peers = peers
        self._ownership = ownership
        self._store = store
        self._sessions = sessions
        self._implicit = implicit
        self._auth = auth
        self._dialects = dialects
        self._config = config
        self._bodies = bodies
        self._memo = MessageMemo()
        self._volatile = VolatileText(config.volatile)
        self._openings = itertools.count(peers.index)
        self._here = peers.index
        self._moved: dict[str, int] = {}  # episode key → the worker that took it over from its home

    def worker_of(self, path: str) -> int:
        """Return the index of the worker that a path belongs to, without reading the store.

        The result may be outdated if the episode was taken over. A path that names no episode belongs to this
        worker.
        """
        key, _ = split_path(path)
        if key is None or self._sessions.holds(key):
            return self._here
        return self._moved.get(key, home(key, self._peers.count))

    def is_here(self, path: str) -> bool:
        """Whether a path names an episode that this worker has in memory, as almost every model call does."""
        key, _ = split_path(path)
        return key is not None and self._sessions.holds(key)

    async def worker_for(self, request: Request, read_body: ReadBody, *, forwarded: bool) -> int:
        """Return the index of the worker that serves a request.

        Args:
            request: a request whose body has not been read.
            read_body: returns the whole body, None if it is too large or the client has disconnected.
            forwarded: whether a sibling sent the request; if so, this worker serves it if any worker may.

        Raises:
            RequestError: 503 if a worker of another run has the episode.
            StoreError: the store cannot be read.
        """
        path, is_post = request.scope["path"], request.method == "POST"
        try:
            if self.is_here(path):
                return self._here
            key, _ = split_path(path)
            if key is not None:
                return await self._of_key(key)
            is_end = (is_post and path.endswith(_ENDINGS)) or request.method == "DELETE"
            if is_end and path.startswith("/episodes/"):
                return await self._of_id(request, path.split("/")[2])
            if path.startswith(_VERSIONS):
                return await self._of_bare_call(request, path, read_body, forwarded=forwarded)
            if is_post and path == "/episodes" and not forwarded:
                return self._next_opening()
        except NotFound:
            pass
        return self._here

    async def _of_key(self, key: str) -> int:
        if self._sessions.holds(key):
            return self._here
        digest = key_hash(key)
        index = await self._ownership.locate(lambda: self._store.episode_row_by_key(digest))
        self._moved.pop(key, None)
        if index not in (self._here, home(key, self._peers.count)):
            self._moved[key] = index
            if len(self._moved) > _MOVED_KEPT:
                del self._moved[next(iter(self._moved))]
        return index

    async def _of_id(self, request: Request, episode_id: str) -> int:
        if self._sessions.get(episode_id) is not None or self._caller(request) is None:
            return self._here
        return await self._ownership.locate(lambda: self._store.episode_row(episode_id))

    def _next_opening(self) -> int:
        """Return the next running worker in turn, so that the workers open equally many episodes."""
        if not self._peers.spreads_openings:
            return self._here
        for _ in range(self._peers.count):
            index = next(self._openings) % self._peers.count
            if index == self._here or self._peers.address(index) is not None:
                return index
        return self._here

    async def _of_bare_call(
        self, request: Request, path: str, read_body: ReadBody, *, forwarded: bool
    ) -> int:
        caller = self._caller(request)
        if caller is None:
            return self._here
        if caller.episode_key is not None:
            return await self._of_key(caller.episode_key)
        dialect = self._dialects.get(endpoint_of(path)) if request.method == "POST" else None
        if dialect is None or forwarded:
            return self._here
        raw = await read_body() or b""
        request.state.body_bytes = len(raw)
        body = await self._bodies.off_loop(request, lambda: _object(raw, self._config.max_json_values))
        if body is None:
            return self._here
        body |= url_fields(path, request.query_params)
        if body.get("model") in tuple(self._config.models):
            return self._here
        name, turn_id = session_name(request.headers, body), dialect.referenced_turn(body)
        if self._implicit.find(caller, name, turn_id) is not None:
            return self._here
        if name is not None:
            return await self._of_name(implicit_key(caller, name))
        if turn_id is not None and (index := await self._of_turn(caller, turn_id)) is not None:
            return index
        try:
            context = ReadContext(self._config.max_messages, "", Forest(), self._memo)

            def read() -> ModelRequest:
                found = dialect.read(body, context)
                return found if self._redaction is None else self._redaction.redacted(found)

            model_request = await self._bodies.off_loop(request, read)
        except RequestError:
            return self._here
        messages = self._volatile.marked(model_request.messages, request.headers.get("user-agent", ""))
        return homes(home_key(implicit_key(caller, None), messages), self._peers.count)[0]

    async def _of_name(self, key: str) -> int:
        """Return the worker with an open named session, else the first running worker of its `homes`."""
        row = await asyncio.to_thread(self._store.open_implicit_episode, key)
        if row is not None:
            return await self._of_implicit(row.id)
        order = homes(key.encode(), self._peers.count)
        return next(index for index in order if index == self._here or self._peers.address(index) is not None)

    async def _of_turn(self, caller: Caller, turn_id: str) -> int | None:
        """Return the worker with the implicit episode of a turn, None unless it is open and the caller's."""
        row = await asyncio.to_thread(self._store.episode_of_turn, turn_id)
        key = row.implicit_key
        if row.status != "open" or key is None or key.partition("/")[0] != caller.identity:
            return None
        if is_named(key):
            return await self._of_implicit(row.id)
        # Calls of a conversation without a session name go only to its home, so no other worker claims it.
        index = self._peers.index_of(row.owner)
        if index is None:
            turns = await asyncio.to_thread(self._store.turns_of, row.id)
            index = homes(home_key_of(row, turns), self._peers.count)[0]
        return index

    async def _of_implicit(self, episode_id: str) -> int:
        index = await self._ownership.locate(lambda: self._store.episode_row(episode_id))
        if index == self._here:
            await self._implicit.adopt(episode_id)
        return index

    def _caller(self, request: Request) -> Caller | None:
        try:
            return self._auth.identify(request)
        except RequestError:
            return None


def _object(body: bytes, max_values: int) -> dict[str, Any] | None:
    """Return the JSON object of a body, None for a body that the app will refuse."""
    try:
        refuse_many_values(body, max_values)
        data = orjson.loads(body)
    except (RequestError, orjson.JSONDecodeError):
        return None
    return data if isinstance(data, dict) else None
