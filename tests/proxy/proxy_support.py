"""Engines that remember everything, and the proxy on a real server before them."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvloop
from openai import OpenAI

from areal_agents.core.completion import Completion, FinishReason, SamplingParams, TokenChunk, TokenIds
from areal_agents.inference import ModelInfo, PauseMode, SGLangEngine
from areal_agents.proxy import ProxyConfig, create_app
from areal_agents.proxy.server import build_server, listen, url_of
from areal_agents.rendering import ChatRenderer
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
    """The markup of one call of `search`."""
    return "<tool_call>\n" + json.dumps({"name": "search", "arguments": arguments}) + "\n</tool_call>"


@dataclass
class EngineCall:
    """One generation, as the engine saw it."""

    rid: str
    input_ids: TokenIds
    sampling: SamplingParams
    completion: Completion | None = None
    streamed: bool = False


Script = Callable[[EngineCall], str | list[int] | Completion | Exception]


@dataclass
class ScriptedEngine:
    """Speaks the Engine protocol in the process. A reply given as text gets the model's stop token.

    Each reply takes `delay_s`, unless `hurry` is set meanwhile: also from another thread.
    """

    renderer: ChatRenderer
    script: Script = lambda call: "ok"
    max_context: int = 4096
    version: int = 0
    delay_s: float = 0.0
    hurry: threading.Event = field(default_factory=threading.Event)
    token_delay_s: float = 0.0
    seed: int = 0
    calls: list[EngineCall] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    running: int = 0
    most_running: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    async def generate(
        self,
        rid: str,
        input_ids: TokenIds,
        sampling: SamplingParams,
        on_tokens: Callable[[TokenChunk], None] | None = None,
        *,
        affinity: str = "",
    ) -> Completion:
        call = EngineCall(rid, np.array(input_ids), sampling, streamed=on_tokens is not None)
        self.calls.append(call)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self._delay()
            answer = self.script(call)
        except asyncio.CancelledError:
            self.cancelled.append(rid)
            raise
        finally:
            self.running -= 1
        if isinstance(answer, Exception):
            raise answer
        call.completion = answer if isinstance(answer, Completion) else self._completion(answer, sampling)
        if on_tokens is not None:
            await self._stream(call.completion, on_tokens)
        return call.completion

    async def _delay(self) -> None:
        clock = asyncio.get_running_loop().time
        end = clock() + self.delay_s
        await asyncio.sleep(0)
        while (left_s := end - clock()) > 0 and not self.hurry.is_set():
            await asyncio.sleep(min(left_s, 0.005))

    async def _stream(self, completion: Completion, on_tokens: Callable[[TokenChunk], None]) -> None:
        ids, logprobs = completion.token_ids.tolist(), completion.logprobs.tolist()
        start = 0
        while start < len(ids):
            end = start + self.rng.randrange(1, 4)
            on_tokens(TokenChunk(tuple(ids[start:end]), tuple(logprobs[start:end])))
            start = end
            await asyncio.sleep(self.token_delay_s)

    def _completion(self, answer: str | list[int], sampling: SamplingParams) -> Completion:
        ids = list(answer) if isinstance(answer, list) else self.renderer.tokenizer.encode(answer)
        if isinstance(answer, str):
            ids.append(self.renderer.stop_token_ids[0])
        reason: FinishReason = "stop" if ids and ids[-1] in self.renderer.stop_token_ids else "length"
        if len(ids) > sampling.max_new_tokens:
            ids, reason = ids[: sampling.max_new_tokens], "length"
        logprobs = [-self.rng.random() * 5 for _ in ids]
        return Completion(ids, logprobs, [self.version] * len(ids), reason)

    async def abort(self, rid: str) -> None:
        raise AssertionError("the proxy aborts by cancelling")

    async def pause(self, mode: PauseMode) -> None:
        raise AssertionError("only the trainer pauses")

    async def resume(self) -> None:
        raise AssertionError("only the trainer resumes")

    async def update_weights_from_disk(self, path: str, version: int) -> None:
        raise AssertionError("only the trainer swaps weights")

    async def health(self) -> None:
        return None

    async def model_info(self) -> ModelInfo:
        return ModelInfo("models/policy", self.version, self.renderer.vocab_size, self.max_context)

    async def aclose(self) -> None:
        return None


class RecordingEngine(SGLangEngine):
    """The real client of a real engine; it remembers what was sent and what came back."""

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
    ) -> Completion:
        call = EngineCall(rid, np.array(input_ids), sampling, streamed=on_tokens is not None)
        self.calls.append(call)
        call.completion = await super().generate(rid, input_ids, sampling, on_tokens)
        return call.completion


@dataclass
class RunningProxy:
    """A served proxy: `http` is a plain client of its control API."""

    url: str
    engine: Any  # ScriptedEngine or RecordingEngine
    store: Store
    http: httpx.Client

    def open_episode(self, **body: Any) -> dict[str, Any]:
        """POST /episodes."""
        response = self.http.post("/episodes", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def openai(self, episode: dict[str, Any] | None = None, **options: Any) -> OpenAI:
        """The real client, on an episode's base_url or on the bare proxy."""
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
    engine: ScriptedEngine | RecordingEngine,
    *,
    headers: dict[str, str] | None = None,
    **config: Any,
) -> Iterator[RunningProxy]:
    """A proxy on a real uvicorn server in a thread. Leaving it seals nothing."""
    settings = ProxyConfig(**config)
    with Store.open(store_path) as store, listen("127.0.0.1", 0) as listener:
        app = create_app(store=store, engine=engine, renderer=engine.renderer, config=settings)
        server = build_server(app)
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
    """The JSON schemas within a structural tag."""
    if isinstance(tag, list):
        return [schema for item in tag for schema in schemas_in(item)]
    if not isinstance(tag, dict):
        return []
    if tag.get("type") == "json_schema":
        return [tag["json_schema"]]
    return [schema for value in tag.values() for schema in schemas_in(value)]
