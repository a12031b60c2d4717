"""Runs the proxy process: binds its port, serves, and shuts down cleanly on SIGTERM or Ctrl-C.

The port is bound before the model is loaded, and everything that was started is stopped however the process
ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import uvicorn
import uvloop
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from areal_agents.errors import ConfigError
from areal_agents.inference import running_engine
from areal_agents.inference.clients import EngineClient, Protocol
from areal_agents.inference.pool import following_engines
from areal_agents.process_control import collect_seldom, exit_on_sigterm
from areal_agents.proxy.app import create_app, create_worker_app
from areal_agents.proxy.auth import refuse_open_access
from areal_agents.proxy.config import ProxyConfig, shared_among
from areal_agents.proxy.engines import EngineUrls, check_addresses, check_models, make_pool
from areal_agents.proxy.http_limits import LimitedProtocol
from areal_agents.proxy.logs import logging_as
from areal_agents.proxy.page import Page, announce_page
from areal_agents.proxy.socket_limits import LimitedWebSocket
from areal_agents.proxy.traces import Traces
from areal_agents.proxy.workers.handover import Handover, HandoverServer, WorkerSockets, protocol_of
from areal_agents.proxy.workers.identity import listen_after, locks_of, wait_for_orphans
from areal_agents.proxy.workers.peers import Peers
from areal_agents.proxy.workers.places import Places, ProxyPlace, refuse_beside_places
from areal_agents.rendering import ChatRenderer
from areal_agents.secret_variables import new_engine_key
from areal_agents.sockets import BACKLOG, allow_many_connections, url_of
from areal_agents.store import Retention, Store, StoreConfig
from areal_agents.store.urls import shown_store
from areal_agents.telemetry import TelemetryConfig, exporting
from areal_agents.tls import TlsConfig

__all__ = [
    "build_server",
    "make_renderer",
    "retention_of",
    "serve",
    "serve_app",
    "serve_with_engines",
]

_logger = logging.getLogger(__name__)

_GRACEFUL_SHUTDOWN_S = 5
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # as in malloc.h
_MAPPED_BYTES = 2**20  # blocks of at least this size are mapped separately and returned when freed
_SWITCH_S = 0.001  # time after which a thread lets others run, above all the event loop
_KEEP_ALIVE_S = 120  # longer than clients keep idle connections, so that the clients close them


def serve(
    model: str | Path,
    config: ProxyConfig,
    *,
    store: str | Path,
    durability: StoreConfig | None = None,
    engine_urls: Sequence[str] = (),
    router_url: str = "",
    adapters: bool = False,
    vocab_size: int | None = None,
    protocol: Protocol = "sglang",
    engine_key: str = "",
    engine_options: dict[str, Any] | None = None,
    page: Page | None = None,
    telemetry: TelemetryConfig | None = None,
    run: str = "",
    place: ProxyPlace | None = None,
    tls: TlsConfig | None = None,
    announce: Callable[[str], None] = print,
) -> None:
    """Serve a model until SIGTERM or Ctrl-C.

    Args:
        model: the model folder, for the chat template and, without `engine_urls`, for the weights.
        config: the settings of the proxy; port 0 takes a free one.
        store: path or URL of the store; its open episodes stay open.
        durability: durability and retention of the store; by default data survives the death of processes,
            and all turns are kept.
        engine_urls: running engines, replicas of one model; without any, an embedded engine is started, and
            stopped at the end.
        router_url: a router in front of `engine_urls` that generation requests go through.
        adapters: whether the policy is a LoRA adapter of the model that the engines serve.
        vocab_size: vocabulary size of that model, if known; an engine with another size is refused.
        protocol: what the engines at `engine_urls` speak.
        engine_key: the key of the engines at `engine_urls`; "" if they have none.
        engine_options: options of the embedded engine, fields of EmbeddedEngineConfig.
        page: the page at /view; None: there is none.
        telemetry: where spans are exported to; None: as the environment says.
        run: the name of the run that the proxy belongs to.
        place: the place of this proxy among those of a run on several machines. They share `max_concurrent`
            and `max_queued` equally, and the store has the present addresses of the engines. None: the proxy
            is the only one.
        tls: the files to serve HTTPS with; None: HTTP is served.
        announce: called with one line for the user when the proxy is about to answer requests.

    Raises:
        ConfigError: the port is taken, the model folder is missing, an admin key is needed, the engines
            serve different models, `config.workers` is above 1 and there is a place, or there is none and
            proxies with places use the store.
        EngineUnavailable: the embedded engine does not start.
        StoreError: the store cannot be opened.
    """
    if place is not None:
        if config.workers > 1:
            raise ConfigError(
                f"proxy.workers is {config.workers}, and each proxy of a run on several machines is one "
                "process: set proxy.workers to 1, and cluster.proxies to the number of proxies"
            )
        config = shared_among(place.count, config)
    refuse_open_access(config)
    check_addresses(engine_urls, router_url)
    with contextlib.ExitStack() as stack:
        stack.enter_context(logging_as(config.log_format))
        folder = locks_of(store)
        listener = stack.enter_context(listen_after(config.host, config.port, folder))
        stack.enter_context(exit_on_sigterm())
        wait_for_orphans(folder)
        renderer = make_renderer(model, config)
        settings = durability or StoreConfig()
        spans = stack.enter_context(exporting(telemetry or TelemetryConfig(), "proxy", run=run))
        opened = stack.enter_context(Store.open(store, settings.durability))
        peers = None
        if place is None:
            refuse_beside_places(opened)
        else:
            peers = Places(opened, place)
            stack.enter_context(peers.watching())
        if not engine_urls:
            engine_key = new_engine_key()
            started = running_engine(model, key=engine_key, **(engine_options or {}))
            engine_urls = [stack.enter_context(started)]
        check_models(engine_urls, protocol, engine_key)
        engines = EngineUrls(
            tuple(engine_urls), router_url, adapters, vocab_size, place is not None, protocol, engine_key
        )
        url = url_of(listener, "http" if tls is None else "https")
        announce(f"serving {Path(model).name} at {url}/v1 (engine {engines.describe()})")
        announce(recording_notice(store, config))
        announce_page(page, url, announce)
        serve_with_engines(
            listener,
            engines=engines,
            store=opened,
            renderer=renderer,
            config=config,
            peers=peers,
            tls=tls,
            # Only the first removes turns, so that no turn is exported twice.
            retention=retention_of(opened, settings) if place is None or place.index == 0 else None,
            page=page,
            traces=None if spans is None else Traces(spans, run),
        )


def recording_notice(store: str | Path, config: ProxyConfig) -> str:
    """Return what a user needs to know about the episodes that calls open by themselves."""
    where = shown_store(store)
    if config.implicit_split == "train":
        then = (
            "with split train: sampling parameters are pinned, so that it can be trained on; reward "
            f"completions with POST /rewards, and train with data.episodes={where}"
        )
    else:
        then = "with split eval: agents choose sampling parameters, and it is not trained on"
    return f"episodes are recorded in {where}; a call that names none opens one {then}"


def make_renderer(model: str | Path, config: ProxyConfig) -> ChatRenderer:
    """Return the renderer of a model folder. Raise ConfigError if its template lacks an option."""
    options = dict(config.template_options)
    if config.reasoning == "keep":
        options["thinking_retention"] = "all"
    renderer = ChatRenderer.from_folder(
        model,
        family=config.family,
        options=options,
        special_tokens_in_content=config.special_tokens_in_content,
    )
    _logger.info("chat format: %s", renderer.describe())
    return renderer


def retention_of(store: Store, settings: StoreConfig) -> Retention | None:
    """Return the object that removes turns that the settings do not keep; None if all turns are kept."""
    return None if settings.retain.versions is None else Retention(store, settings.retain)


def serve_with_engines(
    *listeners: socket.socket,
    engines: EngineUrls,
    store: Store,
    renderer: ChatRenderer,
    config: ProxyConfig,
    worker: WorkerSockets | None = None,
    peers: Peers | None = None,
    tls: TlsConfig | None = None,
    retention: Retention | None = None,
    page: Page | None = None,
    traces: Traces | None = None,
    on_ready: Callable[[], None] | None = None,
) -> None:
    """Serve on bound sockets, with running engines, until SIGTERM or Ctrl-C.

    `worker` is given if this is one of several processes on one port, and `peers` if it is one of several on
    ports of their own; with `tls` it serves HTTPS. `on_ready` is called once requests are answered.
    """
    allow_many_connections()
    pool = make_pool(
        engines,
        store=store,
        renderer=renderer,
        request_timeout_s=config.generate_timeout_s,
        canary_share=config.canary_share,
    )
    parts: dict[str, Any] = {
        "store": store, "engine": pool, "renderer": renderer, "config": config, "traces": traces,
    }  # fmt: skip
    servers: list[uvicorn.Server] = []
    if page is not None:
        parts["page"] = page.make(
            admin_key=config.admin_key, is_stopping=lambda: any(server.should_exit for server in servers)
        )
    app: ASGIApp
    handover = None
    if worker is not None:
        app, worker_of = create_worker_app(**parts, retention=retention, peers=worker.workers)
        handover = Handover(worker, worker_of)
    elif peers is not None:
        app, _ = create_worker_app(**parts, retention=retention, peers=peers)
    else:
        app = create_app(**parts, retention=retention)
    most_bytes = config.max_body_bytes if worker is None and peers is None else None
    served = app if on_ready is None else _calling_when_ready(app, on_ready)

    async def run() -> None:
        try:
            servers.append(build_server(served, handover, max_message_bytes=most_bytes, tls=tls))
            await servers[0].serve(sockets=list(listeners))
        finally:
            await pool.aclose()

    _share_one_heap()
    # Loaded modules are never freed, so collections need not scan them; few objects of a call are cyclic.
    gc.collect()
    gc.freeze()
    collect_seldom()
    sys.setswitchinterval(_SWITCH_S)
    with contextlib.ExitStack() as stack:
        if engines.move:
            clients = [cast("EngineClient", replica.engine) for replica in pool.replicas]
            stack.enter_context(following_engines(clients, lambda: store.addresses("engine")))
        stack.enter_context(contextlib.suppress(KeyboardInterrupt))
        stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop)).run(run())


def _share_one_heap() -> None:
    """Let all threads share one heap, because glibc would keep freed memory in the heap of each thread."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)  # glibc's default grows with the largest freed block


