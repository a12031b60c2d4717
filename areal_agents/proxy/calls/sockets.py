"""Serves the Responses API on WebSockets: a `response.create` event is a streamed POST /v1/responses.

The events of a connection are answered in their order, each by the same code as an HTTP request, so turns,
retries, limits and errors are the same. A client that closes the connection leaves the running response as
one that closes an HTTP stream does, and events that wait are not answered.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from areal_agents.errors import RequestError, shown
from areal_agents.proxy.auth import Caller
from areal_agents.proxy.bodies import Bodies
from areal_agents.proxy.dialects.reading import flag
from areal_agents.proxy.dialects.responses.warm_ups import WarmUps
from areal_agents.proxy.dialects.writing import EVENT_STREAM
from areal_agents.proxy.errors import error_response
from areal_agents.proxy.paths import split_path

IDLE_S = 3600.0  # longest time between the end of a response and the next complete event
MOST_WAITING = 64  # events that may wait while a response runs; together they may be as large as one body
_TOO_MANY, _GOING_AWAY = 1008, 1001  # status codes of RFC 6455

# Headers of the request that opens a connection, which do not describe the calls on it.
_OPENING_HEADERS = frozenset(
    (b"connection", b"upgrade", b"content-length", b"content-type", b"content-encoding",
     b"idempotency-key", b"x-stainless-retry-count")
)  # fmt: skip

Read = Callable[[Request, Caller], Awaitable[dict[str, Any]]]
Answer = Callable[[Request, Read], Awaitable[Response]]


class ResponsesSockets:
    """ASGI app that serves the WebSockets of /v1/responses.

    Args:
        check_caller: raises RequestError unless the caller may use the model.
        answer: returns the response to a call, whose fields the given function reads.
        bodies: parses events, with the limits of request bodies.
    """

    def __init__(
        self, *, check_caller: Callable[[Request], Awaitable[None]], answer: Answer, bodies: Bodies
    ) -> None:
        self._check_caller = check_caller
        self._answer = answer
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = _Connection(scope, receive, send, max_bytes=self._bodies.max_bytes)
        request = connection.request()
        try:
            if split_path(scope["path"])[1] != "/v1/responses":
                raise HTTPException(404)
            await self._check_caller(request)
        except Exception as error:
            await error_response(request, error)(scope, receive, send)
            return
        await connection.serve(self._answer_event)

    async def _answer_event(self, event: _ClientEvent, connection: _Connection) -> None:
        request, sender = connection.request(), _EventSender(connection, event)
        found: list[dict[str, Any] | Exception] = []
        try:
            fields = await event.fields(request, self._bodies)
            if not _generates(fields):
                await self._check_caller(request)
                for warm_up_event in connection.warm_ups.add(fields, event.size):
                    await sender.send(warm_up_event)
                self._bodies.done_with(request)
                return
            found.append(connection.warm_ups.expanded(fields))
            del fields
        except Exception as error:  # answered and counted as that of any other call
            found.append(error)

        async def read(request: Request, caller: Caller) -> dict[str, Any]:
            given = found.pop()  # kept in no variable while the response waits, which may take long
            if isinstance(given, Exception):
                raise given
            return {**given, "stream": True}

        response = await self._answer(request, read)
        await response(request.scope, request.receive, sender)


class _Connection:
    """One open WebSocket. `warm_ups` are those of its client."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, max_bytes: int) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._max_bytes = max_bytes
        self.warm_ups = WarmUps(max_bytes)
        self._is_gone = asyncio.Event()
        self._waiting: asyncio.Queue[bytes | None] = asyncio.Queue()  # None: the connection is closed
        self._waiting_bytes = 0

    def request(self) -> Request:
        """Return a POST with the headers of the connection, whose client disconnects with it."""
        scope, (key, _) = self._scope, split_path(self._scope["path"])
        headers = [
            (name, value)
            for name, value in scope["headers"]
            if name not in _OPENING_HEADERS and not name.startswith(b"sec-websocket-")
        ]
        own = {
            "type": "http",
            "method": "POST",
            "scheme": "https" if scope["scheme"] == "wss" else "http",
            "headers": headers,
            "path_params": {} if key is None else {"key": key},
            "state": {},
        }
        return Request({**scope, **own}, self._disconnect)

    async def serve(self, answer: Callable[[_ClientEvent, _Connection], Awaitable[None]]) -> None:
        """Accept the connection, and answer its events one after the other until it is closed."""
        await self._receive()  # websocket.connect
        await self._send({"type": "websocket.accept"})
        reading = asyncio.ensure_future(self._read())
        try:
            while (event := await self._next()) is not None:
                await answer(event, self)
        finally:
            reading.cancel()

    async def send(self, event: bytes) -> None:
        """Send one event; it is dropped if the client is gone, as uvicorn does with HTTP."""
        if self._is_gone.is_set():
            return
        try:
            await self._send({"type": "websocket.send", "text": event.decode()})
        except OSError:  # the connection was lost, which `_read` has yet to be told
            self._is_gone.set()

    async def _next(self) -> _ClientEvent | None:
        """Return the next event, None if the connection is closed."""
        try:
            async with asyncio.timeout(IDLE_S):
                data = await self._waiting.get()
        except TimeoutError:
            await self._close(_GOING_AWAY, f"no event arrived for {IDLE_S:g} s")
            return None
        if data is None or self._is_gone.is_set():
            return None
        self._waiting_bytes -= len(data)
        return _ClientEvent(data)

    async def _read(self) -> None:
        """Receive events until the connection is closed, also while a response runs."""
        try:
            while (message := await self._receive())["type"] == "websocket.receive":
                data = message.get("bytes") or (message.get("text") or "").encode()
                if self._waiting_bytes + len(data) > self._max_bytes or self._waiting.qsize() >= MOST_WAITING:
                    await self._close(_TOO_MANY, "too many events wait; send one when a response has ended")
                    return
                self._waiting_bytes += len(data)
                self._waiting.put_nowait(data)
        finally:
            self._is_gone.set()
            self._waiting.put_nowait(None)

    async def _close(self, code: int, reason: str) -> None:
        if not self._is_gone.is_set():
            self._is_gone.set()
            with contextlib.suppress(OSError):  # the connection was lost meanwhile
                await self._send({"type": "websocket.close", "code": code, "reason": reason})

    async def _disconnect(self) -> Message:
        await self._is_gone.wait()
        return {"type": "http.disconnect"}


