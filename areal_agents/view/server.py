"""Serves the page on a port of its own, beside runs that may be training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp

from areal_agents.browsers import BrowserGuard
from areal_agents.errors import ConfigError, RequestError
from areal_agents.sockets import is_loopback, listen, url_of
from areal_agents.view.access import Access
from areal_agents.view.app import create_app
from areal_agents.view.runs import Runs

_GRACEFUL_SHUTDOWN_S = 3


def serve(
    place: Path, *, host: str, port: int, key: str | None, model: str | None, announce: Callable[[str], None]
) -> None:
    """Serve the page until SIGTERM or Ctrl-C.

    Args:
        place: a folder that has runs, the folder of a run, or a store file.
        host: the address to listen on; without a key it must be one that only this machine reaches.
        port: the port; 0 takes a free one.
        key: the key that a reader must give; None: none.
        model: the model, for its tokenizer, of stores that name none: a folder, `quickstart`, or a model of
            the Hugging Face Hub.
        announce: called with the URL when requests are about to be answered.

    Raises:
        ConfigError: the place has nothing to show, the port is taken, or a key is needed.
        StoreError: the store file cannot be read.
    """
    if key is None and not is_loopback(host):
        raise ConfigError(
            f"{host} can be reached from other machines: set a key (AREAL_AGENTS_ADMIN_KEY or --key), or "
            "listen on 127.0.0.1"
        )
    runs = Runs(place, model=model)
    with listen(host, port, setting="--port") as listener:
        announce(url_of(listener))
        make_server(runs, key=key, host=host).run(sockets=[listener])


def make_server(runs: Runs, *, key: str | None, host: str) -> uvicorn.Server:
    """Return the HTTP server of the page; set its `should_exit` to stop it."""
    servers: list[uvicorn.Server] = []
    app = create_app(
        runs,
        Access(() if key is None else (key,)),
        is_stopping=lambda: any(server.should_exit for server in servers),
    )
    config = uvicorn.Config(
        _guarded(app, host, checks_host=key is None),
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=_GRACEFUL_SHUTDOWN_S,
    )
    servers.append(uvicorn.Server(config))
    return servers[0]


def _guarded(app: ASGIApp, host: str, *, checks_host: bool) -> ASGIApp:
    """Refuse foreign web pages, and without a key requests for an unknown host (DNS rebinding)."""

    def refuse(path: str, refusal: RequestError) -> Response:
        return Response(str(refusal), status_code=refusal.status, media_type="text/plain")

    return BrowserGuard(app, host=host, refuse=refuse, checks_host=checks_host)
