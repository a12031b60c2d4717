"""Builds the ASGI application of the proxy from its components.

Model calls, by far the most frequent requests, bypass Starlette's routing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from areal_agents.browsers import BrowserGuard
from areal_agents.errors import ArealAgentsError, RequestError
from areal_agents.inference import Sampler
from areal_agents.inference.pool import EnginePool
from areal_agents.proxy.auth import Authenticator, new_episode_key
from areal_agents.proxy.bodies import Bodies
from areal_agents.proxy.calls.completer import Completer
from areal_agents.proxy.calls.passthrough import PassThrough
from areal_agents.proxy.calls.record import CallRecord, Observer
from areal_agents.proxy.calls.recorded_start import RecordedStart
from areal_agents.proxy.calls.routes import Endpoint, ModelCalls
from areal_agents.proxy.config import ProxyConfig
from areal_agents.proxy.dialects.gemini.urls import endpoint_of
from areal_agents.proxy.episodes.control import Control
from areal_agents.proxy.episodes.housekeeping import Housekeeping
from areal_agents.proxy.episodes.implicit import ImplicitEpisodes
from areal_agents.proxy.episodes.sessions import Sessions
from areal_agents.proxy.errors import ClientGone, InternalErrors, error_body, error_response
from areal_agents.proxy.logs import log_call
from areal_agents.proxy.metrics import Metrics
from areal_agents.proxy.page import page_routes
from areal_agents.proxy.paths import split_path
from areal_agents.proxy.redaction import Redaction, redaction_of
from areal_agents.proxy.status import StatusRoutes
from areal_agents.proxy.traces import Traces
from areal_agents.proxy.workers.forwarding import WorkerRouting
from areal_agents.proxy.workers.ownership import Ownership
from areal_agents.proxy.workers.peers import Peers, new_key
from areal_agents.proxy.workers.placement import WorkerLookup
from areal_agents.rendering import ChatRenderer
from areal_agents.store import Retention, Store


def create_app(
    *,
    store: Store,
    engine: Sampler,
    renderer: ChatRenderer,
    config: ProxyConfig,
    observer: Observer | None = None,
    retention: Retention | None = None,
    page: ASGIApp | None = None,
    starts: Mapping[str, RecordedStart] | None = None,
    traces: Traces | None = None,
) -> ASGIApp:
    """Return the proxy as an ASGI app. The caller owns the store and the engine, and closes them afterwards.

    `observer` is called with the record of each model call when the call has ended. `retention` removes
    trained turns, as the setting `store.retain` requires. `page` is the app at /view; None: there is none.
    `starts` has the turns that forked episodes repeat, by the id of the episode. `traces` writes the spans of
    episodes and model calls; None: they are not exported.
    """
    parts = _Parts.of(
        store=store,
        engine=engine,
        renderer=renderer,
        config=config,
        peers=None,
        starts=starts,
        traces=traces,
    )
    app, _ = _app_of(parts, observer, retention, page)
    return _guarded(app, config)


def create_worker_app(
    *,
    store: Store,
    engine: Sampler,
    renderer: ChatRenderer,
    config: ProxyConfig,
    peers: Peers,
    retention: Retention | None = None,
    page: ASGIApp | None = None,
    traces: Traces | None = None,
) -> tuple[ASGIApp, Callable[[str], int]]:
    """Return the app of one of several workers on one store, and a function that assigns paths to workers.

    The app forwards requests for the episodes of other workers to them. The function returns the index of
    the worker that a request path belongs to.
    """
    parts = _Parts.of(
        store=store, engine=engine, renderer=renderer, config=config, peers=peers, traces=traces
    )
    app, calls = _app_of(parts, None, retention, page)
    ownership = parts.ownership
    assert ownership is not None
    placement = WorkerLookup(
        peers=peers,
        ownership=ownership,
        store=store,
        sessions=parts.sessions,
        implicit=parts.implicit,
        auth=parts.auth,
        dialects=calls.dialects,
        config=config,
        bodies=parts.bodies,
        redaction=parts.redaction,
    )
    routed = WorkerRouting(app, peers=peers, placement=placement, max_body_bytes=parts.bodies.max_bytes)
    return _guarded(routed, config), placement.worker_of


def _guarded(app: ASGIApp, config: ProxyConfig) -> ASGIApp:
    """Refuse foreign web pages.

    Without an admin key every caller on this machine is trusted, so the Host header must name this machine.
    With an admin key, a page without the key can do nothing, so the Host header is checked only if
    `allowed_hosts` is set.
    """

    def refuse(path: str, refusal: RequestError) -> Response:
        body, headers = error_body(path, refusal)
        return Response(body, status_code=refusal.status, headers=headers)

    return BrowserGuard(
        app,
        host=config.host,
        refuse=refuse,
        checks_host=config.admin_key is None or bool(config.allowed_hosts),
        public_url=config.public_url,
        allowed_hosts=config.allowed_hosts,
        remedy="; if you trust it, add the host to proxy.allowed_hosts",
    )


def _app_of(
    parts: _Parts, observer: Observer | None, retention: Retention | None, page: ASGIApp | None
) -> tuple[ASGIApp, ModelCalls]:
    config = parts.config
    metrics = parts.metrics()
    log = log_call if config.log_calls else None
    trace = None if parts.traces is None else parts.traces.call_ended
    calls = parts.model_calls(_each_of(metrics.observe, log, trace, observer))
    status = StatusRoutes(engine=parts.engine, metrics=metrics, auth=parts.auth)
    app = Starlette(
        routes=[*calls.routes(), *status.routes(), *parts.control().routes(), *page_routes(page)],
        exception_handlers={
            ArealAgentsError: error_response,
            ClientGone: error_response,
            HTTPException: error_response,
        },
        middleware=[Middleware(InternalErrors)],
        lifespan=parts.lifespan(parts.housekeeping(retention)),
    )
    app.router.redirect_slashes = False  # the redirect of a wrong path would repeat the episode's key
    return ModelCallShortcut(app, calls.endpoints, calls.sockets()), calls


@dataclass(frozen=True, slots=True)
class _Parts:
    """The objects that the routes share. `peers` and `ownership` are None in a proxy of one process."""

    store: Store
    engine: Sampler
    renderer: ChatRenderer
    config: ProxyConfig
    peers: Peers | None
    ownership: Ownership | None
    sessions: Sessions
    implicit: ImplicitEpisodes
    auth: Authenticator
    bodies: Bodies
    completer: Completer
    pass_through: PassThrough
    redaction: Redaction | None
    traces: Traces | None

    @classmethod
    def of(
        cls,
        *,
        store: Store,
        engine: Sampler,
        renderer: ChatRenderer,
        config: ProxyConfig,
        peers: Peers | None,
        traces: Traces | None,
        starts: Mapping[str, RecordedStart] | None = None,
    ) -> _Parts:
        ended = None if traces is None else traces.episode_ended
        sessions = Sessions(store, None if peers is None else peers.owner, starts, ended=ended)
        ownership = None if peers is None else Ownership(store, peers, sessions.lose)
        return cls(
            store=store,
            engine=engine,
            renderer=renderer,
            config=config,
            peers=peers,
            ownership=ownership,
            sessions=sessions,
            implicit=ImplicitEpisodes(
                store,
                sessions,
                split=config.implicit_split,
                in_groups=config.implicit_groups,
                ownership=ownership,
            ),
            auth=Authenticator(config),
            bodies=Bodies(max_bytes=config.max_body_bytes, max_values=config.max_json_values),
            completer=Completer(store=store, engine=engine, renderer=renderer, config=config),
            pass_through=PassThrough(config),
            redaction=redaction_of(config.redact),
            traces=traces,
        )

    @property
    def pool(self) -> EnginePool | None:
        return self.engine if isinstance(self.engine, EnginePool) else None

    def metrics(self) -> Metrics:
        return Metrics(
            waiting=lambda: self.completer.waiting,
            running=lambda: self.completer.running,
            open_episodes=lambda: len(self.sessions),
            pool=self.pool,
        )

    def model_calls(self, observer: Observer) -> ModelCalls:
        return ModelCalls(
            sessions=self.sessions,
            implicit=self.implicit,
            auth=self.auth,
            bodies=self.bodies,
            completer=self.completer,
            renderer=self.renderer,
            pass_through=self.pass_through,
            config=self.config,
            observer=observer,
            redaction=self.redaction,
        )

    def control(self) -> Control:
        return Control(
            store=self.store,
            sessions=self.sessions,
            implicit=self.implicit,
            auth=self.auth,
            config=self.config,
            bodies=self.bodies,
            new_key=new_episode_key if self.peers is None else partial(new_key, self.peers),
            keeps_trace=self.traces is not None,
        )

    def housekeeping(self, retention: Retention | None) -> Housekeeping:
        return Housekeeping(
            store=self.store,
            sessions=self.sessions,
            implicit=self.implicit,
            config=self.config,
            ownership=self.ownership,
            retention=retention,
        )

    def lifespan(
        self, housekeeping: Housekeeping
    ) -> Callable[[Starlette], contextlib.AbstractAsyncContextManager[None]]:
        """Return the app's lifespan, which starts background work and stops it after the last request."""

        @contextlib.asynccontextmanager
        async def run_background_work(app: Starlette) -> AsyncIterator[None]:
            await self.implicit.restore()
            if self.pool is not None:
                self.pool.start()
            sweeping = asyncio.create_task(housekeeping.run())
            yield
            sweeping.cancel()
            self.completer.close()
            self.bodies.close()
            await self.pass_through.aclose()

        return run_background_work


def _each_of(*observers: Observer | None) -> Observer:
    """Return one observer that calls each of `observers` that is not None."""
    present = [observer for observer in observers if observer is not None]

    def observe(record: CallRecord) -> None:
        for observer in present:
            observer(record)

    return observe


class ModelCallShortcut:
    """ASGI app that passes model calls directly to their endpoints, without Starlette's routing.

    Args:
        app: the app that answers all other requests.
        endpoints: the endpoints of the model calls, by path without an episode's key.
        sockets: the app that serves WebSockets.
    """

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, Endpoint], sockets: ASGIApp) -> None:
        self._app = app
        self._endpoints = endpoints
        self._sockets = sockets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._sockets(scope, receive, send)
            return
        if scope["type"] != "http" or scope["method"] not in ("POST", "HEAD"):
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # some agents check that their base_url answers
            await Response()(scope, receive, send)
            return
        key, path = split_path(scope["path"])
        if key is not None:
            scope["path_params"] = {"key": key}
        endpoint = self._endpoints.get(endpoint_of(path))
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        response = await endpoint(Request(scope, receive))
        await response(scope, receive, send)
