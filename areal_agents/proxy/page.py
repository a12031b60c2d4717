"""The page at /view of a proxy: which function makes its app, and the routes that serve it.

The page reads the store and the run's folder, and is made by a package above this one; the proxy only knows
the function's name, which it can also give to its workers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp

PATH = "/view"


@dataclass(frozen=True, slots=True)
class Page:
    """What makes a page.

    Attributes:
        factory: "module:function". The function gets the other attributes, `key`, the admin key or None, and
            `is_stopping`, which says whether the server is about to end; it returns an ASGI app.
        store: the path of the store, or its URL.
        model: the model folder, for the texts of tokens.
        run: the run's folder; None if the proxy belongs to no run.
    """

    factory: str
    store: str
    model: str
    run: str | None = None

    def make(self, *, key: str | None, is_stopping: Callable[[], bool]) -> ASGIApp:
        """Import the function and return its app."""
        module, _, name = self.factory.partition(":")
        factory = getattr(importlib.import_module(module), name)
        return factory(store=self.store, model=self.model, run=self.run, key=key, is_stopping=is_stopping)


def page_routes(page: ASGIApp | None) -> list[BaseRoute]:
    """Return the routes of a page; none without one."""
    if page is None:
        return []

    async def with_slash(request: Request) -> Response:
        """Send the browser to the address against which the page's relative links work."""
        return RedirectResponse(PATH.lstrip("/") + "/")

    return [Route(PATH, with_slash, methods=["GET"]), Mount(PATH, app=page)]
