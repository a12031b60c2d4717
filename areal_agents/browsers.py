"""Refuses requests, also for WebSockets, that foreign web pages send from a browser.

A script of any page that a user opens can send requests to this machine. If the page's host name resolves to
this machine (DNS rebinding), the script can also read the responses; the Host header then has that name.
Cross-site requests have an Origin or a Sec-Fetch-Site header, which scripts cannot set. Clients that are not
browsers send neither.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from areal_agents.errors import RequestError

Refuse = Callable[[str, RequestError], Response]

_SAFE = ("GET", "HEAD")  # these change nothing, and the page cannot read the response
_OWN_SITE = ("same-origin", "none")


class BrowserGuard:
    """ASGI middleware that refuses requests for unknown hosts and from web pages of another origin.

    Args:
        app: the guarded app.
        host: the address that the server listens on.
        refuse: returns the response to a refused request, from its path and the refusal.
        checks_host: whether the Host header must name this machine, the public URL or an allowed host.
        public_url: the URL under which other machines reach the server.
        allowed_hosts: further host names of the server, whose pages are trusted.
        remedy: what the user can do about a refusal, at the end of its message.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str,
        refuse: Refuse,
        checks_host: bool,
        public_url: str | None = None,
        allowed_hosts: Collection[str] = (),
        remedy: str = "",
    ) -> None:
        self._app = app
        self._refuse = refuse
        self._checks_host = checks_host
        self._remedy = remedy
        self._allowed = frozenset(name.lower() for name in allowed_hosts)
        public = urlsplit(public_url or "")
        self._public_origin = f"{public.scheme}://{public.netloc}".lower() if public.netloc else None
        self._known = self._allowed | {"localhost", host.lower(), (public.hostname or "localhost").lower()}
        self._is_everywhere = _is_unspecified(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and (refusal := self._refusal(scope)) is not None:
            await self._refuse(scope["path"], refusal)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> RequestError | None:
        host = origin = site = None
        for name, value in scope["headers"]:
            if name == b"host":
                host = value.decode("latin-1").lower()
            elif name == b"origin":
                origin = value.decode("latin-1").lower()
            elif name == b"sec-fetch-site":
                site = value.decode("latin-1").lower()
        if host is not None and self._checks_host and not self._is_known(_name_of(host)):
            return RequestError(
                f"the Host header names {_name_of(host)!r}, which is not a known name of this server"
                f"{self._remedy}",
                status=403,
                code="unknown_host",
            )
        foreign = origin is not None and not self._is_own(origin, host)
        if foreign or (site is not None and site not in _OWN_SITE and scope.get("method") not in _SAFE):
            return RequestError(
                f"web pages of another origin ({origin or site}) may not call this server{self._remedy}",
                status=403,
                code="cross_origin",
            )
        return None

    def _is_known(self, name: str) -> bool:
        if name in self._known or name.endswith(".localhost"):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or self._is_everywhere  # DNS rebinding needs a name, not an address

    def _is_own(self, origin: str, host: str | None) -> bool:
        scheme, _, netloc = origin.partition("://")
        if scheme not in ("http", "https"):
            return False
        return netloc == host or origin == self._public_origin or _name_of(netloc) in self._allowed


def _name_of(host: str) -> str:
    """Return the host name or address in a Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_unspecified(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
