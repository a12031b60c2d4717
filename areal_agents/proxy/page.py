"""The page at /view of a proxy: which function makes its app, and the routes that serve it.

The page reads the store and the run's folder, and is made by a package above this one; the proxy only knows
the function's name, which it can also give to its workers.
"""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp

PATH = "/view"


@dataclass(frozen=True, slots=True)
class Page:
    """What makes a page.

    Attributes:
        factory: "module:function". The function returns an ASGI app. Its arguments are `store`, `model`,
            `run`, `keys`, each of which opens the page, and `is_stopping`, which says whether the server
            is about to end.
        store: the path of the store, or its URL.
        model: the model folder, for the texts of tokens.
        run: the run's folder; None if the proxy belongs to no run.
        key: a key that opens the page and nothing else; "": only the admin key opens it. Without either key
            the page is open to all.
        is_announced: whether the server prints the link with the key when it starts.
    """

    factory: str
    store: str
    model: str
    run: str | None = None
    key: str = field(default="", repr=False)
    is_announced: bool = False

    def make(self, *, admin_key: str | None, is_stopping: Callable[[], bool]) -> ASGIApp:
        """Import the function and return its app."""
        module, _, name = self.factory.partition(":")
        factory = getattr(importlib.import_module(module), name)
        keys = [key for key in (admin_key, self.key) if key]
        return factory(store=self.store, model=self.model, run=self.run, keys=keys, is_stopping=is_stopping)


def new_view_key() -> str:
    """Return a new random key of a page."""
    return f"view-{secrets.token_urlsafe(24)}"


def link_of_page(proxy_url: str, key: str) -> str:
    """Return the address of the page with its key in the fragment, which a browser sends to no server."""
    return f"{proxy_url}{PATH}/#key={key}"


def announce_page(page: Page | None, proxy_url: str, announce: Callable[[str], None]) -> None:
    """Announce the link of the page, if it is to be announced."""
    if page is not None and page.is_announced:
        announce(f"the page, in a browser: {link_of_page(proxy_url, page.key)}")


def page_routes(page: ASGIApp | None) -> list[BaseRoute]:
    """Return the routes of a page; none without one."""
    if page is None:
        return []

    async def with_slash(request: Request) -> Response:
        """Send the browser to the address against which the page's relative links work."""
        return RedirectResponse(PATH.lstrip("/") + "/")

    return [Route(PATH, with_slash, methods=["GET"]), Mount(PATH, app=page)]
