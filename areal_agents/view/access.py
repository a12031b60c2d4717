"""Who may read: everybody who reaches the server, or, with keys, who has given one of them.

A browser gives the key once, in the body of a request. It then has a cookie that scripts cannot read, that
does not contain the key, and that is void after a week or with other keys. The key is never in a URL that
is sent: a link has it behind the `#`.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

_VALID_S = 7 * 24 * 3600


class Access:
    """Grants access with any of `keys`; without keys everybody has it, which is safe on loopback only."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self._keys = tuple(keys)
        digest = hashlib.sha256("\n".join(keys).encode())
        self._secret = digest.digest()
        # cookies of several servers share a host name
        self._cookie = f"areal-agents-view-{hashlib.sha256(self._secret).hexdigest()[:8]}"

    @property
    def needs_key(self) -> bool:
        """Whether there is a key."""
        return bool(self._keys)

    def permits(self, request: Request) -> bool:
        """Whether the sender of a request may read."""
        if not self._keys:
            return True
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.is_key(bearer.strip()):
            return True
        until, _, signature = request.cookies.get(self._cookie, "").partition(".")
        return _same(signature, self._signature(until)) and int(until) > time.time()

    def is_key(self, key: str) -> bool:
        """Whether this is one of the keys; the comparison takes constant time."""
        return any([_same(key, known) for known in self._keys])

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
        return hmac.new(self._secret, f"areal-agents view {until}".encode(), hashlib.sha256).hexdigest()


def _path(request: Request) -> str:
    return request.scope.get("root_path", "").rstrip("/") + "/"


def _same(left: str, right: str) -> bool:
    return hmac.compare_digest(left.encode(), right.encode())
