"""Runs a proxy and a scripted engine in threads of this process, for one agent to call.

The proxy has an event loop of its own, so that it also serves an agent that blocks the main one.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import uvloop
from starlette.types import ASGIApp

from areal_agents.doctor.observed import RequestRecorder, Seen
from areal_agents.doctor.scripted_model import ScriptedModel
from areal_agents.errors import EngineUnavailable
from areal_agents.inference import Sampler, SGLangEngine
from areal_agents.proxy.app import create_app
from areal_agents.proxy.calls.record import CallRecord
from areal_agents.proxy.config import ProxyConfig
from areal_agents.proxy.server import build_server
from areal_agents.rendering import ChatRenderer
from areal_agents.secret_variables import given_engine_key
from areal_agents.sockets import listen, url_of
from areal_agents.store import Store
from areal_agents.testing import ScriptedApp, running

_STOP_S = 15.0


@dataclass(slots=True)
class ObservedProxy:
    """A running proxy, and the calls and requests that it received."""

    url: str
    store: Store
    records: list[CallRecord] = field(default_factory=list)
    requests: list[Seen] = field(default_factory=list)


@contextlib.contextmanager
def scripted_engine(folder: Path, renderer: ChatRenderer, *, context_length: int) -> Iterator[str]:
    """Run an engine that answers as `ScriptedModel` does inside the block; yields its URL."""
    app = ScriptedApp.from_folder(
        folder, ScriptedModel(renderer), context_length=context_length, keep=0, with_text=False
    )
    with running(app) as url:
        yield url


@contextlib.contextmanager
def serving(
    proxy: ObservedProxy, engine_url: str, renderer: ChatRenderer, config: ProxyConfig | None = None
) -> Iterator[None]:
    """Run the proxy inside the block; afterwards nothing is added to `proxy`."""
    settings = config or ProxyConfig()
    engine = SGLangEngine(engine_url, key=given_engine_key())
    app = create_app(
        store=proxy.store, engine=engine, renderer=renderer, config=settings, observer=proxy.records.append
    )
    with in_thread(RequestRecorder(app, proxy.requests), engine, settings) as proxy.url:
        yield


@contextlib.contextmanager
def in_thread(app: ASGIApp, engine: Sampler, config: ProxyConfig) -> Iterator[str]:
    """Run the app of a proxy in a thread inside the block, and close its engine; yields its URL.

    Raises:
        EngineUnavailable: the thread does not end.
    """
    with listen("127.0.0.1", 0) as listener:
        server = build_server(app, max_message_bytes=config.max_body_bytes)
        server.config.timeout_graceful_shutdown = 1

        def run() -> None:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                try:
                    runner.run(server.serve(sockets=[listener]))
                finally:
                    runner.run(engine.aclose())

        thread = threading.Thread(target=run, name="agent-proxy", daemon=True)
        thread.start()
        try:
            yield url_of(listener)
        finally:
            server.should_exit = True
            thread.join(_STOP_S)
            if thread.is_alive():
                raise EngineUnavailable(f"the proxy did not end within {_STOP_S:g} s")