class _ClientEvent:
    """An event that a client has sent.

    Attributes:
        size: its bytes.
        stream_id: the lane that the client has named, which the events of the response repeat, or None.
        steer: the input of a `response.steer` event, or None.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)
        self.stream_id: str | None = None
        self.steer: dict[str, Any] | None = None

    async def fields(self, request: Request, bodies: Bodies) -> dict[str, Any]:
        """Return the fields of a POST /v1/responses. Raise RequestError unless it is a `response.create`."""
        data, self._data = self._data, b""  # not kept, because a response may wait for a long time
        fields = await bodies.parsed(request, data)
        kind, stream_id = fields.pop("type", None), fields.pop("stream_id", None)
        if stream_id is not None and not isinstance(stream_id, str):
            raise RequestError(
                f"stream_id must be a string, got {shown(stream_id)}", code="invalid_value", param="stream_id"
            )
        self.stream_id = stream_id
        if kind == "response.steer":
            self.steer = {name: fields.get(name) for name in ("input", "previous_response_id")}
            raise RequestError(
                "a running response cannot be steered; send the input with the next response.create",
                code="steering_not_supported",
            )
        if kind != "response.create":
            raise RequestError(
                f"the type of an event must be response.create, got {shown(kind)}",
                code="invalid_value",
                param="type",
            )
        return fields


def _generates(fields: dict[str, Any]) -> bool:
    """Remove the field `generate` and return its value, True if it is absent. Raises RequestError."""
    generates = fields.get("generate") is None or flag(fields, "generate")
    fields.pop("generate", None)
    return generates


class _EventSender:
    """The `send` of an HTTP response that is sent as events: those of a stream, or one `error`."""

    def __init__(self, connection: _Connection, event: _ClientEvent) -> None:
        self._connection = connection
        self._event = event
        self._status = 0
        self._headers: dict[str, str] = {}
        self._received = b""  # not sent yet

    async def __call__(self, message: Message) -> None:
        """Send what is complete in the next part of the response."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = {name.decode(): value.decode("latin-1") for name, value in message["headers"]}
            return
        self._received += message.get("body", b"")
        if self._headers.get("content-type", "").startswith(EVENT_STREAM):
            *events, self._received = self._received.replace(b"\r\n", b"\n").split(b"\n\n")
            for event in events:
                if (data := _data_of(event)) not in (b"", b"[DONE]"):
                    await self.send(data)
        elif not message.get("more_body", False):
            await self.send(orjson.dumps(self._failure()))

    async def send(self, data: bytes) -> None:
        """Send one event, given as JSON."""
        if self._event.stream_id is not None:
            data = orjson.dumps({**orjson.loads(data), "stream_id": self._event.stream_id})
        await self._connection.send(data)

    def _failure(self) -> dict[str, Any]:
        """Return the event for a response that is not a stream."""
        error = _error_in(self._received)
        if self._event.steer is not None and error["code"] == "steering_not_supported":
            return {
                "type": "response.steer.failed",
                "sequence_number": 0,
                "error": {name: error[name] for name in ("type", "code", "message")},
                "steer": self._event.steer,
            }
        told = {
            name: self._headers[name] for name in ("retry-after", "x-should-retry") if name in self._headers
        }
        return {"type": "error", "status": self._status, "error": error | ({"headers": told} if told else {})}


def _data_of(event: bytes) -> bytes:
    """Return the data of one server-sent event, b"" for a comment."""
    lines = (line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:"))
    return b"\n".join(lines)


def _error_in(body: bytes) -> dict[str, Any]:
    """Return the error in a response, which may come from a server of `models`."""
    try:
        error = orjson.loads(body)["error"]
        return {"type": "server_error", "code": None, "message": "", "param": None, **error}
    except (orjson.JSONDecodeError, KeyError, TypeError):
        message = (
            f"the server of this model did not stream its response: {shown(body.decode(errors='replace'))}"
        )
        return {"type": "server_error", "code": "engine_error", "message": message, "param": None}
