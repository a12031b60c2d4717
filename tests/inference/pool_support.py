"""Scripted engines whose tokens are known in advance, and servers that can be killed and restarted."""

from __future__ import annotations

import asyncio
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson
from starlette.types import Message, Receive, Scope, Send
from tokenizers import Tokenizer

from areal_agents.core.completion import Completion, SamplingParams, TokenChunk, TokenIds, as_token_ids
from areal_agents.errors import EngineError, EngineUnavailable
from areal_agents.inference import SGLangEngine
from areal_agents.inference.engine import ModelInfo, OnTokens
from areal_agents.inference.pool import CurrentVersion, EnginePool, PoolLimits
from areal_agents.inference.ports import reserved_ports
from areal_agents.sockets import listen, url_of
from areal_agents.testing import ScriptedApp, ScriptedCall, ScriptedReply, ServedCall
from areal_agents.testing.server import build_server
from areal_agents.testing.wire import version_spans

MODEL = Path(__file__).parents[2] / "examples" / "search_agent" / "model"
TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
# Delay between two tokens: the last of hundreds of tokens arrives long after any action of a test, even on a
# machine that stalls.
SLOW_S = 0.05
# Limits that are short enough for tests.
QUICK = PoolLimits(
    probe_every_s=0.05,
    probe_timeout_s=5.0,
    probe_again_s=0.02,
    wait_s=30.0,
    load_again_s=0.05,
    unread_interval=1,  # the tests kill engines between two tokens
)


def ports_of_this_process() -> Iterator[int]:
    """Yield ports that no other process gets, also while the server of a port is dead."""
    with ExitStack() as held:
        while True:
            yield from held.enter_context(reserved_ports(20))  # many at once, because a call takes 0.03 s


PORTS = ports_of_this_process()


def next_token(ids: Sequence[int]) -> int:
    """Return the token that follows `ids`; a completion is thus the same in one attempt and in several."""
    return 300 + zlib.crc32(np.asarray(ids, np.int32).tobytes()) % 50_000 % 400


