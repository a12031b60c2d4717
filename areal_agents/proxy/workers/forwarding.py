"""Forwards a request to the worker that has its episode.

The owner's response is passed on byte for byte as it arrives, and if the client disconnects here, the request
to the owner is cancelled. A request is forwarded at most once: a worker that receives a request which belongs
to yet another worker says so, and the sender looks up the owner again.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from typing import Any

import aiohttp
import yarl
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from areal_agents.proxy.errors import episode_elsewhere, error_response
from areal_agents.proxy.workers.identity import Workers
from areal_agents.proxy.workers.placement import WorkerLookup

_logger = logging.getLogger(__name__)

_HOP = "x-areal-agents-hop"  # in a request: the run's secret; in a response: `_MOVED`
_ADDRESS = "x-areal-agents-address"  # in a request: "HOST PORT" that the client connected to
_MOVED = "moved"  # the sender should look up the owner again
_CONNECT_S = 5.0
_RETRY_COUNT = b"x-stainless-retry-count"
_GIVE_UP_S = 15.0  # a killed worker serves again much sooner
_RETRY_S = 0.05
_LOOK_S = 0.5  # how often a waiting sender checks that the owner is alive
_OUR_OWN = frozenset(
    (b"host", b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"expect")
)
_ADDED = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")  # by aiohttp, unless told not to


class WorkerRouting:
    """An ASGI app of a worker that serves a request with `app`, or forwards it to its worker.

    Args:
        app: serves the requests that belong to this worker.
        workers: this worker and its siblings.
        placement: finds the worker of each request.
        max_body_bytes: limit of a request's body; a larger request goes to `app`, which refuses it.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        workers: Workers,
        placement: WorkerLookup,
        max_body_bytes: int,
    ) -> None:
        self._app = app
        self._workers = workers
        self._placement = placement
        self._max_body_bytes = max_body_bytes
        self._siblings = Siblings(workers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            try:
                await self._app(scope, receive, send)
            finally:
                await self._siblings.aclose()
        elif scope["type"] != "http" or scope["method"] == "HEAD" or self._placement.is_here(scope["path"]):
            await self._app(scope, receive, send)
        else:
            request, body = Request(scope), ReplayableBody(receive, self._max_body_bytes)
            try:
                answer = await self._answer(request, body, send)
            except Exception as error:
                answer = error_response(request, error)
            if answer is not None:
                await answer(scope, body.receive, send)

    async def _answer(self, request: Request, body: ReplayableBody, send: Send) -> ASGIApp | None:
        """The app that answers a request; None if a sibling has answered it."""
        forwarded = self._is_forwarded(request)
        if forwarded and (address := request.headers.get(_ADDRESS)):
            host, _, port = address.partition(" ")
            request.scope["server"] = (host, int(port))  # base_urls name what the client can reach
        give_up_at = time.monotonic() + _GIVE_UP_S
        while True:
            index = await self._placement.place(request, body.read, forwarded=forwarded)
            if index == self._workers.index or await body.read() is None:
                return self._app
            if forwarded:
                return Response(status_code=421, headers={_HOP: _MOVED})
            if self._workers.is_up(index):
                if await self._siblings.forward(index, request, body, send):
                    return None
                _mark_as_retry(request)
            if request.scope["path"] == "/episodes":  # it may already be open
                raise episode_elsewhere("the worker that was to open the episode has ended")
            if time.monotonic() > give_up_at:
                raise episode_elsewhere(f"worker {index}, which has the episode, does not answer")
            await asyncio.sleep(_RETRY_S)

    def _is_forwarded(self, request: Request) -> bool:
        return hmac.compare_digest(request.headers.get(_HOP, "").encode(), self._workers.secret.encode())


def _mark_as_retry(request: Request) -> None:
    """Mark a request as a retry: what a dead worker recorded for it must not be sampled twice."""
    headers = [(name, value) for name, value in request.scope["headers"] if name != _RETRY_COUNT]
    given = request.headers.get(_RETRY_COUNT.decode(), "")
    headers.append((_RETRY_COUNT, given.encode() if given.isdecimal() and int(given) else b"1"))
    request.scope["headers"] = headers


class ReplayableBody:
    """The body of a request, kept so that it can be forwarded, more than once, or served here."""

    def __init__(self, receive: Receive, max_bytes: int) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._messages: list[Message] = []
        self._replayed = 0
        self._whole: bytes | None = None

    async def read(self) -> bytes | None:
        """The whole body; None if it is too large, or if the client disconnected before its end."""
        if self._whole is None and not self._messages:
            self._whole = await self._read()
        return self._whole

    async def _read(self) -> bytes | None:
        parts, size, more = [], 0, True
        while more:
            message = await self._receive()
            self._messages.append(message)
            if message["type"] != "http.request":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_bytes:
                return None
            more = message.get("more_body", False)
        return b"".join(parts)

    async def receive(self) -> Message:
        """ASGI's `receive`: the kept messages first, and then new ones."""
        if self._replayed < len(self._messages):
            self._replayed += 1
            return self._messages[self._replayed - 1]
        return await self._receive()

    async def hang_up(self) -> None:
        """Wait until the client has closed the connection. The body must have been read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


class Siblings:
    """The connections to the other workers."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._session: aiohttp.ClientSession | None = None

    async def aclose(self) -> None:
        """Close them."""
        if self._session is not None:
            await self._session.close()

    async def forward(self, index: int, request: Request, body: ReplayableBody, send: Send) -> bool:
        """Forward a request to a sibling.

        Returns False if no byte of a response came, so that the sender should look up the owner again.
        """
        gone = asyncio.ensure_future(body.hang_up())
        asking = asyncio.ensure_future(self._ask(index, request, await body.read() or b""))
        try:
            if not await self._answered(index, asking, gone):
                return gone.done()
            answer = asking.result()
            try:
                return await self._pass_on(answer, gone, send)
            finally:
                answer.close() if gone.done() else answer.release()
        except (aiohttp.ClientError, TimeoutError) as error:
            _logger.info("worker %d did not answer: %s", index, str(error) or type(error).__name__)
            return False
        finally:
            await _end(asking, gone)

    async def _answered(
        self, index: int, asking: asyncio.Future[aiohttp.ClientResponse], gone: asyncio.Future[None]
    ) -> bool:
        """Wait for the head of the response; False if the client or the sibling has gone before it came.

        There is no timeout here: the sibling limits everything that it waits for.
        """
        while not asking.done() and not gone.done():
            await asyncio.wait((asking, gone), timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done() and not self._workers.is_up(index):
                return False  # the supervisor keeps its socket open, so the connection stays open too
        return asking.done()

    async def _ask(self, index: int, request: Request, body: bytes) -> aiohttp.ClientResponse:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
                auto_decompress=False,
            )
        scope = request.scope
        path = scope.get("raw_path") or scope["path"].encode()
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name not in _OUR_OWN and name not in (_HOP.encode(), _ADDRESS.encode())
        ]
        host, port = scope["server"]
        headers += [("Host", request.headers.get("host", "")), (_HOP, self._workers.secret)]
        headers.append((_ADDRESS, f"{host} {port}"))
        return await self._session.request(
            request.method,
            yarl.URL(self._workers.url(index) + (path + query).decode("latin-1"), encoded=True),
            data=body or None,
            headers=headers,
            allow_redirects=False,
            skip_auto_headers=_ADDED,
        )

    async def _pass_on(self, answer: aiohttp.ClientResponse, gone: asyncio.Future[None], send: Send) -> bool:
        if answer.headers.get(_HOP) == _MOVED:
            return False
        headers = [(name.lower(), value) for name, value in answer.raw_headers]
        start = {
            "type": "http.response.start",
            "status": answer.status,
            "headers": [
                (name, value) for name, value in headers if name == b"content-length" or name not in _OUR_OWN
            ],
        }
        if answer.content_length is not None:
            content = await answer.read()
            await send(start)
            await send({"type": "http.response.body", "body": content})
            return True
        streaming = asyncio.ensure_future(_stream(answer, start, send))
        try:
            await asyncio.wait((streaming, gone), return_when=asyncio.FIRST_COMPLETED)
            if streaming.done():
                streaming.result()
        finally:
            await _end(streaming)
        return True


async def _stream(answer: aiohttp.ClientResponse, start: Message, send: Send) -> None:
    """Pass a body on as it arrives. If it breaks off, it stays unfinished, so that the client notices."""
    await send(start)
    try:
        async for part in answer.content.iter_any():
            await send({"type": "http.response.body", "body": part, "more_body": True})
    except aiohttp.ClientError as error:
        _logger.warning("an answer of another worker broke off: %s", str(error) or type(error).__name__)
        return
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _end(*futures: asyncio.Future[Any]) -> None:
    for future in futures:
        future.cancel()
    await asyncio.wait(futures)
    for future in futures:
        if not future.cancelled():
            future.exception()  # mark it as retrieved, or asyncio would log it
