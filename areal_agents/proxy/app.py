"""The proxy's routes. Thin: each reads the request, calls, and serialises."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from areal_agents.errors import ArealAgentsError
from areal_agents.inference import Sampler
from areal_agents.inference.pool import EnginePool
from areal_agents.proxy.auth import Authenticator
from areal_agents.proxy.completer import Completer
from areal_agents.proxy.config import ProxyConfig
from areal_agents.proxy.control import Control
from areal_agents.proxy.errors import ClientGone, InternalErrors, error_response
from areal_agents.proxy.housekeeping import Housekeeping
from areal_agents.proxy.implicit import ImplicitEpisodes
from areal_agents.proxy.logs import log_call
from areal_agents.proxy.metrics import CONTENT_TYPE, Metrics
from areal_agents.proxy.model_calls import Endpoint, ModelCalls
from areal_agents.proxy.observe import CallRecord, Observer
from areal_agents.proxy.passthrough import PassThrough
from areal_agents.proxy.sessions import Sessions
from areal_agents.proxy.workers.forwarding import WorkerDoor
from areal_agents.proxy.workers.identity import Workers
from areal_agents.proxy.workers.ownership import Ownership
from areal_agents.proxy.workers.placement import Placement
from areal_agents.rendering import ChatRenderer
from areal_agents.store import Retention, Store


def create_app(
    *,
    store: Store,
    engine: Sampler,
    renderer: ChatRenderer,
    config: ProxyConfig,
    observer: Observer | None = None,
    workers: Workers | None = None,
    retention: Retention | None = None,
) -> ASGIApp:
    """The proxy as an ASGI app. The caller owns store and engine, and closes them afterwards.

    `observer` is told of every model call when it has ended. With `workers` it is one of several on one
    store, and forwards what belongs to another. `retention` gives trained turns up as time goes by.
    """
    ownership = Ownership(store, workers) if workers is not None else None
    sessions = Sessions(store, ownership.owner if ownership is not None else None)
    implicit = ImplicitEpisodes(store, sessions, split=config.implicit_split, ownership=ownership)
    auth = Authenticator(config)
    completer = Completer(store=store, engine=engine, renderer=renderer, config=config)
    pass_through = PassThrough(config)
    pool = engine if isinstance(engine, EnginePool) else None
    metrics = Metrics(
        waiting=lambda: completer.waiting,
        running=lambda: completer.running,
        open_episodes=lambda: len(sessions),
        pool=pool,
    )
    told = (metrics.observe, log_call if config.log_calls else None, observer)
    observers = [tell for tell in told if tell is not None]

    def observe(record: CallRecord) -> None:
        for tell in observers:
            tell(record)

    calls = ModelCalls(
        sessions=sessions,
        implicit=implicit,
        auth=auth,
        completer=completer,
        renderer=renderer,
        pass_through=pass_through,
        config=config,
        observer=observe,
    )
    control = Control(
        store=store,
        sessions=sessions,
        implicit=implicit,
        auth=auth,
        config=config,
        own_port=workers.port if workers is not None else None,
    )
    housekeeping = Housekeeping(
        store=store,
        sessions=sessions,
        implicit=implicit,
        config=config,
        ownership=ownership,
        retention=retention,
    )

    async def health(request: Request) -> Response:
        return _json({"status": "ok"})

    async def ready(request: Request) -> Response:
        served = await engine.model_info()
        metrics.served_version(served.version)
        answer = {"status": "ok", "version": served.version}
        if pool is not None and len(pool.replicas) > 1:
            serving = sum(replica.is_serving for replica in pool.replicas)
            answer |= {"engines": len(pool.replicas), "serving": serving}
        return _json(answer)

    async def read_metrics(request: Request) -> Response:
        auth.require_admin(request)
        return Response(metrics.exposition(), media_type=CONTENT_TYPE)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await implicit.restore()
        if pool is not None:
            pool.start()
        sweeping = asyncio.create_task(housekeeping.run())
        yield
        sweeping.cancel()
        completer.close()
        await pass_through.aclose()

    app = Starlette(
        routes=[
            *calls.routes(),
            Route("/health", health, methods=["GET"]),
            Route("/ready", ready, methods=["GET"]),
            Route("/metrics", read_metrics, methods=["GET"]),
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
    served = FrontDoor(app, calls.endpoints)
    if workers is None or ownership is None:
        return served
    placement = Placement(
        workers=workers,
        ownership=ownership,
        store=store,
        sessions=sessions,
        implicit=implicit,
        auth=auth,
        dialects=calls.dialects,
        config=config,
    )
    return WorkerDoor(
        served,
        workers=workers,
        placement=placement,
        anthropic=calls.dialects["/v1/messages"],
        max_body_bytes=int(config.max_body_mb * 2**20),
    )


class FrontDoor:
    """Takes model calls straight to their endpoint; everything else goes through the routes.

    A model call needs none of the routing, and it is the one request that comes thousands of times.
    """

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, Endpoint]) -> None:
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "HEAD"):
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # some agents look whether their base_url is there
            await Response()(scope, receive, send)
            return
        path: str = scope["path"]
        if path.startswith("/e/"):
            key, _, rest = path[3:].partition("/")
            path, scope["path_params"] = f"/{rest}", {"key": key}
        endpoint = self._endpoints.get(path)
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        response = await endpoint(Request(scope, receive))
        await response(scope, receive, send)


def _json(data: object) -> Response:
    return Response(orjson.dumps(data), media_type="application/json")