async def serve_app(app: ASGIApp, *listeners: socket.socket) -> None:
    """Serve an app on bound sockets until SIGTERM or SIGINT."""
    await build_server(app).serve(sockets=list(listeners))


def build_server(
    app: ASGIApp,
    handover: Handover | None = None,
    *,
    max_message_bytes: int | None = None,
    tls: TlsConfig | None = None,
) -> uvicorn.Server:
    """Return the HTTP server of the proxy; set its `should_exit` to stop it.

    With `handover` it is the server of one of several workers, which pass connections to one another.
    `max_message_bytes` limits the messages on WebSockets; without it, as for one of several proxies, because
    the episodes of one WebSocket may belong to several, the app gets their requests as HTTP requests. With
    `tls` it serves HTTPS.
    """
    has_websockets = max_message_bytes is not None
    config = uvicorn.Config(
        app,
        http=LimitedProtocol if handover is None else protocol_of(handover),
        ws=LimitedWebSocket if has_websockets else "none",
        ws_max_size=max_message_bytes or 0,
        ws_ping_timeout=None,  # some clients answer pings only while they wait for an event
        ws_per_message_deflate=False,  # HTTP bodies may not be compressed either
        proxy_headers=False,
        date_header=False,
        lifespan="on",
        access_log=False,  # paths contain keys
        log_config=None,  # `logging_as` configures logging
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACEFUL_SHUTDOWN_S,
        backlog=BACKLOG,
        ssl_certfile=None if tls is None else tls.certificate,
        ssl_keyfile=None if tls is None else tls.key,
    )
    return uvicorn.Server(config) if handover is None else HandoverServer(config, handover)


def _calling_when_ready(app: ASGIApp, on_ready: Callable[[], None]) -> ASGIApp:
    async def watched(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_call(message: Message) -> None:
            await send(message)
            if message["type"] == "lifespan.startup.complete":
                on_ready()

        await app(scope, receive, send_and_call if scope["type"] == "lifespan" else send)

    return watched
