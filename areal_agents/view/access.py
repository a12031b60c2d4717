"""Who may read: everybody who reaches the server, or, with a key, who has given that key.

A browser gives the key once, in the body of a request. It then has a cookie that scripts cannot read, that
does not contain the key, and that is void after a week or with another key. The key is never in a URL.
"""

from __future__ import annotations

import hashlib
import hmac
import time

from starlette.requests import Request
from starlette.responses import Response

_VALID_S = 7 * 24 * 3600


class Access:
    """Grants access with `key`; without a key everybody has it, which is safe on loopback only."""

    def __init__(self, key: str | None) -> None:
        self._key = key
        digest = hashlib.sha256((key or "").encode()).hexdigest()
        self._cookie = f"areal-agents-view-{digest[:8]}"  # cookies of several servers share a host name

    @property
    def needs_key(self) -> bool:
        """Whether there is a key."""
        return self._key is not None

    def permits(self, request: Request) -> bool:
        """Whether the sender of a request may read."""
        if self._key is None:
            return True
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.is_key(bearer.strip()):
            return True
        until, _, signature = request.cookies.get(self._cookie, "").partition(".")
        return until.isdecimal() and int(until) > time.time() and _same(signature, self._signature(until))

    def is_key(self, key: str) -> bool:
        """Whether this is the key; the comparison takes constant time."""
        return self._key is not None and _same(key, self._key)

    def admit(self, request: Request, response: Response) -> None:
        """Give the sender of a request the cookie."""
        until = str(int(time.time()) + _VALID_S)
        response.set_cookie(
            self._cookie,
            f"{until}.{self._signature(until)}",
            max_age=_VALID_S,
            path=_path(request),
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )

    def dismiss(self, request: Request, response: Response) -> None:
        """Take the cookie back."""
        response.delete_cookie(self._cookie, path=_path(request), httponly=True, samesite="strict")

    def _signature(self, until: str) -> str:
        assert self._key is not None
        return hmac.new(self._key.encode(), f"areal-agents view {until}".encode(), hashlib.sha256).hexdigest()


def _path(request: Request) -> str:
    return request.scope.get("root_path", "").rstrip("/") + "/"


def _same(left: str, right: str) -> bool:
    return hmac.compare_digest(left.encode(), right.encode())