def chain(prompt: Sequence[int], count: int) -> list[int]:
    """Return the `count` tokens that follow a prompt."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


def text_of(ids: Sequence[int]) -> str:
    """Return the text of token ids, with special tokens."""
    return TOKENIZER.decode(list(ids), skip_special_tokens=False)


@dataclass
class Part:
    """One attempt of a `PlayedEngine`: it samples at most `tokens` tokens and then ends as `end` says.

    `versions` are the versions of its first tokens; further tokens have the last one. Its chunks contain the
    versions of the first `told` tokens only. It streams `chunk` tokens at a time.
    """

    tokens: int
    end: Literal["length", "stop", "abort", "lost", "garbage"] = "abort"
    versions: tuple[int, ...] = (0,)
    told: int = 1_000_000
    chunk: int = 1

    def version(self, index: int) -> int:
        return self.versions[min(index, len(self.versions) - 1)]


@dataclass
class PlayedEngine:
    """Plays its parts one after another, the last one repeatedly, and records the requests."""

    parts: list[Part]
    asked: list[tuple[str, list[int], SamplingParams]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    on_part: Callable[[int], Any] = lambda index: None

    async def generate(
        self,
        rid: str,
        input_ids: TokenIds,
        sampling: SamplingParams,
        on_tokens: OnTokens | None = None,
        *,
        affinity: str = "",
        stream_interval: int = 1,
    ) -> Completion:
        part = self.parts[min(len(self.asked), len(self.parts) - 1)]
        self.asked.append((rid, input_ids.tolist(), sampling))
        ids = chain(input_ids.tolist(), min(part.tokens, sampling.max_new_tokens))
        logprobs = [-(token % 32) / 8 for token in ids]
        versions = [part.version(index) for index in range(len(ids))]
        top = tuple(((token, -0.5), (7, -2.0)) for token in ids) if sampling.top_logprobs else ()
        for start in range(0, len(ids), part.chunk) if on_tokens is not None else ():
            end = min(start + part.chunk, len(ids))
            told = [v if i < part.told else -1 for i, v in enumerate(versions)][start:end]
            assert on_tokens is not None
            on_tokens(
                TokenChunk(tuple(ids[start:end]), tuple(logprobs[start:end]), top[start:end], tuple(told))
            )
            await asyncio.sleep(0)
        await asyncio.ensure_future(self._told(len(self.asked) - 1))
        if part.end == "lost":
            raise EngineUnavailable("the connection is lost")
        if part.end == "garbage":
            raise EngineError("an answer that cannot be read")
        reason = part.end if part.end != "length" or len(ids) == sampling.max_new_tokens else "abort"
        return Completion(ids, logprobs, versions, reason, top)  # type: ignore[arg-type]

    async def _told(self, index: int) -> None:
        found = self.on_part(index)
        if asyncio.iscoroutine(found):
            await found

    async def abort(self, rid: str) -> None:
        self.aborted.append(rid)

    async def health(self) -> None:
        return None

    async def model_info(self) -> ModelInfo:
        played = self.parts[: len(self.asked)]
        version = max((version for part in played for version in part.versions), default=0)
        return ModelInfo("models/policy", version, 2048, 4096)

    async def busy_s(self) -> float | None:
        return None

    async def aclose(self) -> None:
        return None


class ReplicaServer:
    """A scripted engine on a real socket, which can be killed and restarted on the same port.

    `spoil` returns the bytes of each streamed chunk; if it raises an exception, the connection breaks. With
    `spans`, a chunk contains the version of each of its tokens, as with the embedded engine; the chunks of
    SGLang contain only the latest version.
    """

    def __init__(
        self, *, chunk_delay_s: float = 0.002, chunk_tokens: int = 1, spans: bool = False, **options: Any
    ) -> None:
        self.exchanges: list[ServedCall] = []  # kept over restarts
        self.chunk_delay_s = chunk_delay_s
        self._chunk_tokens = chunk_tokens
        self._spans = spans
        self._options = options
        self._port = next(PORTS)
        self.spoil: Callable[[dict[str, Any]], bytes] | None = None
        self.is_alive = False
        self._open = threading.Event()
        self._open.set()
        self._thread: threading.Thread | None = None
        self.app: ScriptedApp
        self.url = ""
        self.start()

    def start(self, **options: Any) -> None:
        """Start the server, with the version "default"."""
        if self._thread is not None:
            self._thread.join(30)  # after a crash it may still be exiting
        self.app = ScriptedApp.from_folder(MODEL, self._answer, **self._options | options)
        self.app.exchanges = self.exchanges
        listener = listen("127.0.0.1", self._port)
        self.url = url_of(listener)

        async def spoiling(scope: Scope, receive: Receive, send: Send) -> None:
            async def spoiled(message: Message) -> None:
                body = message.get("body", b"")
                if body.startswith(b"data: {") and (self.spoil is not None or self._spans):
                    message = {**message, "body": self._written(orjson.loads(body[6:]))}
                await send(message)

            # the connection was accepted while the server crashed, so it breaks too
            if not self.is_alive and scope["type"] == "http":
                self._break_connections()
                return
            await self.app(scope, receive, spoiled)

        self._server = build_server(spoiling)
        self._loop: asyncio.AbstractEventLoop | None = None
        started = threading.Event()

        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            self.is_alive = True
            self._loop.call_soon(started.set)
            with listener:
                await self._server.serve(sockets=[listener])

        self._thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        self._thread.start()
        assert started.wait(30)
        while not self._server.started:
            assert self._thread.is_alive()
            time.sleep(0.001)

    def kill(self) -> None:
        """End the server as kill -9 does: every connection breaks, and nothing listens on its port."""
        assert self._loop is not None and self._thread is not None
        thread = self._thread  # a task of the test may restart the server as soon as it is dead
        self._loop.call_soon_threadsafe(self.crash)
        thread.join(30)
        assert not thread.is_alive()

    def crash(self) -> None:
        """End the server in the same way; must be called on its event loop."""
        for server in self._server.servers:
            server.close()
        self._break_connections()
        self._server.should_exit = self._server.force_exit = True
        self.is_alive = False

    def _break_connections(self) -> None:
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Within the block, the server listens but does nothing else."""
        self._open.clear()
        self.do(lambda: self._open.wait(30))
        try:
            yield
        finally:
            self._open.set()

    def _written(self, chunk: dict[str, Any]) -> bytes:
        running = self.app._running.get(chunk["meta_info"]["id"])
        if self._spans and running is not None:
            chunk["meta_info"]["weight_versions"] = version_spans(running.versions)
        return b"data: " + orjson.dumps(chunk) + b"\n\n" if self.spoil is None else self.spoil(chunk)

    def hurry(self) -> None:
        """Send all running and future completions without delays."""
        self.chunk_delay_s = 0.0

        def all_at_once() -> None:
            for generation in self.app._running.values():
                generation.reply = replace(generation.reply, chunk_delay_s=0.0)

        if self.is_alive:
            self.do(all_at_once)

    def do(self, action: Callable[[], Any]) -> None:
        """Call a function on the event loop of the server."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(action)

    def _answer(self, call: ScriptedCall) -> ScriptedReply:
        count = call.body["sampling_params"]["max_new_tokens"]
        ids = chain(call.input_ids.tolist(), count)
        return ScriptedReply(
            token_ids=tuple(ids),
            finish="length",
            chunk_delay_s=self.chunk_delay_s,
            chunk_tokens=self._chunk_tokens,
        )


class Rows:
    """Replaces the store: the published version, and whether a trainer is running."""

    def __init__(self) -> None:
        self.current: CurrentVersion | None = None
        self.trainer_lives = True

    def without_trainer(self) -> nullcontext[bool]:
        return nullcontext(not self.trainer_lives)

    def publish(self, version: int) -> CurrentVersion:
        self.current = CurrentVersion(version, f"/weights/v{version}")
        return self.current

    def __call__(self) -> CurrentVersion | None:
        return self.current


def pool_of(
    servers: Sequence[ReplicaServer], rows: Rows | None = None, limits: PoolLimits = QUICK, **options: Any
) -> EnginePool:
    """Return a pool over real clients of the servers."""
    urls = [server.url for server in servers]
    engines = [SGLangEngine(url, control_timeout_s=5) for url in urls]
    rows = rows or Rows()
    return EnginePool(
        engines,
        names=urls,
        current=rows,
        without_trainer=rows.without_trainer,
        decode=text_of,
        limits=limits,
        **options,
    )


def reached(pool: EnginePool, rid: str) -> int:
    """Return how many tokens of a running request the pool has received; 0 if the request is not running."""
    return pool._unfinished[rid][0].reached if rid in pool._unfinished else 0


def check_drawn(prompt: TokenIds, completion: Completion, exchanges: Sequence[ServedCall]) -> None:
    """Check that an engine sampled every token of a completion after exactly the tokens that precede it, with
    the same logprob and version."""
    ids = completion.token_ids.tolist()
    assert ids == chain(prompt.tolist(), len(ids))
    reached = {0}
    for start in range(len(ids)):
        if start not in reached:
            continue
        for exchange in exchanges:
            if exchange.input_ids.tolist() != [*prompt.tolist(), *ids[:start]]:
                continue
            for index in range(min(len(exchange.token_ids), len(ids) - start)):
                version = exchange.versions[index]
                same = (
                    exchange.token_ids[index] == ids[start + index]
                    and np.float32(exchange.logprobs[index]) == completion.logprobs[start + index]
                    and int(version if version != "default" else 0) == completion.versions[start + index]
                )
                if not same:
                    break
                reached.add(start + index + 1)
    assert len(ids) in reached, f"no engine sampled token {max(reached)} in this way"


def prompt_of(seed: int, length: int = 12) -> TokenIds:
    """Return random ids of the model's vocabulary."""
    return as_token_ids(np.random.default_rng(seed).integers(300, 700, length))
