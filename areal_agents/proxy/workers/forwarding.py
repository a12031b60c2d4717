"""Forwards a request to the worker that has its episode.

The owner's response is passed on unchanged as it arrives, and if the client disconnects, the request to the
owner is cancelled. A forwarded request is not forwarded again: a worker that does not own its episode answers
421, and the sender looks up the owner again. GET /metrics is forwarded to every worker, and their answers are
added up. A request that claims to be forwarded without the secret of the run is refused.
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

from areal_agents.errors import RequestError
from areal_agents.proxy.bodies import wait_for_disconnect
from areal_agents.proxy.errors import episode_elsewhere, error_response
from areal_agents.proxy.metrics import CONTENT_TYPE, merged
from areal_agents.proxy.workers.peers import Peers
from areal_agents.proxy.workers.placement import WorkerLookup

_logger = logging.getLogger(__name__)

_HOP = "x-areal-agents-hop"  # in a request: the run's secret; in a response: `_MOVED`
_ADDRESS = "x-areal-agents-address"  # in a request: the "HOST PORT" that the client connected to
_HOP_HEADERS = frozenset((_HOP.encode(), _ADDRESS.encode()))
_MOVED = "moved"  # the sender should look up the owner again
_CONNECT_S = 5.0
_RETRY_COUNT = b"x-stainless-retry-count"
_GIVE_UP_S = 15.0  # a killed worker is restarted in much less time
_RETRY_S = 0.05
_METRICS_S = 5.0  # half of the time that Prometheus waits
_CHECK_S = 0.5  # interval at which a waiting sender checks that the owner is alive
_CONNECTION_HEADERS = frozenset(  # not forwarded, because they belong to one connection
    (b"host", b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"expect")
)
_NOT_ADDED = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")  # aiohttp's automatic headers


class WorkerRouting:
    """The ASGI app of a worker: serves a request with `app`, or forwards it to the worker it belongs to.

    Args:
        app: serves the requests that belong to this worker.
        peers: this worker and its siblings.
        placement: finds the worker of each request.
        max_body_bytes: largest body of a request; a larger one goes to `app`, which refuses it.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        peers: Peers,
        placement: WorkerLookup,
        max_body_bytes: int,
    ) -> None:
        self._app = app
        self._peers = peers
        self._placement = placement
        self._max_body_bytes = max_body_bytes
        self._siblings = Siblings(peers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            try:
                await self._app(scope, receive, send)
            finally:
                await self._siblings.aclose()
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            forwarded = self._take_hop(scope)
        except RequestError as error:
            await error_response(Request(scope), error)(scope, receive, send)
            return
        if scope["method"] == "HEAD" or self._placement.is_here(scope["path"]):
            await self._app(scope, receive, send)
            return
        request, body = Request(scope), ReplayableBody(receive, self._max_body_bytes)
        try:
            answer = await self._answer(request, body, send, forwarded=forwarded)
        except Exception as error:
            answer = error_response(request, error)
        if answer is not None:
            await answer(scope, body.receive, send)

    async def _answer(
        self, request: Request, body: ReplayableBody, send: Send, *, forwarded: bool
    ) -> ASGIApp | None:
        """Return the app that answers a request, None if a sibling has answered it."""
        if request.scope["path"] == "/metrics" and request.method == "GET" and not forwarded:
            return await self._metrics_of_all(request)
        give_up_at = time.monotonic() + _GIVE_UP_S
        while True:
            index = await self._placement.worker_for(request, body.read, forwarded=forwarded)
            if index == self._peers.index or await body.read() is None:
                return self._app
            if forwarded:
                return Response(status_code=421, headers={_HOP: _MOVED})
            if time.monotonic() > give_up_at:
                raise episode_elsewhere(
                    f"worker {index}, which has the episode, does not answer; try again later"
                )
            owner = self._peers.owner_of(index)
            if owner is not None and (url := self._peers.address(index)) is not None:
                if await self._siblings.forward(owner, url, request, body, send):
                    return None
                _mark_as_retry(request)
            if request.scope["path"] == "/episodes":  # the episode may already be open
                raise episode_elsewhere("the worker ended while it was opening the episode; try again")
            await self._peers.refresh()
            await asyncio.sleep(_RETRY_S)

    async def _metrics_of_all(self, request: Request) -> Response:
        """Answer with the metrics of all workers together, or as the first worker that refuses."""
        answers = await asyncio.gather(
            *(self._siblings.get(index, request) for index in self._peers.measured())
        )
        refused = [(status, body) for status, body in answers if status != 200]
        if refused:
            status, body = refused[0]
            return Response(body, status_code=status, media_type="application/json")
        return Response(merged([body for _, body in answers]), media_type=CONTENT_TYPE)

    def _take_hop(self, scope: Scope) -> bool:
        """Return whether a sibling sent the request, and remove from it what the sibling has added.

        Raises:
            RequestError: 403 if somebody else sent it, who claims to be a sibling.
        """
        own = {name: value for name, value in scope["headers"] if name in _HOP_HEADERS}
        if not own:
            return False
        if not hmac.compare_digest(own.get(_HOP.encode(), b""), self._peers.secret.encode()):
            raise RequestError(
                f"the header {_HOP} does not have the secret of this run; only its proxies send it",
                status=403,
                code="foreign_proxy",
            )
        scope["headers"] = [(name, value) for name, value in scope["headers"] if name not in _HOP_HEADERS]
        host, _, port = own[_ADDRESS.encode()].decode("latin-1").partition(" ")
        scope["server"] = (host, int(port))  # for the base_urls of new episodes
        return True


def _mark_as_retry(request: Request) -> None:
    """Mark a request as a retry, because a worker that died may have recorded a sample for it."""
    headers = [(name, value) for name, value in request.scope["headers"] if name != _RETRY_COUNT]
    count = request.headers.get(_RETRY_COUNT.decode(), "")
    is_retry = count.isdecimal() and len(count) < 10 and int(count) > 0  # as a worker reads it
    headers.append((_RETRY_COUNT, count.encode() if is_retry else b"1"))
    request.scope["headers"] = headers


class ReplayableBody:
    """The body of a request, kept so that it can be forwarded several times or served by this worker."""

    def __init__(self, receive: Receive, max_bytes: int) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._messages: list[Message] = []
        self._replayed = 0
        self._whole: bytes | None = None

    async def read(self) -> bytes | None:
        """Return the whole body, None if it is too large or if the client disconnected before its end."""
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
        """Return the next ASGI message: first the kept ones, then new ones."""
        if self._replayed < len(self._messages):
            self._replayed += 1
            return self._messages[self._replayed - 1]
        return await self._receive()

    async def wait_for_disconnect(self) -> None:
        """Wait until the client has closed the connection. The body must have been read."""
        await wait_for_disconnect(self._receive)


class Siblings:
    """Sends requests to the other workers."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._session: aiohttp.ClientSession | None = None

    async def aclose(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def get(self, index: int, request: Request) -> tuple[int, bytes]:
        """Return the status and the body with which a worker, which may be this one, answers a request
        without a body.

        Raises:
            RequestError: 503 if it does not answer in time.
        """
        try:
            if (url := self._peers.address(index)) is None:
                raise TimeoutError("it is not running")
            async with asyncio.timeout(_METRICS_S), await self._send(url, request, b"") as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RequestError(
                f"worker {index} does not answer, and without it the metrics would be too small "
                f"({str(error) or type(error).__name__}); try again later",
                status=503,
                code="worker_unavailable",
                retry_after_s=_METRICS_S,
            ) from error

    async def forward(self, owner: str, url: str, request: Request, body: ReplayableBody, send: Send) -> bool:
        """Forward a request to a sibling at `url`, and its response to the client.

        Args:
            owner: the owner name of the sibling's process.

        Returns:
            False if there was no response, so that the sender should look up the owner again.
        """
        gone = asyncio.ensure_future(body.wait_for_disconnect())
        pending = asyncio.ensure_future(self._send(url, request, await body.read() or b""))
        try:
            if not await self._has_answer(owner, pending, gone):
                return gone.done()
            answer = pending.result()
            try:
                return await self._pass_on(answer, gone, send)
            finally:
                answer.close() if gone.done() else answer.release()
        except (aiohttp.ClientError, TimeoutError) as error:
            _logger.info("worker %s did not answer: %s", owner, str(error) or type(error).__name__)
            return False
        finally:
            await _end(pending, gone)

    async def _has_answer(
        self,
        owner: str,
        pending: asyncio.Future[aiohttp.ClientResponse],
        gone: asyncio.Future[None],
    ) -> bool:
        """Wait for the head of the response; False if the client disconnects or the sibling ends first.

        There is no timeout, because the sibling limits everything that it waits for.
        """
        while not pending.done() and not gone.done():
            await asyncio.wait((pending, gone), timeout=_CHECK_S, return_when=asyncio.FIRST_COMPLETED)
            if not pending.done() and not self._peers.is_alive(owner):
                return False  # the connection may stay open: the supervisor has it, or a machine is lost
        return pending.done()

    async def _send(self, url: str, request: Request, body: bytes) -> aiohttp.ClientResponse:
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
            if name not in _CONNECTION_HEADERS
        ]
        host, port = scope["server"]
        headers += [("Host", request.headers.get("host", "")), (_HOP, self._peers.secret)]
        headers.append((_ADDRESS, f"{host} {port}"))
        return await self._session.request(
            request.method,
            yarl.URL(url + (path + query).decode("latin-1"), encoded=True),
            data=body or None,
            headers=headers,
            allow_redirects=False,
            skip_auto_headers=_NOT_ADDED,
        )

    async def _pass_on(self, answer: aiohttp.ClientResponse, gone: asyncio.Future[None], send: Send) -> bool:
        if answer.headers.get(_HOP) == _MOVED:
            return False
        headers = [(name.lower(), value) for name, value in answer.raw_headers]
        start = {
            "type": "http.response.start",
            "status": answer.status,
            "headers": [
                (name, value)
                for name, value in headers
                if name == b"content-length" or name not in _CONNECTION_HEADERS
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
    """Pass a body on as it arrives. If it breaks off, it is left incomplete, so that the client notices."""
    await send(start)
    try:
        async for part in answer.content.iter_any():
            await send({"type": "http.response.body", "body": part, "more_body": True})
    except aiohttp.ClientError as error:
        _logger.warning("the response of another worker broke off: %s", str(error) or type(error).__name__)
        return
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _end(*futures: asyncio.Future[Any]) -> None:
    for future in futures:
        future.cancel()
    await asyncio.wait(futures)
    for future in futures:
        if not future.cancelled():
            future.exception()  # marks the exception as retrieved, so that asyncio does not log it
