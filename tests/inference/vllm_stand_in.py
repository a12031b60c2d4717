"""A server that speaks the part of vLLM 0.32's API that the client uses, in front of an embedded engine.

Its answers have the format of those of a real server, with the results of the embedded engine. The same tests
run with a real server (`make test-vllm`).
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from areal_agents.core.completion import Completion, SamplingParams, TokenChunk, as_token_ids
from areal_agents.errors import EngineRejected
from areal_agents.inference import SGLangEngine

PREFIX = "generate-tokens-"


class VLLMStandIn:
    """The application; `engine_url` is that of an embedded engine.

    Attributes:
        version: the weight version that it reports.
        is_paused: whether it is paused.
        calls: the paths of the requests so far, in order, without those of generation and of the version.
        answers: by method, the answers of /collective_rpc that replace those of the engine.
        holds_version: while it is set, /weight_info does not answer.
    """

    def __init__(self, engine_url: str) -> None:
        self.version = "default"
        self.is_paused = False
        self.calls: list[str] = []
        self.answers: dict[str, Any] = {}
        self.holds_version = threading.Event()
        self._url = engine_url
        self._engine: SGLangEngine | None = None
        self.app = Starlette(
            routes=[
                Route("/inference/v1/generate", self._generate, methods=["POST"]),
                Route("/weight_info", self._weight_info),
                Route("/is_paused", self._is_paused),
                Route("/health", self._health),
                Route("/close", self._close, methods=["POST"]),
                *(
                    Route(f"/{name}", self._control, methods=["POST"])
                    for name in (
                        "pause", "resume", "reset_prefix_cache", "abort_requests", "update_weight_version",
                        "collective_rpc",
                    )
                ),
            ]
        )  # fmt: skip

    @property
    def engine(self) -> SGLangEngine:
        """The client of the embedded engine, created in the event loop of the server."""
        if self._engine is None:
            self._engine = SGLangEngine(self._url)
        return self._engine

    async def _health(self, request: Request) -> Response:
        return Response()

    async def _close(self, request: Request) -> Response:
        """Close the client of the embedded engine; vLLM has no such endpoint."""
        await self.engine.aclose()
        self._engine = None
        return JSONResponse({})

    async def _weight_info(self, request: Request) -> Response:
        while self.holds_version.is_set():
            await asyncio.sleep(0.02)
        return JSONResponse({"weight_version": self.version})

    async def _is_paused(self, request: Request) -> Response:
        return JSONResponse({"is_paused": self.is_paused})

    async def _control(self, request: Request) -> Response:
        body = json.loads(await request.body() or b"{}")
        name = request.url.path.removeprefix("/")
        self.calls.append(body["method"] if name == "collective_rpc" else name)
        if name == "pause":
            await self.engine.pause("retract")
            self.is_paused = True
        elif name == "resume":
            await self.engine.resume()
            self.is_paused = False
        elif name == "reset_prefix_cache":
            return JSONResponse({"success": True})
        elif name == "abort_requests":
            ids = body.get("request_ids")
            if not ids:
                await self.engine._call("POST", "/abort_request", {"abort_all": True})
            for rid in ids or ():
                await self.engine.abort(rid.removeprefix(PREFIX))
        elif name == "update_weight_version":
            self.version = body["new_version"]
            await self.engine.set_version(
                0 if self.version == "default" else int(self.version), abort_running=False
            )
        else:
            return JSONResponse({"results": [await self._worker(body["method"], body["args"])]})
        return JSONResponse({})

    async def _worker(self, method: str, args: list[Any]) -> dict[str, Any]:
        if method in self.answers:
            return self.answers[method]
        if method == "areal_describe":
            info = await self.engine.model_info()
            return {
                "model_path": info.model_path,
                "vocab_size": info.vocab_size,
                "max_model_len": info.max_context,
                "model_type": "qwen3",
                "workers": 1,
                "pipeline": 1,
                "logprobs_mode": "processed_logprobs",
            }
        assert method == "areal_load_folder", method
        try:
            await self.engine.update_weights_from_disk(args[0], (await self.engine.model_info()).version)
        except EngineRejected as error:
            return {"error": str(error)}
        return {}

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        given = body["sampling_params"]
        ids = as_token_ids(body["token_ids"])
        longest = (await self.engine.model_info()).max_context
        if len(ids) >= longest:
            error = {"message": f"longer than the context of {longest} tokens", "code": 400}
            return JSONResponse({"error": error}, 400)
        sampling = SamplingParams(
            min(given["max_tokens"], longest - len(ids)),
            temperature=given["temperature"],
            ignore_eos=given["ignore_eos"],
            seed=given.get("seed"),
            stop_token_ids=tuple(given.get("stop_token_ids", ())),
            top_logprobs=given.get("logprobs", 0),
        )
        if body.get("stream"):
            return StreamingResponse(self._events(body, ids, sampling), media_type="text/event-stream")
        top = given.get("prompt_logprobs")
        rows = None if top is None else await self._prompt_logprobs(body["request_id"], ids, top)
        try:
            done = await self.engine.generate(body["request_id"], ids, sampling)
        except EngineRejected as error:
            return JSONResponse({"error": {"message": str(error), "code": 400}}, 400)
        piece = TokenChunk(tuple(done.token_ids.tolist()), tuple(done.logprobs.tolist()), done.top_logprobs)
        return JSONResponse(self._answer(body, len(ids), piece, len(done), done) | {"prompt_logprobs": rows})

    async def _prompt_logprobs(self, rid: str, ids: Any, top: int) -> list[Any]:
        scores = await self.engine.score(rid + "-scores", ids, start=1, top=top)
        rows: list[Any] = [None]
        for i, token in enumerate(ids[1:].tolist()):
            best = zip(scores.top_ids[i].tolist(), scores.top_logprobs[i].tolist(), strict=True)
            row = {token: float(scores.token_logprobs[i])} | dict(best)
            rows.append({str(id): {"logprob": logprob} for id, logprob in row.items()})
        return rows

    async def _events(self, body: Any, ids: Any, sampling: SamplingParams) -> AsyncIterator[str]:
        pieces: asyncio.Queue[TokenChunk | None] = asyncio.Queue()
        call = asyncio.create_task(
            self.engine.generate(
                body["request_id"],
                ids,
                sampling,
                pieces.put_nowait,
                stream_interval=body["sampling_params"]["stream_interval"],
            )
        )
        call.add_done_callback(lambda _: pieces.put_nowait(None))
        sent = 0
        held: TokenChunk | None = None  # held until it is known whether it is the last
        try:
            while (piece := await pieces.get()) is not None:
                if held is not None:
                    yield self._event(body, len(ids), held, sent)
                held, sent = piece, sent + len(piece.token_ids)
            done = await call
            yield self._event(body, len(ids), held or TokenChunk((), ()), sent, done)
            usage = {"prompt_tokens": len(ids), "completion_tokens": sent}
            end = {"request_id": PREFIX + body["request_id"], "choices": [], "usage": usage}
            yield f"data: {json.dumps(end)}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            call.cancel()
            await asyncio.wait([call])

    def _event(
        self, body: Any, prompt: int, piece: TokenChunk, sent: int, done: Completion | None = None
    ) -> str:
        return f"data: {json.dumps(self._answer(body, prompt, piece, sent, done))}\n\n"

    def _answer(
        self, body: Any, prompt: int, piece: TokenChunk, sent: int, done: Completion | None
    ) -> dict[str, Any]:
        content = []
        for i, (token, logprob) in enumerate(zip(piece.token_ids, piece.logprobs, strict=True)):
            best = piece.top_logprobs[i] if piece.top_logprobs else ()
            rows = {token: logprob} | dict(best)
            top = [{"token_id": id, "logprob": value} for id, value in rows.items()]
            content.append({"token_id": token, "logprob": logprob, "top_logprobs": top})
        spans = None
        if done is not None:
            spans = []
            for at, version in enumerate(done.versions.tolist()):
                if not spans or spans[-1]["version"] != str(version):
                    spans.append({"version": str(version), "start": at, "end": at})
                spans[-1]["end"] = at + 1
        choice = {
            "index": 0,
            "finish_reason": None if done is None else done.finish_reason,
            "stop_reason": None,
            "token_ids": list(piece.token_ids),
            "weight_versions": spans,
            "logprobs": {"content": content},
        }
        return {
            "request_id": PREFIX + body["request_id"],
            "choices": [choice],
            "usage": {"prompt_tokens": prompt, "completion_tokens": sent},
        }
