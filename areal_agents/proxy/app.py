"""The proxy's routes. Thin: each reads the request, calls, and serialises."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from areal_agents.errors import ArealAgentsError
from areal_agents.inference import Engine
from areal_agents.proxy import chat
from areal_agents.proxy.admission import read_object
from areal_agents.proxy.auth import Authenticator
from areal_agents.proxy.completer import Completer
from areal_agents.proxy.config import ProxyConfig
from areal_agents.proxy.control import Control
from areal_agents.proxy.errors import ClientGone, InternalErrors, error_response
from areal_agents.proxy.housekeeping import Housekeeping
from areal_agents.proxy.implicit import ImplicitEpisodes, session_name
from areal_agents.proxy.sessions import Sessions
from areal_agents.rendering import ChatRenderer
from areal_agents.store import Store

LABEL_HEADER = "x-episode-label"


def create_app(*, store: Store, engine: Engine, renderer: ChatRenderer, config: ProxyConfig) -> Starlette:
    """The proxy as an ASGI app. The caller owns store and engine, and closes them afterwards."""
    sessions = Sessions(store)
    implicit = ImplicitEpisodes(store, sessions, split=config.implicit_split)
    auth = Authenticator(config)
    completer = Completer(store=store, engine=engine, renderer=renderer, config=config)
    calls = ModelCalls(
        sessions=sessions, implicit=implicit, auth=auth, completer=completer, renderer=renderer, config=config
    )
    control = Control(store=store, sessions=sessions, implicit=implicit, auth=auth, config=config)
    housekeeping = Housekeeping(store=store, sessions=sessions, implicit=implicit, config=config)

    async def health(request: Request) -> Response:
        return _json({"status": "ok"})

    async def ready(request: Request) -> Response:
        served = await engine.model_info()
        return _json({"status": "ok", "version": served.version})

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await implicit.restore()
        sweeping = asyncio.create_task(housekeeping.run())
        yield
        sweeping.cancel()
        completer.close()

    return Starlette(
        routes=[
            Route("/v1/chat/completions", calls.chat_completions, methods=["POST"]),
            Route("/e/{key}/v1/chat/completions", calls.chat_completions, methods=["POST"]),
            Route("/v1/models", calls.models, methods=["GET"]),
            Route("/e/{key}/v1/models", calls.models, methods=["GET"]),
            Route("/health", health, methods=["GET"]),
            Route("/ready", ready, methods=["GET"]),
            *control.routes(),
        ],
        exception_handlers={
            ArealAgentsError: error_response,
            ClientGone: error_response,
            HTTPException: error_response,
        },
        middleware=[Middleware(InternalErrors)],
        lifespan=lifespan,
    )


class ModelCalls:
    """The routes that agents call."""

    def __init__(
        self,
        *,
        sessions: Sessions,
        implicit: ImplicitEpisodes,
        auth: Authenticator,
        completer: Completer,
        renderer: ChatRenderer,
        config: ProxyConfig,
    ) -> None:
        self._sessions = sessions
        self._implicit = implicit
        self._auth = auth
        self._completer = completer
        self._tokenizer = renderer.tokenizer
        self._max_messages = config.max_messages
        self._max_body_bytes = int(config.max_body_mb * 2**20)

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        caller = self._auth.identify(request)
        body = await read_object(request, self._max_body_bytes)
        label = request.headers.get(LABEL_HEADER, "")
        asked = chat.parse_request(body, max_messages=self._max_messages, label=label)
        if caller.episode_key is not None:
            session = await self._sessions.by_key(caller.episode_key)
        else:
            session = await self._implicit.session(caller, session_name(request.headers, body), asked)
        done = await self._completer.complete(session, asked, lambda: _hang_up(request))
        if session.id in self._implicit:
            self._implicit.record(session, caller, asked, done.turn)
        return Response(chat.build_response(body, done, self._tokenizer), media_type="application/json")

    async def models(self, request: Request) -> Response:
        """GET /v1/models: the policy. Any other name is served by it too."""
        caller = self._auth.identify(request)
        if caller.episode_key is not None:
            await self._sessions.by_key(caller.episode_key)
        model = await self._completer.model_info()
        name = Path(model.model_path).name or "policy"
        return _json(
            {
                "object": "list",
                "data": [{"id": name, "object": "model", "created": 0, "owned_by": "areal-agents"}],
            }
        )


async def _hang_up(request: Request) -> None:
    """Return when the client has closed the connection. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(data: object) -> Response:
    return Response(orjson.dumps(data), media_type="application/json")
