"""The routes that agents call; requests of all dialects, streamed or not, are handled by the same code.

A request that fails before its answer has begun gets an ordinary error response in the form of its API, even
if it requested a stream.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from areal_agents.core.forest import Forest
from areal_agents.errors import RequestError
from areal_agents.proxy.auth import Authenticator, Caller
from areal_agents.proxy.bodies import Bodies, wait_for_disconnect
from areal_agents.proxy.calls.completer import Completer
from areal_agents.proxy.calls.fields import ignored_fields
from areal_agents.proxy.calls.labels import label_of, session_of, task_of, user_of
from areal_agents.proxy.calls.passthrough import PassThrough
from areal_agents.proxy.calls.record import CallRecord, Observer
from areal_agents.proxy.calls.request import ModelRequest, Retry, refuse_unknown_results
from areal_agents.proxy.calls.shared_reply import SharedReply
from areal_agents.proxy.calls.sockets import Read, ResponsesSockets
from areal_agents.proxy.calls.streaming import EventStream, events_of, lists_many_tokens
from areal_agents.proxy.config import ProxyConfig
from areal_agents.proxy.dialects.base import CountingDialect, Dialect, ReadContext, StreamWriter
from areal_agents.proxy.dialects.chat.dialect import ChatDialect
from areal_agents.proxy.dialects.completions.dialect import Completions
from areal_agents.proxy.dialects.gemini.answers import model_description
from areal_agents.proxy.dialects.gemini.dialect import Gemini
from areal_agents.proxy.dialects.gemini.urls import COUNT, GENERATE, STREAM, url_fields
from areal_agents.proxy.dialects.messages.dialect import Messages
from areal_agents.proxy.dialects.reading import flag
from areal_agents.proxy.dialects.replayed import MessageMemo
from areal_agents.proxy.dialects.responses.dialect import ResponsesDialect
from areal_agents.proxy.dialects.writing import model_name
from areal_agents.proxy.episodes.implicit import ImplicitEpisodes, session_name
from areal_agents.proxy.episodes.sessions import Session, Sessions
from areal_agents.proxy.errors import ClientGone, as_request_error, headers_of, log_refusal
from areal_agents.proxy.paths import split_path
from areal_agents.proxy.redaction import Redaction
from areal_agents.proxy.volatile import VolatileText
from areal_agents.rendering import ChatRenderer
from areal_agents.telemetry import TRACEPARENT

_logger = logging.getLogger(__name__)

_MESSAGES, _GEMINI, _RESPONSES = Messages(), Gemini(), ResponsesDialect()
_DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": ChatDialect(),
    "/v1/completions": Completions(),
    "/v1/responses": _RESPONSES,
    "/v1/messages": _MESSAGES,
    GENERATE: _GEMINI,
    STREAM: _GEMINI,
}
_COUNTING: Mapping[str, CountingDialect] = {"/v1/messages/count_tokens": _MESSAGES, COUNT: _GEMINI}
_LONGEST_KEY = 255
# The fields of the conversation in all dialects.
_CONVERSATION = (
    "messages", "input", "prompt", "system", "contents", "systemInstruction", "system_instruction",
)  # fmt: skip
Endpoint = Callable[[Request], Awaitable[Response]]


class ModelCalls:
    """The endpoints for model calls of one proxy process."""

    def __init__(
        self,
        *,
        sessions: Sessions,
        implicit: ImplicitEpisodes,
        auth: Authenticator,
        bodies: Bodies,
        completer: Completer,
        renderer: ChatRenderer,
        pass_through: PassThrough,
        config: ProxyConfig,
        observer: Observer,
        redaction: Redaction | None = None,
    ) -> None:
        self._redaction = redaction
        self._sessions = sessions
        self._implicit = implicit
        self._auth = auth
        self._bodies = bodies
        self._completer = completer
        self._tokenizer = renderer.tokenizer
        self._pass_through = pass_through
        self._config = config
        self._observer = observer
        self._volatile = VolatileText(config.volatile)
        self._memo = MessageMemo(64)  # of calls whose episode is found by their messages

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """The endpoints for POST requests, by path without an episode's key; "{model}" is a model's name."""
        endpoints = {path: self._endpoint(path, dialect) for path, dialect in _DIALECTS.items()}
        counting = {path: self._counting(path, dialect) for path, dialect in _COUNTING.items()}
        return endpoints | counting | {"/v1/embeddings": self.embeddings}

    @property
    def dialects(self) -> Mapping[str, Dialect]:
        """The dialects of the model calls, by endpoint."""
        return _DIALECTS

    def routes(self) -> list[Route]:
        """Return the routes of the app: each without a prefix, and under an episode's key."""
        routes = []
        for prefix in ("", "/e/{key}"):
            for path, endpoint in self.endpoints.items():
                path = path.replace("{model}", "{model:path}")  # the name of a model may have slashes
                routes.append(Route(prefix + path, endpoint, methods=["POST"]))
            routes.append(Route(prefix + "/v1/responses", self.no_websocket, methods=["GET"]))
            routes.append(Route(prefix + "/v1/models", self.models, methods=["GET"]))
            routes.append(Route(prefix + "/v1/models/{model:path}", self.model, methods=["GET"]))
            routes.append(Route(prefix + "/v1beta/models", self.google_models, methods=["GET"]))
            named = prefix + "/v1beta/models/{model:path}"
            routes.append(Route(named, self.google_model, methods=["GET"]))
            routes.append(Route(named, self.no_google_method, methods=["POST"]))
        return routes

    async def no_websocket(self, request: Request) -> Response:
        """GET /v1/responses: refuse a WebSocket that the server has not opened.

        Clients that try one first then continue with HTTP.
        """
        if "upgrade" in request.headers.get("connection", "").lower():
            return _json(
                {
                    "error": {
                        "message": "a proxy with several workers serves no WebSockets; use POST /v1/responses"
                    }
                },
                426,
            )
        raise HTTPException(405)

    async def models(self, request: Request) -> Response:
        """GET /v1/models: list the policy and the models that are passed through."""
        if "x-goog-api-key" in request.headers:
            return await self.google_models(request)
        await self._check_caller(request)
        names = [await self._policy_name(), *self._config.models]
        return _json({"object": "list", "data": [_model(name) for name in names], "has_more": False})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{id}: describe a model; the policy serves every name that is not passed through."""
        if "x-goog-api-key" in request.headers:
            return await self.google_model(request)
        await self._check_caller(request)
        return _json(_model(_model_in(request)))

    async def google_models(self, request: Request) -> Response:
        """GET /v1beta/models: list the models of `models` in the form of Google's API."""
        await self._check_caller(request)
        names = [await self._policy_name(), *self._config.models]
        max_context = (await self._completer.model_info()).max_context
        return _json({"models": [model_description(name, max_context) for name in names]})

    async def google_model(self, request: Request) -> Response:
        """GET /v1beta/models/{id}: describe a model in the form of Google's API."""
        await self._check_caller(request)
        max_context = (await self._completer.model_info()).max_context
        return _json(model_description(_model_in(request), max_context))

    async def no_google_method(self, request: Request) -> Response:
        """POST /v1beta/models/{id}:{method}: refuse the methods of Google's API that there are not."""
        error = RequestError(
            "the policy has the methods generateContent, streamGenerateContent and countTokens; send other "
            "requests to a server that has them",
            status=501,
            code="not_supported",
        )
        return _refused(_GEMINI, request, error)

    async def embeddings(self, request: Request) -> Response:
        """POST /v1/embeddings: forward to an upstream of `models`, because the policy has no embeddings."""
        try:
            return await self._embeddings(request)
        except Exception as error:
            return _refused(_DIALECTS["/v1/chat/completions"], request, error)

    async def _embeddings(self, request: Request) -> Response:
        await self._check_caller(request)
        body = await self._bodies.object(request)
        if (upstream := self._pass_through.upstream(body)) is not None:
            return await self._pass_through.forward(request, "/v1/embeddings", body, upstream)
        raise RequestError(
            "the policy does not compute embeddings; add a server for this model to proxy.models in the "
            "configuration, or send the request to that server directly",
            status=501,
            code="not_supported",
        )

    def _counting(self, path: str, dialect: CountingDialect) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            try:
                return await self._count(path, dialect, request)
            except Exception as error:
                return _refused(dialect, request, error)
            finally:
                self._bodies.done_with(request)

        return endpoint

    async def _count(self, path: str, dialect: CountingDialect, request: Request) -> Response:
        """Answer with the length of the prompt in tokens."""
        caller = self._auth.identify(request)
        body = await self._body(request, caller)
        if (upstream := self._pass_through.upstream(body)) is not None:
            await self._check_caller(request)
            return await self._pass_through.forward(request, path, body, upstream)
        key = caller.episode_key
        session = None if key is None else await self._sessions.by_key(key)
        headers = _plain_headers(request)
        context, client = self._context(headers, session), headers.get("user-agent", "")

        def read() -> ModelRequest:
            found = self._redacted(dialect.read_for_counting(body, context))
            return replace(found, messages=self._volatile.marked(found.messages, client))

        model_request = await self._bodies.off_loop(request, read)
        forest = session.forest if session else Forest()
        count = await self._completer.count_tokens(forest, model_request)
        return Response(dialect.count_answer(count), media_type="application/json")

    async def _body(self, request: Request, caller: Caller) -> dict[str, Any]:
        """Return the body of a call, with the fields that its URL has."""
        key = caller.episode_key
        body = await self._bodies.object(request, memo=None if key is None else self._sessions.memo_of(key))
        _, path = split_path(request.scope["path"])
        return body | url_fields(path, request.query_params)

    def _endpoint(self, path: str, dialect: Dialect) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            return await self._call(path, dialect, request, self._body)

        return endpoint

    def sockets(self) -> ResponsesSockets:
        """Return the app that serves WebSockets."""

        async def answer(request: Request, read: Read) -> Response:
            return await self._call("/v1/responses", _RESPONSES, request, read)

        return ResponsesSockets(check_caller=self._check_caller, answer=answer, bodies=self._bodies)

    async def _call(self, path: str, dialect: Dialect, request: Request, read: Read) -> Response:
        """Return the response to a call, whose fields `read` returns."""
        headers = request.headers
        record = CallRecord(
            path,
            dialect.name,
            client=headers.get("user-agent", ""),
            traceparent=headers.get(TRACEPARENT, ""),
        )
        started = time.monotonic()
        try:
            return await self._answer(dialect, request, read, record, started)
        except Exception as error:
            self._report(record, started, error)
            return _refused(dialect, request, error)
        finally:
            self._bodies.done_with(request)

    async def _answer(
        self, dialect: Dialect, request: Request, read: Read, record: CallRecord, started: float
    ) -> Response:
        caller = self._auth.identify(request)
        body = await read(request, caller)
        record.ignored = ignored_fields(dialect.name, body)
        record.streamed, record.model = flag(body, "stream"), model_name(body)
        if (upstream := self._pass_through.upstream(body)) is not None:
            await self._check_caller(request)
            record.upstream = body["model"]
            response = await self._pass_through.forward(request, record.endpoint, body, upstream)
            record.status = response.status_code
            self._report(record, started)
            return response
        headers = _plain_headers(request)
        session, model_request = await self._read(request, dialect, headers, caller, body, record)
        if model_request.session:
            session.name_main_session(model_request.session)
        # Only `model_request` keeps the conversation, because hundreds of calls may wait for the engine.
        body = {name: value for name, value in body.items() if name not in _CONVERSATION}
        record.retry_count, record.label = model_request.retry.count, model_request.label
        reply = self._completer.call(session, model_request, streamed=record.streamed)
        if session.opening is not None:
            reply.task.add_done_callback(lambda _: self._implicit.call_ended(session, model_request, reply))
        record.repeated = reply.is_repeated or reply.has_client
        reply.join()
        gone = asyncio.ensure_future(wait_for_disconnect(request.receive))
        client = _WaitingClient(reply, gone, dialect, session, body, model_request, record, started)
        if record.streamed and await self._can_start_stream(client):
            if reply.deltas:
                record.first_piece_s = time.monotonic() - started
            writer = dialect.stream(body, model_request, reply.turn_ids, reply.created_at, self._tokenizer)
            return EventStream(self._stream(client, writer), writer.media_type)
        return await self._whole_response(client)

    async def _can_start_stream(self, client: _WaitingClient) -> bool:
        """Wait for the first piece or the first keep-alive; False if the call failed before."""
        reply = client.reply
        await reply.wait_for_progress(0, client.gone, self._config.keepalive_s)
        return not client.gone.done() and (bool(reply.deltas) or not reply.has_failed)

    async def _stream(self, client: _WaitingClient, writer: StreamWriter) -> AsyncGenerator[bytes, None]:
        reply, dialect, error = client.reply, client.dialect, None
        try:
            keepalive_s = self._config.keepalive_s
            async for part in events_of(reply, client.request, writer, dialect, client.gone, keepalive_s):
                yield part
            error = ClientGone() if client.gone.done() else reply.failure
        except Exception as failure:  # a bug in the proxy; the stream has begun, so the error is sent in it
            _logger.exception("a bug broke off a stream of %s", client.record.endpoint)
            error = failure
            yield writer.error(as_request_error(failure))
        finally:
            self._leave(client, error)

    async def _whole_response(self, client: _WaitingClient) -> Response:
        reply, dialect = client.reply, client.dialect
        try:
            await reply.wait_until_ended(client.gone)
            if client.gone.done():
                raise ClientGone
            if reply.failure is not None:
                raise reply.failure
            done = reply.task.result()
            if lists_many_tokens(client.request, done):
                answer = await asyncio.to_thread(dialect.answer, client.body, done, self._tokenizer)
            else:
                answer = dialect.answer(client.body, done, self._tokenizer)
        except BaseException:
            self._leave(client, None, log=False)
            raise
        self._leave(client, None)
        return Response(answer, media_type="application/json")

    def _leave(self, client: _WaitingClient, error: Exception | None, *, log: bool = True) -> None:
        """Remove a client from its call. A reply that no client received is not trained on."""
        reply, record = client.reply, client.record
        was_there = not client.gone.done()
        client.gone.cancel()
        if reply.leave(served=was_there):
            self._completer.retries.discard(client.session, reply)
        if reply.task.done() and not reply.has_failed:
            done = reply.task.result()
            record.turns = tuple(item.turn for item in done)
            record.prompt_tokens, record.reused_tokens = done[0].prompt_tokens, done[0].reused_tokens
        if log:
            self._report(record, client.started, error)

    async def _read(
        self,
        request: Request,
        dialect: Dialect,
        headers: Mapping[str, str],
        caller: Caller,
        body: Mapping[str, Any],
        record: CallRecord,
    ) -> tuple[Session, ModelRequest]:
        """Return the episode that a request belongs to, and the canonical request.

        The episode is in the record as soon as it is known, so that a refused request names it.
        """
        header, retry = session_of(headers), _retry(headers)

        def read(context: ReadContext) -> ModelRequest:
            found = self._redacted(dialect.read(body, context))
            refuse_unknown_results(found.messages)
            messages = self._volatile.marked(found.messages, record.client)
            return replace(found, messages=messages, session=header, retry=retry)

        if caller.episode_key is not None:
            session = await self._sessions.by_key(caller.episode_key)
            record.episode = session.row
            context = self._context(headers, session)
            return session, await self._bodies.off_loop(request, lambda: read(context))
        name, task, user = session_name(headers, body), task_of(headers), user_of(headers)
        known = self._implicit.find(caller, name, dialect.referenced_turn(body))
        if known is not None:
            record.episode = known.row
        context = self._context(headers, known)
        model_request = await self._bodies.off_loop(request, lambda: read(context))
        if known is None:
            retries = self._completer.retries
            known = await self._implicit.session(
                caller,
                name,
                model_request,
                lambda session: retries.repeated(session, model_request),
                task,
                user,
            )
            record.episode = known.row
        return known, model_request

    def _redacted(self, request: ModelRequest) -> ModelRequest:
        return request if self._redaction is None else self._redaction.redacted(request)

    def _context(self, headers: Mapping[str, str], session: Session | None) -> ReadContext:
        if session is None:
            return ReadContext(self._config.max_messages, label_of(headers, ""), Forest(), self._memo)
        label = label_of(headers, session.main_session)
        return ReadContext(self._config.max_messages, label, session.forest, session.memo)

    async def _check_caller(self, request: Request) -> None:
        """Raise RequestError 401 or 409 unless the caller may use the model."""
        caller = self._auth.identify(request)
        if caller.episode_key is not None:
            await self._sessions.by_key(caller.episode_key)

    async def _policy_name(self) -> str:
        model = await self._completer.model_info()
        return Path(model.model_path).name or "policy"

    def _report(self, record: CallRecord, started: float, error: Exception | None = None) -> None:
        """Complete the record of a call that has ended, and pass it to the observer."""
        record.duration_s = time.monotonic() - started
        if error is not None:
            refusal = as_request_error(error)
            record.status, record.code, record.message = refusal.status, refusal.code, refusal.message
        self._observer(record)


