"""The HTTP endpoints of the scripted engine, which are those of SGLang.

Requests that a real server refuses, or that crash it, get status 400. Unknown fields and grammars are
ignored; the script decides what a constrained reply looks like.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from tokenizers import Tokenizer

from areal_agents.core.completion import TokenIds, as_token_ids
from areal_agents.errors import RequestError
from areal_agents.testing.invalid_answers import LIES
from areal_agents.testing.sampling import ending_of, plan, seed_of
from areal_agents.testing.script import Script, ScriptedCall, ScriptedReply
from areal_agents.testing.session import Gate, ScriptedGeneration, ServedCall
from areal_agents.testing.tokenizer import read_tokenizer
from areal_agents.testing.wire import (
    ExpertsOf,
    answer,
    requested_experts_start,
    requested_top_logprobs,
    routed_experts,
    stream_interval_of,
)

Handler = Callable[[Request, dict[str, Any]], Awaitable[Response]]
STARTED_VERSION = "default"
_ENCODINGS_KEPT = 256


class ScriptedApp:
    """The ASGI app of one scripted engine.

    Args:
        tokenizer: tokenizer of the model that the engine appears to serve.
        script: returns the reply of each call; may be replaced between calls.
        stop_token_id: the token that ends each reply with finish "stop".
        model_path: the model folder in the answer of /model_info.
        vocab_size: ids at or above it are refused; by default the size of the tokenizer's vocabulary.
        context_length: maximum number of tokens of a prompt with its completion.
        seed: seed of the logprobs.
        incremental: whether the chunks of a stream have only the new tokens, as with SGLang's
            --incremental-streaming-output; by default each chunk has all tokens so far.
        ignores_interval: whether every chunk is sent on its own, whatever `stream_interval` a request has.
        keep: maximum number of exchanges that are kept, the first ones; None for no limit.
        with_text: whether answers have their text, which takes time; `SGLangEngine` does not read it.
        experts_of: returns the experts [N, layers, k] of tokens [N], for requests that ask for them; None
            acts as a server that does not return experts.

    Attributes:
        exchanges: the generations that ended, in the order of their ends.
        aborted: the rids of the requests to /abort_request.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        script: Script,
        *,
        stop_token_id: int,
        model_path: str = "scripted",
        vocab_size: int | None = None,
        context_length: int = 32_768,
        seed: int = 0,
        incremental: bool = False,
        ignores_interval: bool = False,
        keep: int | None = None,
        with_text: bool = True,
        experts_of: ExpertsOf | None = None,
    ) -> None:
        self.script = script
        self.exchanges: list[ServedCall] = []
        self.aborted: list[str] = []
        self._tokenizer = tokenizer
        self._stop_token_id = stop_token_id
        self._model_path = model_path
        self._vocab_size = vocab_size or max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self._context_length = context_length
        self._seed = seed
        self._incremental = incremental
        self._ignores_interval = ignores_interval
        self._keep = keep
        self._with_text = with_text
        self._experts_of = experts_of
        self._gate = Gate(STARTED_VERSION)
        self._running: dict[str, ScriptedGeneration] = {}
        self._calls = 0
        # Cached, because a script returns the same few texts repeatedly, and encoding takes milliseconds.
        self._encode = lru_cache(_ENCODINGS_KEPT)(self._encoded)
        self._app = Starlette(routes=self._routes())

    @classmethod
    def from_folder(cls, folder: str | Path, script: Script, **options: Any) -> ScriptedApp:
        """Return an engine that appears to serve a model folder.

        Raise ConfigError if the tokenizer of the folder cannot be read.
        """
        tokenizer, stop_token_id = read_tokenizer(folder)
        return cls(tokenizer, script, stop_token_id=stop_token_id, model_path=str(folder), **options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    def abort_all(self) -> None:
        """Abort every running generation. Must be called on the event loop."""
        for generation in self._running.values():
            generation.abort()

    def _routes(self) -> list[Route]:
        posts: dict[str, Handler] = {
            "/generate": self._generate,
            "/abort_request": self._abort_request,
            "/pause_generation": self._pause_generation,
            "/continue_generation": self._continue_generation,
            "/update_weights_from_disk": self._update_weights_from_disk,
        }
        gets: dict[str, Handler] = {
            "/health": self._health,
            "/model_info": self._model_info,
            "/get_model_info": self._model_info,
            "/server_info": self._server_info,
            "/get_server_info": self._server_info,
        }
        return [
            *(Route(path, _guarded(handler), methods=["POST"]) for path, handler in posts.items()),
            *(Route(path, _guarded(handler), methods=["GET"]) for path, handler in gets.items()),
        ]

    async def _generate(self, request: Request, body: dict[str, Any]) -> Response:
        ids = self._prompt_ids(body.get("input_ids"))
        generation = self._new_generation(ids, body)
        if body.get("stream"):
            return StreamingResponse(self._events(generation, ids, body), media_type="text/event-stream")
        if not await self._run(generation, ids, body, request):
            return Response(status_code=499)
        return _json(self._answer(generation, ids, body))

    def _new_generation(self, ids: TokenIds, body: dict[str, Any]) -> ScriptedGeneration:
        """Return the generation that the script plans for a request, cut at the request's limits.

        Raise RequestError if the request is invalid, or if the script refuses it.
        """
        params = body.get("sampling_params") or {}
        if not isinstance(params, dict):
            raise RequestError(f"sampling_params must be an object, got {params!r}")
        ending = ending_of(params, self._stop_token_id)
        if len(ids) + ending.max_new_tokens > self._context_length:
            raise RequestError(
                f"{len(ids)} prompt tokens and max_new_tokens {ending.max_new_tokens} exceed the model's "
                f"context length of {self._context_length}"
            )
        requested_top_logprobs(body)
        stream_interval_of(params)
        requested_experts_start(body, len(ids))
        rid = body.get("rid") or uuid.uuid4().hex
        if not isinstance(rid, str):
            raise RequestError(f"rid must be a string, got {rid!r}")
        if rid in self._running:
            raise RequestError(f"a request with rid {rid!r} is already running")
        call = ScriptedCall(ids, body, self._calls, decode=self._decode, stop_token_id=self._stop_token_id)
        self._calls += 1
        scripted = self.script(call)
        reply = ScriptedReply(scripted) if isinstance(scripted, str) else scripted
        if reply.error:
            raise RequestError(reply.error, status=reply.error_status)
        seed = seed_of(self._seed, ids)
        planned = plan(reply, self._reply_ids(reply), ending, seed=seed, decode=self._decode)
        generation = ScriptedGeneration(rid, planned, reply, self._gate)
        self._running[rid] = generation
        return generation

    def _reply_ids(self, reply: ScriptedReply) -> tuple[int, ...]:
        ids = self._encode(reply.text) if reply.token_ids is None else reply.token_ids
        if reply.finish == "stop" and (not ids or ids[-1] != self._stop_token_id):
            return (*ids, self._stop_token_id)
        return ids

    async def _run(
        self, generation: ScriptedGeneration, ids: TokenIds, body: dict[str, Any], request: Request
    ) -> bool:
        """Run a generation to its end; False if the client disconnects first."""
        work = asyncio.ensure_future(generation.run_to_end())
        gone = asyncio.ensure_future(request.receive())  # the body was read, so this is the disconnect
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await work
            return work.done()
        finally:
            self._end(generation, ids, body)
            for task in (work, gone):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def _events(
        self, generation: ScriptedGeneration, ids: TokenIds, body: dict[str, Any]
    ) -> AsyncIterator[bytes]:
        sent = 0
        interval = 1 if self._ignores_interval else stream_interval_of(body.get("sampling_params") or {})
        try:
            async for _ in generation.run():
                if generation.finish is None and generation.sampled - sent < (interval if sent else 1):
                    continue
                chunk = self._answer(generation, ids, body, start=sent if self._incremental else 0)
                sent = generation.sampled
                if generation.finish is not None:  # must be in `exchanges` before the client sees the end
                    self._end(generation, ids, body)
                yield b"data: " + orjson.dumps(chunk) + b"\n\n"
            yield b"data: [DONE]\n\n"
        finally:
            self._end(generation, ids, body)

    def _answer(
        self, generation: ScriptedGeneration, ids: TokenIds, body: dict[str, Any], *, start: int = 0
    ) -> dict[str, Any]:
        content = answer(
            generation,
            body,
            prompt_tokens=len(ids),
            start=start,
            vocab_size=self._vocab_size,
            text_of=self._text if self._with_text else lambda _: "",
        )
        first = requested_experts_start(body, len(ids))
        if first is not None and self._experts_of is not None and generation.finish is not None:
            tokens = np.concatenate([ids, generation.plan.token_ids[: generation.sampled]])
            content["meta_info"]["routed_experts"] = routed_experts(self._experts_of, tokens, first)
        if generation.reply.lie:
            LIES[generation.reply.lie].falsify(content)
        return content

    def _end(self, generation: ScriptedGeneration, ids: TokenIds, body: dict[str, Any]) -> None:
        """Move a generation that has ended, or whose client has disconnected, to `exchanges`."""
        if self._running.pop(generation.rid, None) is None:
            return
        if self._keep is not None and len(self.exchanges) >= self._keep:
            return
        kept = {key: value for key, value in body.items() if key != "input_ids"}
        count = generation.sampled
        self.exchanges.append(
            ServedCall(
                rid=generation.rid,
                input_ids=ids,
                body=kept,
                token_ids=tuple(generation.plan.token_ids[:count]),
                logprobs=tuple(generation.plan.logprobs[:count]),
                versions=tuple(generation.versions),
                finish=generation.finish or {"type": "abort", "message": "the client disconnected"},
            )
        )

    async def _abort_request(self, _: Request, body: dict[str, Any]) -> Response:
        rid = body.get("rid")
        if body.get("abort_all"):
            self.abort_all()
        elif isinstance(rid, str) and rid:
            self.aborted.append(rid)
            if rid in self._running:
                self._running[rid].abort()
        else:
            raise RequestError('expected {"rid": "..."} or {"abort_all": true}')
        return _json({"success": True})

    async def _pause_generation(self, _: Request, body: dict[str, Any]) -> Response:
        mode = body.get("mode", "abort")
        if mode not in ("abort", "in_place", "retract"):
            raise RequestError(f"mode must be abort, in_place or retract, got {mode!r}")
        self._gate.resumed.clear()
        if mode == "abort":
            self.abort_all()
        return _json({"status": "ok", "message": "Generation paused successfully."})

    async def _continue_generation(self, _: Request, __: dict[str, Any]) -> Response:
        self._gate.resumed.set()
        return _json({"status": "ok", "message": "Generation continued successfully."})

    async def _update_weights_from_disk(self, _: Request, body: dict[str, Any]) -> Response:
        path, version = body.get("model_path"), body.get("weight_version")
        if not isinstance(path, str) or not path:
            raise RequestError(f"model_path must name a model folder, got {path!r}")
        if version is not None and not isinstance(version, str):
            raise RequestError(f"weight_version must be a string, got {version!r}")
        self._model_path = path
        self._gate.version = version or self._gate.version
        return _json({"success": True, "message": "Succeeded to update model weights."})

    async def _health(self, _: Request, __: dict[str, Any]) -> Response:
        return Response(status_code=200)

    async def _model_info(self, _: Request, __: dict[str, Any]) -> Response:
        return _json(self._info())

    async def _server_info(self, _: Request, __: dict[str, Any]) -> Response:
        return _json({**self._info(), "running": len(self._running), "calls": self._calls})

    def _info(self) -> dict[str, Any]:
        return {
            "model_path": self._model_path,
            "weight_version": self._gate.version,
            "vocab_size": self._vocab_size,
            "context_length": self._context_length,
            "engine": "scripted",
        }

    def _prompt_ids(self, input_ids: Any) -> TokenIds:
        if not isinstance(input_ids, list) or not input_ids:
            raise RequestError("input_ids must be a list of at least one token id")
        try:
            ids = np.array(input_ids)
        except ValueError:
            ids = np.array([])
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise RequestError("input_ids must be a flat list of integers")
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            wrong = int(ids[(ids < 0) | (ids >= self._vocab_size)][0])
            raise RequestError(f"token id {wrong} is outside the vocabulary of {self._vocab_size}")
        return as_token_ids(ids)

    def _encoded(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


def _json(content: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status_code=status, media_type="application/json")


def _guarded(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """Return a route that parses the JSON body for `handler`, and answers a RequestError in SGLang's form."""

    async def route(request: Request) -> Response:
        try:
            body = await _body(request) if request.method == "POST" else {}
            return await handler(request, body)
        except RequestError as error:
            return _json({"error": {"message": error.message}}, error.status)

    return route


async def _body(request: Request) -> dict[str, Any]:
    raw = await request.body()
    try:
        body = orjson.loads(raw) if raw else {}
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError(f"expected a JSON object, got {type(body).__name__}")
    return body
