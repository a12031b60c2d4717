"""Translates exceptions into error responses in the form of the client's API, without stack traces.

A client must not repeat a request that cannot succeed, so the response to such a request has the header
`x-should-retry: false`. The response to a request that may succeed later has Retry-After.
"""

from __future__ import annotations

import logging
import re

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from areal_agents.errors import (
    EngineError,
    EngineRejected,
    EngineUnavailable,
    RenderingError,
    RequestError,
    StoreError,
)
from areal_agents.proxy.dialects.gemini.dialect import Gemini
from areal_agents.proxy.dialects.gemini.urls import is_google_path
from areal_agents.proxy.dialects.messages.dialect import Messages
from areal_agents.proxy.dialects.writing import openai_error
from areal_agents.proxy.paths import split_path
from areal_agents.store import Conflict, NotFound, NoTurn, OwnedElsewhere

_logger = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0
_KEY_IN_PATH = re.compile(r"^(/e/)[^/]+")


class ClientGone(Exception):
    """The client disconnected before its response was ready."""


def as_request_error(error: Exception) -> RequestError:
    """Translate an error of another package into one with a status that a client can act on."""
    match error:
        case RequestError():
            return error
        case NotFound():
            return RequestError(str(error), status=404, code="not_found")
        case NoTurn():
            return RequestError(str(error), status=409, code="no_turn")
        case OwnedElsewhere():
            return episode_elsewhere(str(error))
        case Conflict():
            return RequestError(str(error), status=409, code="conflict")
        case StoreError():
            return RequestError(
                str(error), status=503, code="store_unavailable", retry_after_s=_RETRY_AFTER_S
            )
        case RenderingError():
            return RequestError(str(error), code="invalid_conversation", param="messages")
        case EngineUnavailable():
            return RequestError(
                f"the model is not available: {error}",
                status=503,
                code="engine_unavailable",
                retry_after_s=_RETRY_AFTER_S,
            )
        case EngineRejected():
            return RequestError(
                f"the engine refused the request: {error}", status=502, code="engine_rejected"
            )
        case EngineError():
            return RequestError(f"the engine failed: {error}", status=502, code="engine_error")
        case HTTPException():
            return RequestError(str(error.detail), status=error.status_code, code="invalid_request")
        case ClientGone():
            return RequestError("the client closed the connection", status=499, code="client_closed_request")
        case _:
            return RequestError(
                "the proxy failed because of a bug; its log has the stack trace",
                status=500,
                code="internal_error",
            )


def episode_elsewhere(message: str) -> RequestError:
    """Return a 503 that asks the client to retry: another worker owns the episode or just took it over."""
    return RequestError(message, status=503, code="episode_elsewhere", retry_after_s=_RETRY_AFTER_S)


class InternalErrors:
    """ASGI middleware that logs a bug with its stack trace, answers 500, and keeps the connection open."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            if scope["type"] != "http":
                raise
            await error_response(Request(scope), error)(scope, receive, send)


def error_response(request: Request, error: Exception) -> Response:
    """Return the response to an exception, in the form of the API that the path belongs to.

    Starlette calls it as an exception handler.
    """
    refusal = _routing_error(request, error) if isinstance(error, HTTPException) else as_request_error(error)
    log_refusal(request, refusal, error)
    body, headers = error_body(request.scope["path"], refusal)
    more = getattr(error, "headers", None) or {}
    return Response(body, status_code=refusal.status, headers={**more, **headers})


def _routing_error(request: Request, error: HTTPException) -> RequestError:
    """Return the error for a request that no route answers; it says what to change, mostly the base_url."""
    path = _masked(request)
    match error.status_code:
        case 404:
            message = (
                f"the proxy has no path {path}; the base_url of an OpenAI client must end in /v1, those of "
                "Anthropic's and Google's clients must not"
            )
        case 405:
            allowed = (error.headers or {}).get("Allow", "POST").replace("HEAD, ", "").replace(", HEAD", "")
            message = f"{path} does not accept {request.method}; use {allowed}"
        case _:
            message = str(error.detail)
    return RequestError(message, status=error.status_code, code="invalid_request")


def error_body(path: str, refusal: RequestError) -> tuple[bytes, dict[str, str]]:
    """Return (body, headers) of an error, in the form of the API that a path belongs to."""
    if is_google_path(split_path(path)[1]):
        form = Gemini().error
    else:
        form = Messages().error if "/v1/messages" in path else openai_error
    return form(refusal), {"content-type": "application/json", **headers_of(refusal)}


def log_refusal(request: Request, refusal: RequestError, error: Exception) -> None:
    """Log an error that is not the client's fault: a bug with its stack trace, any other on one line."""
    if refusal.code == "internal_error":
        _logger.error("a bug in %s %s", request.method, _masked(request), exc_info=error)
    elif refusal.status >= 500 and refusal.status != 501:
        _logger.error("%s %s: %d %s", request.method, _masked(request), refusal.status, error)


def headers_of(refusal: RequestError) -> dict[str, str]:
    """Return the headers that tell a client whether to retry, and when."""
    if refusal.retry_after_s is not None:
        return {"retry-after": str(max(1, round(refusal.retry_after_s)))}
    if refusal.status <= 501 or refusal.code == "engine_rejected":
        return {"x-should-retry": "false"}
    return {}


def _masked(request: Request) -> str:
    """Return the path with the episode's key masked."""
    return _KEY_IN_PATH.sub(r"\1***", request.url.path)
