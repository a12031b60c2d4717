"""Reads request bodies, limited in size and number of JSON values; large ones are parsed off the event loop.

Work on one body must not delay other calls. A thread that runs Python code yields every millisecond. C code
does not, so its time is bounded by the number of JSON values, to which the parsing time is proportional.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from areal_agents.errors import RequestError
from areal_agents.proxy.dialects.known_bodies import KnownBodies
from areal_agents.proxy.dialects.replayed import MessageMemo
from areal_agents.proxy.errors import ClientGone
from areal_agents.proxy.values import refuse_many_values

T = TypeVar("T")

_JSON = "application/json"
_LARGE_BYTES = 262_144  # bodies of this size or more are parsed on the thread
_HUGE_BYTES = 2**20  # after bodies of this size or more, freed memory is returned to the system
_GIVE_BACK_AFTER_S = 1.0


class Bodies:
    """Reads the request bodies of one app. Large bodies are parsed one at a time."""

    def __init__(self, *, max_bytes: int, max_values: int) -> None:
        self.max_bytes = max_bytes
        self._max_values = max_values
        self._known = KnownBodies()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bodies")
        self._giving_back: asyncio.TimerHandle | None = None
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it

    def close(self) -> None:
        """Stop the thread."""
        if self._giving_back is not None:
            self._giving_back.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def object(
        self, request: Request, max_bytes: int | None = None, *, memo: MessageMemo | None = None
    ) -> dict[str, Any]:
        """Return the JSON object in the body of a request, {} for an empty body.

        Args:
            max_bytes: a limit in bytes instead of the app's.
            memo: the conversations of the caller's episode, with one of which the body may begin.

        Raises:
            RequestError: 413 if the body is too large or has too many values, 415 if it is compressed or its
                Content-Type is not JSON, 400 if it is not a JSON object.
            ClientGone: the client disconnected before the end of the body.
        """
        body = await _received(request, self.max_bytes if max_bytes is None else max_bytes)
        return await self.parsed(request, body, memo)

    async def parsed(
        self, request: Request, body: bytes | bytearray, memo: MessageMemo | None = None
    ) -> dict[str, Any]:
        """Return the JSON object in a body that was received for `request`; see `object`."""
        request.state.body_bytes = len(body)
        if not body:
            return {}
        data = await self.off_loop(request, lambda: self._parse(body, memo))
        if not isinstance(data, dict):
            raise RequestError(f"the body must be a JSON object, got {_json_type(data)}", code="invalid_json")
        return data

    async def off_loop(self, request: Request, work: Callable[[], T]) -> T:
        """Run `work`, whose time grows with the body of `request`, in the thread if the body is large."""
        if getattr(request.state, "body_bytes", 0) < _LARGE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def done_with(self, request: Request) -> None:
        """Schedule the return of a huge body's memory to the operating system."""
        if self._trim is None or getattr(request.state, "body_bytes", 0) < _HUGE_BYTES:
            return
        if self._giving_back is None:
            loop = asyncio.get_running_loop()
            self._giving_back = loop.call_later(_GIVE_BACK_AFTER_S, self._give_back)

    def _give_back(self) -> None:
        self._giving_back = None
        self._thread.submit(self._collect)

    def _collect(self) -> None:
        assert self._trim is not None
        gc.collect(1)  # the exception of a refused request is part of a reference cycle
        self._trim(0)

    def _parse(self, body: bytes | bytearray, memo: MessageMemo | None) -> Any:
        refuse_many_values(body, self._max_values)
        try:
            return orjson.loads(body) if memo is None else self._known.parsed(body, memo)
        except orjson.JSONDecodeError as error:
            _refuse_constant(error.doc, error.pos)
            raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has closed the connection; the request's body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _received(request: Request, max_bytes: int) -> bytearray:
    if request.headers.get("content-encoding", "identity") != "identity":
        raise RequestError(
            "compressed bodies are not supported; send the body without Content-Encoding",
            status=415,
            code="unsupported_encoding",
        )
    kind = request.headers.get("content-type", _JSON).partition(";")[0].strip().lower()
    if kind not in ("", _JSON) and not kind.endswith("+json"):
        raise RequestError(
            f"the body must be JSON, got Content-Type: {kind}; send Content-Type: {_JSON}",
            status=415,
            code="unsupported_media_type",
        )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()  # grows without copying all of it
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_bytes:
                raise _too_large(max_bytes)
    except ClientDisconnect:
        raise ClientGone from None
    return body


def refuse_depth(body: dict[str, Any]) -> None:
    """Raise RequestError 400 if a body is nested too deeply to be serialised again."""
    try:
        orjson.dumps(body)
    except orjson.JSONEncodeError:
        raise RequestError("the JSON of the body is nested too deeply", code="invalid_json") from None


def _refuse_constant(text: str, at: int) -> None:
    """Raise RequestError 400 if the parser stopped at NaN or Infinity, which Python clients write."""
    for name in ("NaN", "Infinity"):
        if text.startswith(name, at):
            _not_finite("-" + name if text[at - 1 : at] == "-" else name)


def _not_finite(name: str) -> NoReturn:
    raise RequestError(f"numbers must be finite, got {name}", code="not_finite") from None


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(
        f"the body is larger than {max_bytes / 2**20:g} MiB; the proxy's max_body_mb sets the limit of model "
        "calls",
        status=413,
        code="request_too_large",
    )


def _json_type(value: Any) -> str:
    return {list: "an array", str: "a string", type(None): "null", bool: "a boolean"}.get(
        type(value), "a number"
    )
