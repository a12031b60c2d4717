"""What is let in: bodies of a bounded size, and a bounded number of model calls at a time.

Calls beyond the concurrency wait in order, since a 429 makes every outer retry loop multiply; only a
full queue is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import orjson
from starlette.requests import ClientDisconnect, Request

from areal_agents.errors import RequestError
from areal_agents.proxy.errors import ClientGone

_JSON = "application/json"


class Admission:
    """A bounded number of concurrent calls with a bounded queue in front."""

    def __init__(self, *, max_concurrent: int, max_queued: int, longest_wait_s: float) -> None:
        self._slots = asyncio.Semaphore(max_concurrent)
        self._max_queued = max_queued
        self._longest_wait_s = longest_wait_s
        self._queued = 0
        self._held = 0

    @property
    def waiting(self) -> int:
        """Calls in the queue."""
        return self._queued

    @property
    def running(self) -> int:
        """Calls that hold a slot."""
        return self._held

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold one slot. RequestError 429 if the queue is full, 503 after the longest wait in it."""
        if self._slots.locked():
            if self._queued >= self._max_queued:
                raise RequestError(
                    f"{self._queued} calls are waiting already",
                    status=429,
                    code="queue_full",
                    retry_after_s=2.0,
                )
            self._queued += 1
            try:
                async with asyncio.timeout(self._longest_wait_s):
                    await self._slots.acquire()
            except TimeoutError:
                raise RequestError(
                    f"the call waited {self._longest_wait_s:g} s for its turn",
                    status=503,
                    code="queue_timeout",
                    retry_after_s=2.0,
                ) from None
            finally:
                self._queued -= 1
        else:
            await self._slots.acquire()
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            self._slots.release()


async def read_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """The JSON object in the body of a request; {} for an empty body.

    Raises RequestError: 413 for a body that is too large, 415 for one that is compressed or that its
    Content-Type calls something else than JSON, 400 for one that is no JSON object. ClientGone if
    the client hangs up meanwhile.
    """
    if request.headers.get("content-encoding", "identity") != "identity":
        raise RequestError("compressed bodies are not supported", status=415, code="unsupported_encoding")
    kind = request.headers.get("content-type", _JSON).partition(";")[0].strip().lower()
    if kind not in ("", _JSON) and not kind.endswith("+json"):
        raise RequestError(
            f"the body must be JSON, and Content-Type says {kind}; send Content-Type: {_JSON}",
            status=415,
            code="unsupported_media_type",
        )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > max_bytes:
                raise _too_large(max_bytes)
            chunks.append(chunk)
    except ClientDisconnect:
        raise ClientGone from None
    body = b"".join(chunks)
    if not body:
        return {}
    data = _parse(body)
    if not isinstance(data, dict):
        raise RequestError(f"the body must be a JSON object, got {_json_type(data)}", code="invalid_json")
    return data


def refuse_depth(body: dict[str, Any]) -> None:
    """RequestError 400 for JSON that is nested more deeply than it can be written again."""
    try:
        orjson.dumps(body)
    except orjson.JSONEncodeError:
        raise RequestError("the request is nested too deeply", code="invalid_json") from None


def _parse(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        _refuse_constants(body)
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None


def _refuse_constants(body: bytes) -> None:
    """Python clients write NaN and Infinity, which no JSON has: say so, instead of "unexpected character"."""
    # Any other fault is reported by the caller; nesting too deep for this parser is one.
    with contextlib.suppress(ValueError, RecursionError):
        json.loads(body, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> NoReturn:
    raise RequestError(f"numbers must be finite, got {name}", code="not_finite")


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(
        f"the body is larger than {max_bytes / 2**20:g} MiB", status=413, code="request_too_large"
    )


def _json_type(value: Any) -> str:
    return {list: "an array", str: "a string", type(None): "null", bool: "a boolean"}.get(
        type(value), "a number"
    )
