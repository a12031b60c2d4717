"""The routes of the embedded engine: SGLang's endpoints over an `EngineService`. No route blocks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from areal_agents.browsers import BrowserGuard
from areal_agents.errors import ArealAgentsError, EngineUnavailable, RequestError
from areal_agents.inference.embedded.http.key_guard import KeyGuard
from areal_agents.inference.embedded.http.protocol import (
    GenerationRequest,
    answer,
    make_request,
    parse_generate,
    text_of,
)
from areal_agents.inference.embedded.http.streaming import DONE, EventWriter, event
from areal_agents.inference.embedded.http.weight_routes import Body, WeightRoutes
from areal_agents.inference.embedded.scheduling.grammar import TokenMatcher
from areal_agents.inference.embedded.scheduling.request import Request
from areal_agents.inference.embedded.scheduling.service import EngineService
from areal_agents.inference.sglang.control import PREPARE_PATH, PREPARE_UPDATE_PATH
from areal_agents.sockets import is_loopback

Handler = Callable[[HttpRequest, dict[str, Any]], Awaitable[Response]]
MAX_BODY_BYTES = 64 * 1024 * 1024


def create_app(
    service: EngineService, *, host: str = "127.0.0.1", incremental_streaming: bool = False, key: str = ""
) -> Starlette:
    """The application; it starts and stops `service` with its lifespan, and refuses foreign web pages.

    Args:
        host: the address that the server listens on.
        incremental_streaming: streamed chunks contain only the new tokens instead of all tokens so far.
        key: the key that requests must have; "": everyone who reaches the server may use it.
    """

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.start(asyncio.get_running_loop())
        yield
        await asyncio.to_thread(service.stop)

    routes = Routes(service, incremental_streaming)
    posts: dict[str, Handler] = {
        "/generate": routes.generate,
        "/abort_request": routes.abort_request,
        "/pause_generation": routes.pause_generation,
        "/continue_generation": routes.continue_generation,
        "/update_weight_version": routes.update_weight_version,
        "/flush_cache": routes.flush_cache,
    }
    weights = WeightRoutes(service.models, service.updates, service.groups)
    posts |= {
        path: _weights(service, handler)
        for path, handler in {
            PREPARE_PATH: weights.prepare_from_disk,
            "/update_weights_from_disk": weights.update_from_disk,
            "/begin_weight_update": weights.begin,
            "/update_weights_from_tensor": weights.update_from_tensor,
            "/update_weights_from_distributed": weights.update_from_distributed,
            PREPARE_UPDATE_PATH: weights.prepare_update,
            "/end_weight_update": weights.end,
            "/abandon_weight_update": weights.abandon,
            "/init_weights_update_group": weights.join_group,
            "/destroy_weights_update_group": weights.leave_group,
            "/load_lora_adapter": weights.load_adapter,
            "/unload_lora_adapter": weights.unload_adapter,
            "/weights_checker": weights.checksum,
            "/release_memory_occupation": weights.release_memory,
            "/resume_memory_occupation": weights.resume_memory,
        }.items()
    }
    gets: dict[str, Handler] = {
        "/health": routes.health,
        "/health_generate": routes.health_generate,
        "/model_info": routes.model_info,
        "/get_model_info": routes.model_info,
        "/server_info": routes.server_info,
        "/get_server_info": routes.server_info,
    }
    return Starlette(
        routes=[
            Route(path, _guarded(handler, _most_bytes(path, service)), methods=["POST"])
            for path, handler in posts.items()
        ]
        + [Route(path, _guarded(handler), methods=["GET"]) for path, handler in gets.items()],
        middleware=[
            Middleware(BrowserGuard, host=host, refuse=_refuse, checks_host=is_loopback(host)),
            *([Middleware(KeyGuard, key=key, refuse=_refuse)] if key else []),
        ],
        lifespan=lifespan,
    )


def _json(content: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status_code=status, media_type="application/json")


def _refuse(_path: str, refusal: RequestError) -> Response:
    return _error(refusal.message, refusal.status)


def _error(message: str, status: int) -> Response:
    return _json({"error": {"message": message}}, status)


def _weights(service: EngineService, handler: Callable[[Body], Awaitable[Any]]) -> Handler:
    """Wrap a handler of WeightRoutes; an engine that has failed answers with its error."""

    async def route(_: HttpRequest, body: dict[str, Any]) -> Response:
        service.check()
        return _json(await handler(body))

    return route


def _most_bytes(path: str, service: EngineService) -> int:
    """Return the maximum size of a body: all tensors of the model in base64, in float32."""
    return MAX_BODY_BYTES + (3 * service.weight_bytes if path == "/update_weights_from_tensor" else 0)


def _guarded(
    handler: Handler, most_bytes: int = MAX_BODY_BYTES
) -> Callable[[HttpRequest], Awaitable[Response]]:
    """Parse the JSON body, and answer refusals in SGLang's form."""

    async def route(http: HttpRequest) -> Response:
        try:
            return await handler(http, await _body(http, most_bytes) if http.method == "POST" else {})
        except RequestError as error:
            return _error(error.message, error.status)
        except EngineUnavailable as error:
            return _error(str(error), 503)
        except ArealAgentsError as error:
            return _error(str(error), 400)

    return route


