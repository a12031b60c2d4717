"""Refuses requests without the key of the engine. Loaded by vLLM (`--middleware`); imports nothing of this
package.

vLLM's own check of keys leaves open the endpoints that pause a server and replace its weights.
"""

from __future__ import annotations

import hmac
import json
import os
from typing import Any

_OPEN = ("/health", "/ping", "/metrics")  # what launchers, probes and Prometheus ask


class KeyGuard:
    """ASGI middleware that answers 401 to every request without the key in AREAL_AGENTS_ENGINE_KEY."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._expected = b"Bearer " + os.environ["AREAL_AGENTS_ENGINE_KEY"].encode()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or scope["path"] in _OPEN or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            body = json.dumps({"error": {"message": "this engine needs its key as Authorization: Bearer"}})
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body.encode()})

    def _has_key(self, scope: dict[str, Any]) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, self._expected)
