"""Sends an answer as a stream: pieces as they are sampled, and keep-alives in between.

A stream ends only after its turns are recorded, so an answer that a client has received completely is in the
store.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from areal_agents.proxy.calls.request import CompletedTurn, ModelRequest
from areal_agents.proxy.calls.shared_reply import SharedReply, pieces_of
from areal_agents.proxy.dialects.base import Dialect, StreamWriter
from areal_agents.proxy.dialects.writing import EVENT_STREAM
from areal_agents.proxy.errors import as_request_error
from areal_agents.rendering import Delta

_LONGEST_SEND_S = 300.0
_MOST_TOKENS_INLINE = 300  # at about 2 µs each
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class EventStream(Response):
    """A response that sends the parts of `body` as they are produced, and always closes `body` at the end."""

    def __init__(self, body: AsyncGenerator[bytes, None], media_type: str = EVENT_STREAM) -> None:
        self.media_type = media_type
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with contextlib.aclosing(self._body):
            async for part in self._body:
                async with asyncio.timeout(_LONGEST_SEND_S):  # ends the response if the client stops reading
                    await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def lists_many_tokens(request: ModelRequest, done: Sequence[CompletedTurn]) -> bool:
    """Whether an answer has so many logprobs that it must be serialised outside the event loop."""
    if not request.logprobs:
        return False
    listed = sum(len(item.turn.completion) for item in done) * (1 + request.wish.top_logprobs)
    return listed > _MOST_TOKENS_INLINE


async def events_of(
    call: SharedReply,
    request: ModelRequest,
    writer: StreamWriter,
    dialect: Dialect,
    gone: asyncio.Future[None],
    keepalive_s: float,
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a call from its first piece to its end, or until `gone` is done."""
    seen = 0
    yield writer.start()
    while not gone.done():
        if not await call.wait_for_progress(seen, gone, keepalive_s):
            yield dialect.keepalive
            continue
        ended = call.task.done()
        pieces, seen = call.deltas[seen:], len(call.deltas)
        if pieces:
            yield b"".join(_written(writer, choice, delta) for choice, delta in pieces)
        if ended:
            if call.failure is None and lists_many_tokens(request, call.task.result()):
                yield await asyncio.to_thread(_ending, call, writer)
            else:
                yield _ending(call, writer)
            return


def _written(writer: StreamWriter, choice: int, delta: Delta) -> bytes:
    if delta.call is not None:
        return writer.call(choice, delta.call)
    write = writer.reasoning if delta.kind == "reasoning" else writer.content
    return write(choice, delta.text)


def _ending(call: SharedReply, writer: StreamWriter) -> bytes:
    if call.failure is not None:
        return writer.error(as_request_error(call.failure))
    done = call.task.result()
    parts = [writer.finish(done)]
    if not call.deltas:  # this client joined a call that is not streamed
        replies = enumerate(item.turn.reply for item in done)
        parts[:0] = [
            _written(writer, choice, piece) for choice, reply in replies for piece in pieces_of(reply)
        ]
    return b"".join(parts)
