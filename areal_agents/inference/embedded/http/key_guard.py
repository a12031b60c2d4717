"""Refuses requests without the key of the engine."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from areal_agents.browsers import Refuse
from areal_agents.errors import RequestError

_OPEN = ("/health",)  # what launchers and probes ask


class KeyGuard:
    """ASGI middleware that answers 401 to every request without the key, except those for /health.

    Args:
        app: the guarded app.
        key: the key, which requests have as `Authorization: Bearer`.
        refuse: returns the response to a refused request, from its path and the refusal.
    """

    def __init__(self, app: ASGIApp, *, key: str, refuse: Refuse) -> None:
        self._app = app
        self._expected = b"Bearer " + key.encode()
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN and not self._has_key(scope):
            refusal = RequestError("this engine needs its key as Authorization: Bearer", status=401)
            await self._refuse(scope["path"], refusal)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, self._expected)