async def _body(http: HttpRequest, most_bytes: int) -> dict[str, Any]:
    if int(http.headers.get("content-length", 0)) > most_bytes:
        raise RequestError(f"the body is larger than {most_bytes} bytes", status=413)
    raw = await http.body()
    try:
        body = orjson.loads(raw) if raw else {}
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError(f"expected a JSON object, got {type(body).__name__}")
    return body


class Routes:
    """The route handlers."""

    def __init__(self, service: EngineService, incremental_streaming: bool) -> None:
        self._service = service
        self._incremental = incremental_streaming

    async def generate(self, http: HttpRequest, body: dict[str, Any]) -> Response:
        generations, batch, stream = parse_generate(body, self._service.limits)
        matchers = [await self._service.matcher(generation.sampling) for generation in generations]
        if stream:
            events = self._stream(generations[0], matchers[0])
            return StreamingResponse(events, media_type="text/event-stream")
        done = await _unless_disconnected(http, self._run_all(generations, matchers))
        if done is None:
            return Response(status_code=499)
        return _json(done if batch else done[0])

    async def _run_all(
        self, generations: list[GenerationRequest], matchers: list[TokenMatcher | None]
    ) -> list[dict[str, Any]]:
        tasks = [
            asyncio.ensure_future(self._run(generation, matcher))
            for generation, matcher in zip(generations, matchers, strict=True)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()  # cancel the rest of the batch if one request was refused

    async def _run(self, generation: GenerationRequest, matcher: TokenMatcher | None) -> dict[str, Any]:
        started = time.perf_counter()
        request = self._request(generation, matcher, streaming=False)
        await self._service.run(request)
        progress = request.progress
        assert progress is not None, "a request that has finished was published"
        text = text_of(progress, generation, self._service.detokenizer)
        return answer(request, generation, progress, text, latency_s=time.perf_counter() - started)

    def _request(
        self, generation: GenerationRequest, matcher: TokenMatcher | None, *, streaming: bool
    ) -> Request:
        return make_request(
            generation,
            seed=self._service.next_seed(),
            streaming=streaming,
            matcher=matcher,
            notify=self._service.notify,
        )

    def _stream(self, generation: GenerationRequest, matcher: TokenMatcher | None) -> AsyncIterator[bytes]:
        """Submit a request and yield its server-sent events."""
        request = self._request(generation, matcher, streaming=True)
        writer = EventWriter(request, generation, self._service.detokenizer, incremental=self._incremental)
        return _events(writer, self._service.stream(request))

    async def abort_request(self, _: HttpRequest, body: dict[str, Any]) -> Response:
        rid, everything = body.get("rid"), body.get("abort_all", False)
        if not everything and not (isinstance(rid, str) and rid):
            raise RequestError('expected {"rid": "..."} or {"abort_all": true}')
        await self._service.abort(None if everything else rid)
        return _json({"success": True})

    async def pause_generation(self, _: HttpRequest, body: dict[str, Any]) -> Response:
        mode = body.get("mode", "abort")
        if mode not in ("abort", "in_place", "retract"):
            raise RequestError(f"mode must be abort, in_place or retract, got {mode!r}")
        await self._service.pause(mode)
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, _: HttpRequest, body: dict[str, Any]) -> Response:
        await self._service.resume()
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def update_weight_version(self, _: HttpRequest, body: dict[str, Any]) -> Response:
        version = body.get("new_version")
        if not isinstance(version, str) or not version:
            raise RequestError(f"new_version must be a string, got {version!r}")
        if body.get("abort_all_requests", True):
            await self._service.abort(None)
        await self._service.use_version(version)
        return _json({"success": True, "message": "Weight version updated.", "new_version": version})

    async def flush_cache(self, _: HttpRequest, body: dict[str, Any]) -> Response:
        if not await self._service.flush_cache():
            return _error("the cache is not flushed while requests are running", 400)
        return _json({"success": True, "message": "Cache flushed."})

    async def health(self, _: HttpRequest, __: dict[str, Any]) -> Response:
        self._service.check()
        return Response(status_code=200)

    async def health_generate(self, http: HttpRequest, body: dict[str, Any]) -> Response:
        probe = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        generations, _, _ = parse_generate(probe, self._service.limits)
        await self._run_all(generations, [None])
        return Response(status_code=200)

    async def model_info(self, _: HttpRequest, __: dict[str, Any]) -> Response:
        return _json(self._service.model_info())

    async def server_info(self, _: HttpRequest, __: dict[str, Any]) -> Response:
        return _json(await self._service.server_info())


async def _events(writer: EventWriter, steps: AsyncGenerator[None, None]) -> AsyncIterator[bytes]:
    try:
        async with aclosing(steps):
            async for _ in steps:
                if (chunk := writer.step()) is not None:
                    yield chunk
        yield writer.last()
    except EngineUnavailable as error:  # the response has started, so its status cannot report the error
        yield event({"error": {"message": str(error), "code": 503}})
    yield DONE


async def _unless_disconnected(
    http: HttpRequest, work: Awaitable[list[dict[str, Any]]]
) -> list[dict[str, Any]] | None:
    """Return the result of `work`, or None after cancelling it because the client disconnected."""
    task = asyncio.ensure_future(work)
    # the body has been read, so the next message is the disconnect
    gone = asyncio.ensure_future(http.receive())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return None
    finally:
        for pending in (task, gone):
            if not pending.done():
                pending.cancel()
                with suppress(asyncio.CancelledError):
                    await pending
