"""uvicorn's HTTP protocol with limits on slow and oversized requests, which apply before any key is checked.

The head of a request is limited in size and in time, its body has a minimum speed, and a client may leave a
response unread only for a limited time. A client that violates a limit gets an error response if one can
still be sent, and its connection is closed.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from areal_agents.errors import RequestError
from areal_agents.proxy.errors import error_body

MAX_HEAD_BYTES = 64 * 2**10
HEAD_S = 60.0  # from the connection's opening, or from the first byte of a request, to the end of its head
BODY_GRACE_S = 30.0  # after the head, during which a body may be slower than LEAST_BYTES_PER_S
LEAST_BYTES_PER_S = 16 * 2**10
UNREAD_S = 120.0  # longest time for which a client may read nothing of a response
DISCARDED_BYTES = 64 * 2**20  # most bytes that are read and dropped after a refusal
LINGER_S = 5.0  # for which a refused client may continue sending, so that it reads the refusal
_CHECK_S = 5.0  # interval between checks of the speed of a body
_MOST_FRAMING = 9  # most bytes received per byte of a body
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"  # sent before a response if the client waits for it
_CONTENT_LENGTH = b"\r\ncontent-length: "  # as uvicorn writes it


class LimitedProtocol(HttpToolsProtocol):
    """The protocol of one connection. The arguments are those that uvicorn passes.

    Attributes:
        is_in_head: whether the head of a request has begun and is not complete.
    """

    def __init__(self, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self.is_in_head = False
        self._is_in_body = False
        self._requests_read = 0  # complete requests in the latest data
        self._head_bytes = 0
        self._data_bytes = 0  # size of the latest data
        self._frame_bytes = 0  # size of a body with its chunk framing
        self._body_bytes = 0
        self._body_began = 0.0
        self._discarded = 0
        self._is_refused = False
        self._reading_timer: asyncio.TimerHandle | None = None
        self._writing_timer: asyncio.TimerHandle | None = None
        self._unread = 0  # bytes of responses that the client had not read at the latest check

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit of the first request on a new connection."""
        super().connection_made(transport)
        self._reading_timer = self.loop.call_later(HEAD_S, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers of a closed connection."""
        self._set_reading_timer(None)
        if self._writing_timer is not None:
            self._writing_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received data, and check the size of the head."""
        if self._is_refused:
            self._discard(len(data))
            return
        self._requests_read = 0
        self._data_bytes = len(data)
        if self.is_in_head:
            self._head_bytes += len(data)
        else:
            self._frame_bytes += len(data)
        super().data_received(data)
        if self._is_refused:
            return
        if self.is_in_head:
            if not self._head_bytes and not self._requests_read:
                self._head_bytes = len(data)  # the head began with these bytes
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse_head()
        elif self._is_in_body and self._frame_bytes > MAX_HEAD_BYTES + _MOST_FRAMING * self._body_bytes:
            message = "the body of the request is mostly chunk extensions or trailers"
            self._refuse(RequestError(message, code="invalid_http"))

    def on_message_begin(self) -> None:
        """Start the time limit of a request's head, at its first byte."""
        self.is_in_head = True
        self._head_bytes = 0
        self._set_reading_timer(self.loop.call_later(HEAD_S, self._head_is_late))
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header of the head; drop a trailer after a chunked body."""
        if self.is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Check the size of a complete head, and start the checks of the body's speed."""
        self.is_in_head = False
        if self._head_bytes + self._data_bytes > MAX_HEAD_BYTES:  # may include bytes of the body
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > MAX_HEAD_BYTES:
                self._refuse_head()
                return
        self._is_in_body = True
        self._frame_bytes = self._body_bytes = self._discarded = 0
        self._body_began = time.monotonic()
        self._set_reading_timer(self.loop.call_later(BODY_GRACE_S, self._check_speed))
        earlier = self.cycle
        super().on_headers_complete()
        if self.cycle is not earlier and self.cycle.scope["method"] != "HEAD":  # its response has no body
            self.cycle.transport = _HeadWithBody(self.transport)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        """Count a part of a request's body; drop it if the response is complete."""
        if self._is_refused:
            return
        self._body_bytes += len(body)
        if self.cycle.response_complete:
            self._discard(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Stop the time limits of a request at its last byte."""
        if self._is_refused:
            return
        self._is_in_body = False
        self._requests_read += 1
        self._set_reading_timer(None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Limit the time to read and drop the rest of a request that has its response."""
        super().on_response_complete()
        if self._is_in_body and self.cycle.response_complete and not self.transport.is_closing():
            self._set_reading_timer(self.loop.call_later(LINGER_S, self.transport.abort))

    def handle_websocket_upgrade(self) -> None:
        """Pass the connection to the WebSocket protocol, without the limits of HTTP requests."""
        if self._is_refused:
            return
        if self.cycle is not None and not self.cycle.response_complete:
            message = "a WebSocket was requested before the response to the earlier request was complete"
            self._refuse(RequestError(message, code="invalid_http"))
            return
        self._is_in_body = False
        self._set_reading_timer(None)
        if self._writing_timer is not None:
            self._writing_timer.cancel()
        super().handle_websocket_upgrade()

    def _should_upgrade(self) -> bool:
        # Other methods never open a WebSocket; such a request is answered like one without the header.
        return self.scope["method"] == "GET" and super()._should_upgrade()

    def send_400_response(self, msg: str) -> None:
        """Refuse malformed HTTP with an error in the form of the client's API."""
        self._refuse(RequestError(msg, code="invalid_http"))

    def pause_writing(self) -> None:
        """Start checking a client that reads more slowly than the response is produced."""
        super().pause_writing()
        self._unread = self.transport.get_write_buffer_size()
        self._writing_timer = self.loop.call_later(UNREAD_S, self._check_reader)

    def resume_writing(self) -> None:
        """Stop checking a client that has read most of the response."""
        super().resume_writing()
        if self._writing_timer is not None:
            self._writing_timer.cancel()
            self._writing_timer = None

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection without a further request, unless the client is still reading a response."""
        unread = self.transport.get_write_buffer_size()
        if not unread:
            super().timeout_keep_alive_handler()
        elif self._writing_timer is None and unread == self._unread:
            self.transport.abort()
        else:
            if self._writing_timer is None:
                self._unread = unread
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _discard(self, size: int) -> None:
        self._discarded += size
        if self._discarded > DISCARDED_BYTES:
            self.transport.abort()

    def _check_reader(self) -> None:
        unread = self.transport.get_write_buffer_size()
        if unread >= self._unread:
            self.transport.abort()
            return
        self._unread = unread
        self._writing_timer = self.loop.call_later(UNREAD_S, self._check_reader)

    def _head_is_late(self) -> None:
        if self.flow.read_paused:  # the server is not reading, so the client is not late
            self._set_reading_timer(self.loop.call_later(HEAD_S, self._head_is_late))
        elif self.is_in_head:
            message = f"the head of the request was not complete within {HEAD_S:g} s"
            self._refuse(RequestError(message, status=408, code="request_timeout"))
        else:
            self.transport.close()

    def _check_speed(self) -> None:
        self._reading_timer = self.loop.call_later(_CHECK_S, self._check_speed)
        if self.flow.read_paused:  # the server is not reading, so the client is not slow
            self._body_began += _CHECK_S
            return
        seconds = time.monotonic() - self._body_began - BODY_GRACE_S
        if seconds * LEAST_BYTES_PER_S > self._body_bytes and not self.cycle.response_started:
            message = f"the body of the request arrived at less than {LEAST_BYTES_PER_S // 2**10} KiB/s"
            self._refuse(RequestError(message, status=408, code="request_timeout"))

    def _end_body(self) -> None:
        """Report to the reader of the body that the client has disconnected."""
        self.cycle.disconnected = True
        self.cycle.message_event.set()

    def _refuse_head(self) -> None:
        message = f"the head of the request is larger than {MAX_HEAD_BYTES // 2**10} KiB"
        self._refuse(RequestError(message, status=431, code="request_head_too_large"))

    def _refuse(self, refusal: RequestError) -> None:
        """Send the refusal, drop what the client still sends for a while so that it reads it, and close."""
        self._is_refused = True
        if self.transport.is_closing():
            return
        if self._is_in_body:
            if self.pipeline or self.cycle.response_started:
                # The client would read the refusal as part of another response, or as the next one.
                self.transport.abort()
                return
            self._end_body()
        elif self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False  # close after the response to the earlier request
            self._set_reading_timer(None)
            return
        path = getattr(self, "url", b"").partition(b"?")[0].decode("ascii", "replace")
        body, headers = error_body(path, refusal)
        lines = [STATUS_LINE[refusal.status], b"connection: close\r\n"]
        for name, value in {**headers, "content-length": str(len(body))}.items():
            lines.append(f"{name}: {value}\r\n".encode())
        self.transport.write(b"".join([*lines, b"\r\n", body]))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._set_reading_timer(self.loop.call_later(LINGER_S, self.transport.abort))

    def _set_reading_timer(self, timer: asyncio.TimerHandle | None) -> None:
        if self._reading_timer is not None:
            self._reading_timer.cancel()
        self._reading_timer = timer


class _HeadWithBody:
    """The transport of one response, which sends a head with a Content-Length and its body in one write.

    uvicorn writes them separately, and with uvloop each write is a system call that wakes the client. The
    head of a stream is sent at once.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._has_begun = False
        self._head = b""  # not sent yet

    def write(self, data: bytes) -> None:
        """Send the next part of the response."""
        if not self._has_begun and data != _CONTINUE:
            self._has_begun = True
            if _CONTENT_LENGTH in data:
                self._head = data
                return
        self._transport.writelines((self._head, data) if self._head else (data,))
        self._head = b""

    def close(self) -> None:
        """Close the connection; a head without a body is sent before."""
        if self._head:
            self._transport.write(self._head)
        self._transport.close()

    def is_closing(self) -> bool:
        """Whether the connection is closed or being closed."""
        return self._transport.is_closing()
