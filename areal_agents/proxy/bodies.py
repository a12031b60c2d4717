"""Request bodies: bounded in size and in the number of JSON values; large ones are read off the event loop.

Nothing that is done to a body may keep other calls waiting. What Python runs by itself lets other threads run
every millisecond, and what runs in C, which does not, is bounded by the number of values: parsing a body
takes as long as its values are many, wherever they are in it.
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

from areal_agents.errors import RequestError
from areal_agents.proxy.errors import ClientGone
from areal_agents.proxy.values import refuse_many_values

T = TypeVar("T")

_JSON = "application/json"
_LARGE_BYTES = 65_536  # a body from here on is read in a thread
_HUGE_BYTES = 2**20  # after a body from here on, freed memory is given back
_GIVE_BACK_AFTER_S = 1.0


class Bodies:
    """Reads the bodies of one app, one large body at a time."""

    def __init__(self, *, max_bytes: int, max_values: int) -> None:
        self.max_bytes = max_bytes
        self._max_values = max_values
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bodies")
        self._giving_back: asyncio.TimerHandle | None = None
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone

    def close(self) -> None:
        """Stop the thread."""
        if self._giving_back is not None:
            self._giving_back.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def object(self, request: Request, max_bytes: int | None = None) -> dict[str, Any]:
        """The JSON object in the body of a request; {} for an empty body.

        Args:
            max_bytes: a limit other than the app's.

        Raises:
            RequestError: 413 for a body that is too large or has too many values, 415 for one that is
                compressed or that its Content-Type calls something else than JSON, 400 for one that is no
                JSON object.
            ClientGone: the client hangs up meanwhile.
        """
        body = await _received(request, self.max_bytes if max_bytes is None else max_bytes)
        request.state.body_bytes = len(body)
        if not body:
            return {}
        data = await self.off_loop(request, lambda: self._parse(body))
        if not isinstance(data, dict):
            raise RequestError(f"the body must be a JSON object, got {_json_type(data)}", code="invalid_json")
        return data

    async def off_loop(self, request: Request, work: Callable[[], T]) -> T:
        """Do what takes as long as a request's body is large: here if it is small, else in the thread."""
        if getattr(request.state, "body_bytes", 0) < _LARGE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def done_with(self, request: Request) -> None:
        """Give the memory back that a huge body and what was made of it took, soon after it is freed."""
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
        gc.collect(1)  # what a refused request left in the cycles of its exception
        self._trim(0)

    def _parse(self, body: bytearray) -> Any:
        refuse_many_values(body, self._max_values)
        try:
            return orjson.loads(body)
        except orjson.JSONDecodeError as error:
            _refuse_constant(error.doc, error.pos)
            raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None


async def _received(request: Request, max_bytes: int) -> bytearray:
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
    body = bytearray()  # which grows without being copied as a whole
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_bytes:
                raise _too_large(max_bytes)
    except ClientDisconnect:
        raise ClientGone from None
    return body


def refuse_depth(body: dict[str, Any]) -> None:
    """RequestError 400 for JSON that is nested more deeply than it can be written again."""
    try:
        orjson.dumps(body)
    except orjson.JSONEncodeError:
        raise RequestError("the request is nested too deeply", code="invalid_json") from None


def _refuse_constant(text: str, at: int) -> None:
    """Python clients write NaN and Infinity, which no JSON has: say so, instead of "unexpected character"."""
    for name in ("NaN", "Infinity"):
        if text.startswith(name, at):
            _not_finite("-" + name if text[at - 1 : at] == "-" else name)


def _not_finite(name: str) -> NoReturn:
    raise RequestError(f"numbers must be finite, got {name}", code="not_finite") from None


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(
        f"the body is larger than {max_bytes / 2**20:g} MiB; max_body_mb limits model calls",
        status=413,
        code="request_too_large",
    )


def _json_type(value: Any) -> str:
    return {list: "an array", str: "a string", type(None): "null", bool: "a boolean"}.get(
        type(value), "a number"
    )
