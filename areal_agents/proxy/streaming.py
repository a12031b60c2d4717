"""An answer as server-sent events: pieces as they are drawn, a sign of life while there are none.

The stream ends only after its turns are recorded, so what a client has seen whole is in the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from areal_agents.proxy.calls import Call, pieces_of
from areal_agents.proxy.dialects.base import Dialect, StreamWriter
from areal_agents.proxy.errors import as_request_error
from areal_agents.rendering import Delta

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class EventStream(Response):
    """A response whose body is made while it is sent. It ends what `body` holds, however it ends itself."""

    media_type = "text/event-stream"

    def __init__(self, body: AsyncIterator[bytes]) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for part in self._body:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def events_of(
    call: Call, writer: StreamWriter, dialect: Dialect, gone: asyncio.Future[None], keepalive_s: float
) -> AsyncIterator[bytes]:
    """The events of a call, from its first piece to its end, or until the client has `gone`."""
    seen = 0
    yield writer.start()
    while not gone.done():
        if not await call.news(seen, gone, keepalive_s):
            yield dialect.keepalive
            continue
        ended = call.task.done()
        pieces, seen = call.deltas[seen:], len(call.deltas)
        if pieces:
            yield b"".join(_written(writer, choice, delta) for choice, delta in pieces)
        if ended:
            yield _ending(call, writer)
            return


def _written(writer: StreamWriter, choice: int, delta: Delta) -> bytes:
    if delta.call is not None:
        return writer.call(choice, delta.call)
    write = writer.reasoning if delta.kind == "reasoning" else writer.content
    return write(choice, delta.text)


def _ending(call: Call, writer: StreamWriter) -> bytes:
    if call.task.cancelled():
        raise asyncio.CancelledError
    error = call.task.exception()
    if error is None:
        done = call.task.result()
        parts = [writer.finish(done)]
        if not call.deltas:  # drawn for a client that did not stream, and joined by this one
            parts[:0] = [
                _written(writer, i, p) for i, item in enumerate(done) for p in pieces_of(item.turn.reply)
            ]
        return b"".join(parts)
    if not isinstance(error, Exception):
        raise error
    return writer.error(as_request_error(error))
