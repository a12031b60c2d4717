"""A small OpenAI-compatible server that answers with the API key of the request."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


@dataclass
class EchoServer:
    """The server; `calls` has its requests except those for chat: (method, path, bearer token, body)."""

    url: str = ""
    calls: list[tuple[str, str, str, Any]] = field(default_factory=list)
    refuse_with: tuple[int, dict[str, Any]] | None = None


def completion(content: str) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "policy",
        "choices": [
            {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": content}}
        ],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


@pytest.fixture(scope="session")
def echo_server() -> Iterator[EchoServer]:
    state = EchoServer()

    async def chat(request: Request) -> Response:
        await request.body()
        await asyncio.sleep(0.002)  # so that many requests overlap
        return JSONResponse(completion(request.headers.get("authorization", "").removeprefix("Bearer ")))

    async def control(request: Request) -> Response:
        raw = await request.body()
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        state.calls.append(
            (
                request.method,
                str(request.url.path),
                bearer,
                json.loads(raw) if raw else dict(request.query_params),
            )
        )
        if state.refuse_with is not None:
            status, body = state.refuse_with
            return JSONResponse(body, status_code=status)
        if request.url.path == "/episodes" and request.method == "POST":
            return JSONResponse({"id": "e1", "key": "ep-1", "base_url": f"{state.url}/e/ep-1/v1"})
        return JSONResponse({"episodes": [], "version": 3})

    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/e/{key}/v1/chat/completions", chat, methods=["POST"]),
        Route("/{path:path}", control, methods=["GET", "POST"]),
    ]
    config = uvicorn.Config(Starlette(routes=routes), port=0, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    state.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    yield state
    server.should_exit = True
    thread.join(timeout=10)


@pytest.fixture
def echo(echo_server: EchoServer, monkeypatch: pytest.MonkeyPatch) -> EchoServer:
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "AREAL_AGENTS_EPISODE_ID"):
        monkeypatch.delenv(name, raising=False)
    echo_server.calls.clear()
    echo_server.refuse_with = None
    return echo_server
