"""uvicorn's WebSocket protocol with limits on oversized messages and on clients that do not read.

A connection arrives here from `LimitedProtocol`, which limits the head of the request that opens it. uvicorn
limits the size of a message. A client that exceeds this limit can read the close frame, which names it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from areal_agents.proxy import http_limits

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent


class LimitedWebSocket(WebSocketsSansIOProtocol):
    """The protocol of one connection. The arguments are those that uvicorn passes."""

    def __init__(self, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        quiet = logging.Logger(
            self.logger.name, logging.WARNING
        )  # below, uvicorn logs paths, which have keys
        quiet.parent = self.logger
        self.logger = quiet
        self._is_refused = False
        self._discarded = 0
        self._writing_timer: asyncio.TimerHandle | None = None
        self._unread = 0  # bytes that the client had not read at the latest check

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer of a closed connection."""
        self._stop_writing_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received data; after a refusal, drop it for a while, so that the client reads the refusal."""
        if not self._is_refused:
            super().data_received(data)
            return
        self._discarded += len(data)
        if self._discarded > http_limits.DISCARDED_BYTES:
            self.transport.abort()

    async def send(self, message: ASGISendEvent) -> None:
        """Send a message of the app. A complete response in place of a WebSocket ends the handshake."""
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            self.handshake_complete = True  # uvicorn would log an error that there was none

    def handle_parser_exception(self) -> None:
        """Send the close frame for a message that is too large or malformed."""
        self._is_refused = True
        close = self.conn.close_sent
        assert close is not None
        self.queue.put_nowait({"type": "websocket.disconnect", "code": close.code, "reason": close.reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.close_timer = self.loop.call_later(http_limits.LINGER_S, self.transport.abort)

    def pause_writing(self) -> None:
        """Start checking a client that reads more slowly than the events are produced."""
        super().pause_writing()
        self._unread = self.transport.get_write_buffer_size()
        self._writing_timer = self.loop.call_later(http_limits.UNREAD_S, self._check_reader)

    def resume_writing(self) -> None:
        """Stop checking a client that has read most of the events."""
        super().resume_writing()
        self._stop_writing_timer()

    def _check_reader(self) -> None:
        unread = self.transport.get_write_buffer_size()
        if unread >= self._unread:
            self.transport.abort()
            return
        self._unread = unread
        self._writing_timer = self.loop.call_later(http_limits.UNREAD_S, self._check_reader)

    def _stop_writing_timer(self) -> None:
        if self._writing_timer is not None:
            self._writing_timer.cancel()
            self._writing_timer = None
