"""Takes model calls straight to their endpoint; everything else goes through the routes.

A model call needs none of the routing, and it is the one request that comes thousands of times.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from areal_agents.proxy.model_calls import Endpoint


class FrontDoor:
    """An app with a short way to its model calls.

    Args:
        app: answers everything else.
        endpoints: of the model calls, by path without an episode's key.
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
