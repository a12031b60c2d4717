"""A proxy on a real server, and a client of a real engine that records its calls."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvicorn
import uvloop
from openai import OpenAI
from scripted_sampler import EngineCall, ScriptedSampler

from areal_agents.core.completion import Completion, SamplingParams, TokenChunk, TokenIds
from areal_agents.inference import SGLangEngine
from areal_agents.proxy import ProxyConfig, create_app
from areal_agents.proxy.page import Page
from areal_agents.proxy.server import build_server
from areal_agents.proxy.traces import Traces
from areal_agents.rendering import ChatRenderer
from areal_agents.sockets import listen, url_of
from areal_agents.store import Store

MODEL = Path(__file__).parents[2] / "examples" / "search_agent" / "model"
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the corpus.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}


def tool_call(**arguments: Any) -> str:
    """Return the markup of one call of `search`."""
    return "<tool_call>\n" + json.dumps({"name": "search", "arguments": arguments}) + "\n</tool_call>"


class RecordingEngine(SGLangEngine):
    """The real client of a real engine; `calls` has every request with its completion."""

    def __init__(self, url: str, renderer: ChatRenderer) -> None:
        super().__init__(url)
        self.renderer = renderer
        self.calls: list[EngineCall] = []

    async def generate(
        self,
        rid: str,
        input_ids: TokenIds,
        sampling: SamplingParams,
        on_tokens: Callable[[TokenChunk], None] | None = None,
        *,
        affinity: str = "",
        stream_interval: int = 1,
    ) -> Completion:
        call = EngineCall(rid, np.array(input_ids), sampling, streamed=on_tokens is not None)
        self.calls.append(call)
        call.completion = await super().generate(
            rid, input_ids, sampling, on_tokens, stream_interval=stream_interval
        )
        return call.completion


@dataclass
class RunningProxy:
    """A running proxy; `http` is a plain HTTP client of it."""

    url: str
    engine: Any  # ScriptedSampler or RecordingEngine
    store: Store
    http: httpx.Client

    def open_episode(self, **body: Any) -> dict[str, Any]:
        """POST /episodes."""
        response = self.http.post("/episodes", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def openai(self, episode: dict[str, Any] | None = None, **options: Any) -> OpenAI:
        """Return the real client, with the base_url of an episode or of the proxy itself."""
        base_url = episode["base_url"] if episode else f"{self.url}/v1"
        key = episode["key"] if episode else "any"
        return OpenAI(**{"base_url": base_url, "api_key": key, "max_retries": 0, **options})

    def tokens(self, episode: dict[str, Any]) -> dict[str, Any]:
        """GET /episodes/{id}?tokens=1."""
        response = self.http.get(f"/episodes/{episode['id']}", params={"tokens": 1})
        assert response.status_code == 200, response.text
        return response.json()


@contextmanager
def running_proxy(
    store_path: Path,
    engine: ScriptedSampler | RecordingEngine,
    *,
    headers: dict[str, str] | None = None,
    page: Page | None = None,
    traces: Traces | None = None,
    **config: Any,
) -> Iterator[RunningProxy]:
    """Run a proxy on a real uvicorn server in a thread. No episode is sealed when the proxy stops."""
    settings = ProxyConfig(**config)
    with Store.open(store_path) as store, listen("127.0.0.1", 0) as listener:
        servers: list[uvicorn.Server] = []
        made = page and page.make(admin_key=settings.admin_key, is_stopping=lambda: servers[0].should_exit)
        app = create_app(
            store=store, engine=engine, renderer=engine.renderer, config=settings, page=made, traces=traces
        )
        server = build_server(app, max_message_bytes=settings.max_body_bytes)
        servers.append(server)
        server.config.timeout_graceful_shutdown = 1

        def run() -> None:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(server.serve(sockets=[listener]))
                runner.run(engine.aclose())

        url = url_of(listener)
        thread = threading.Thread(target=run)
        thread.start()
        try:
            with httpx.Client(base_url=url, timeout=30, headers=headers) as http:
                assert http.get("/health").status_code == 200
                yield RunningProxy(url, engine, store, http)
        finally:
            server.should_exit = True
            thread.join()


def schemas_in(tag: Any) -> list[Any]:
    """Return the JSON schemas within a structural tag."""
    if isinstance(tag, list):
        return [schema for item in tag for schema in schemas_in(item)]
    if not isinstance(tag, dict):
        return []
    if tag.get("type") == "json_schema":
        return [tag["json_schema"]]
    return [schema for value in tag.values() for schema in schemas_in(value)]
