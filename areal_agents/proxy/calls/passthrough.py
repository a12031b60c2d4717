"""Forwards calls of models other than the policy (a judge, a simulated user, embeddings) to their servers.

These calls are never trained on. The proxy sends the key that its configuration has for the upstream; the
agent's key is not forwarded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import aiohttp
import orjson
from starlette.requests import Request
from starlette.responses import Response

from areal_agents.errors import EngineUnavailable, RequestError
from areal_agents.proxy.bodies import wait_for_disconnect
from areal_agents.proxy.calls.streaming import EventStream
from areal_agents.proxy.config import ProxyConfig, Upstream
from areal_agents.proxy.dialects.gemini.urls import is_google_path, upstream_call

_CONNECT_S = 10.0
_PASSED = ("accept", "anthropic-version", "anthropic-beta", "openai-beta", "user-agent")


class PassThrough:
    """Forwards requests to the upstreams of a configuration."""

    def __init__(self, config: ProxyConfig) -> None:
        self._models = config.models
        self._timeout = aiohttp.ClientTimeout(total=config.generate_timeout_s, sock_connect=_CONNECT_S)
        self._session: aiohttp.ClientSession | None = None

    async def aclose(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    def upstream(self, body: Mapping[str, Any]) -> Upstream | None:
        """Return the upstream that serves the model of a request, None for the policy."""
        model = body.get("model")
        return self._models.get(model) if isinstance(model, str) else None

    async def forward(
        self, request: Request, endpoint: str, body: Mapping[str, Any], upstream: Upstream
    ) -> Response:
        """Return the upstream's answer, streamed if the upstream streams it.

        `body` has the fields of the URL, if the API has any. Raise EngineUnavailable if the upstream does not
        answer.
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        path, fields = upstream_call(endpoint, body, upstream.model or body["model"])
        try:
            sent = orjson.dumps(fields)
        except orjson.JSONEncodeError:
            raise RequestError("the JSON of the body is nested too deeply", code="invalid_json") from None
        headers = {name: request.headers[name] for name in _PASSED if name in request.headers}
        headers["content-type"] = "application/json"
        if upstream.key is not None:
            headers |= _key_headers(endpoint, upstream.key)
        url = upstream.base_url.rstrip("/") + path
        try:
            answer = await self._session.post(
                url, data=sent, headers=headers, timeout=self._timeout, allow_redirects=False
            )
            if answer.content_type == "text/event-stream":
                return EventStream(_parts(answer, request))
            async with answer:
                content = await answer.read()
        except (TimeoutError, aiohttp.ClientError) as error:
            raise EngineUnavailable(
                f"the upstream {url} did not answer: {str(error) or type(error).__name__}"
            ) from error
        passed = {name: answer.headers[name] for name in ("retry-after",) if name in answer.headers}
        return Response(content, status_code=answer.status, headers=passed, media_type=answer.content_type)


def _key_headers(endpoint: str, key: str) -> dict[str, str]:
    if is_google_path(endpoint):  # Google's servers take a bearer for another kind of key, and refuse it
        return {"x-goog-api-key": key}
    return {"authorization": f"Bearer {key}", "x-api-key": key}


async def _parts(answer: aiohttp.ClientResponse, request: Request) -> AsyncGenerator[bytes, None]:
    """Yield what the upstream streams, until its end or until the client disconnects."""
    gone = asyncio.ensure_future(wait_for_disconnect(request.receive))
    reading: asyncio.Future[bytes] | None = None
    try:
        while True:
            reading = asyncio.ensure_future(answer.content.readany())
            await asyncio.wait((reading, gone), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done() or not (part := reading.result()):
                return
            yield part
    finally:
        gone.cancel()
        if reading is not None:
            reading.cancel()
        answer.close()