@dataclass(frozen=True, slots=True)
class _WaitingClient:
    """A client that waits for a reply.

    Attributes:
        reply: the reply; other clients may wait for it too.
        gone: done when the client has closed the connection.
        dialect: the API in which the client is answered.
        session: the episode.
        body: the fields of the raw request, without the conversation.
        request: the canonical request.
        record: the record of the call, for the log and the metrics.
        started: monotonic time at which the request arrived.
    """

    reply: SharedReply
    gone: asyncio.Future[None]
    dialect: Dialect
    session: Session
    body: Mapping[str, Any]
    request: ModelRequest
    record: CallRecord
    started: float


def _plain_headers(request: Request) -> dict[str, str]:
    """Return the headers by lower-case name; of headers with the same name the first, as in Starlette.

    A dict is used because each call looks for a dozen headers, most of which are absent.
    """
    pairs = reversed(request.headers.raw)
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in pairs}


def _retry(headers: Mapping[str, str]) -> Retry:
    """Return what the headers say about earlier attempts. Raise RequestError 400 if a key is too long."""
    count = headers.get("x-stainless-retry-count", "")
    key = headers.get("idempotency-key", "")
    if len(key) > _LONGEST_KEY:
        raise RequestError(f"an Idempotency-Key may have at most {_LONGEST_KEY} characters, got {len(key)}")
    return Retry(int(count) if count.isdecimal() and len(count) < 10 else 0, key)


def _refused(dialect: Dialect, request: Request, error: Exception) -> Response:
    refusal = as_request_error(error)
    log_refusal(request, refusal, error)
    return Response(
        dialect.error(refusal),
        status_code=refusal.status,
        headers=headers_of(refusal),
        media_type="application/json",
    )


def _model_in(request: Request) -> str:
    """Return the name of the model in a path. Raise HTTPException 404 if it is no name."""
    name: str = request.path_params["model"]
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise HTTPException(404)
    return name


def _model(name: str) -> dict[str, Any]:
    """Return the description of a model in a form that OpenAI's and Anthropic's clients accept."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "areal-agents",
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    }


def _json(data: object, status: int = 200) -> Response:
    return Response(orjson.dumps(data), status_code=status, media_type="application/json")
