"""A client of SGLang's native HTTP protocol, for the real server and the embedded one alike.

Token ids are checked before they are sent: one outside the vocabulary ends a real server. Every wait has a
time limit, and every answer is checked before it becomes a Completion.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
import numpy as np
import orjson

from areal_agents.core.completion import Completion, SamplingParams, TokenIds
from areal_agents.errors import EngineError, EngineRejected, EngineUnavailable
from areal_agents.inference.engine import ModelInfo, OnTokens, PauseMode, version_from_wire
from areal_agents.inference.sse import EventReader
from areal_agents.inference.wire import (
    StreamedCompletion,
    as_object,
    completion_from_wire,
    error_of,
    sampling_to_wire,
    shorten,
)

log = logging.getLogger(__name__)

JSON = {"Content-Type": "application/json"}
# Below the 5 s after which SGLang's server closes an idle connection: a call must not meet the closing.
KEEP_ALIVE_S = 3.0
END_WAIT_S = 1.0  # longest wait for a stream's end after its last event
ABORT_WAIT_S = 5.0  # longest wait, when closing, for the aborts of cancelled calls
DONE = b"[DONE]"  # what follows the last chunk of a stream


class SGLangEngine:
    """One SGLang server; implements `engine.Engine`.

    Args:
        base_url: for example http://127.0.0.1:30000.
        request_timeout_s: longest wait for one completion.
        control_timeout_s: longest wait for anything else, a weight update included.
        connect_timeout_s: longest wait for a connection.
        vocab_size: where the server does not say and its model folder is not readable from here.
    """

    def __init__(
        self,
        base_url: str,
        *,
        request_timeout_s: float = 600.0,
        control_timeout_s: float = 120.0,
        connect_timeout_s: float = 10.0,
        vocab_size: int | None = None,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url must start with http:// or https://, got {base_url!r}")
        self.base_url = base_url.rstrip("/")
        self._request_timeout = aiohttp.ClientTimeout(total=request_timeout_s, sock_connect=connect_timeout_s)
        self._control_timeout = aiohttp.ClientTimeout(total=control_timeout_s, sock_connect=connect_timeout_s)
        self._vocab_size = vocab_size
        self._paused: PauseMode | None = None
        self._session: aiohttp.ClientSession | None = None
        self._aborts: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> SGLangEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def generate(
        self, rid: str, input_ids: TokenIds, sampling: SamplingParams, on_tokens: OnTokens | None = None
    ) -> Completion:
        """See Engine.generate."""
        await self._check_ids(input_ids)
        body = {
            "rid": rid,
            "input_ids": np.ascontiguousarray(input_ids),
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": on_tokens is not None,
            "sampling_params": sampling_to_wire(sampling),
        }
        if sampling.top_logprobs:
            body["top_logprobs_num"] = sampling.top_logprobs
        try:
            if on_tokens is not None:
                return await self._generate_streamed(body, on_tokens)
            answer = await self._call("POST", "/generate", body, self._request_timeout)
        except (EngineRejected, EngineUnavailable):
            raise
        except (asyncio.CancelledError, Exception):
            # A real server looks for closed connections every 4 s only, and samples on until then.
            task = asyncio.create_task(self._abort_left(rid))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)
            raise
        return completion_from_wire(answer)

    async def abort(self, rid: str) -> None:
        """See Engine.abort."""
        await self._call("POST", "/abort_request", {"rid": rid})

    async def pause(self, mode: PauseMode) -> None:
        """See Engine.pause."""
        await self._call("POST", "/pause_generation", {"mode": mode})
        self._paused = mode

    async def resume(self) -> None:
        """See Engine.resume."""
        await self._call("POST", "/continue_generation", {})
        self._paused = None

    async def update_weights_from_disk(self, path: str, version: int) -> None:
        """See Engine.update_weights_from_disk."""
        body = {
            "model_path": path,
            "weight_version": str(version),
            # Requests frozen in place need their keys and values: the server refuses to flush under them.
            "flush_cache": self._paused != "in_place",
        }
        answer = await self._call("POST", "/update_weights_from_disk", body)
        if not (isinstance(answer, dict) and answer.get("success")):
            raise EngineError(f"{self.base_url} did not take the weights at {path}: {shorten(str(answer))}")

    async def health(self) -> None:
        """See Engine.health."""
        await self._call("GET", "/health")

    async def model_info(self) -> ModelInfo:
        """See Engine.model_info. What SGLang leaves out is read from the model folder's config.json."""
        info = as_object(await self._call("GET", "/model_info"), "/model_info")
        path = info.get("model_path")
        if not isinstance(path, str):
            raise EngineError(f"{self.base_url}/model_info names no model_path: {shorten(str(info))}")
        config = _local_config(path)
        vocab_size = self._vocab_size or info.get("vocab_size") or config.get("vocab_size")
        context = (
            info.get("context_length")
            or await self._context_length()
            or config.get("max_position_embeddings")
        )
        if not isinstance(vocab_size, int) or not isinstance(context, int):
            raise EngineError(
                f"{self.base_url} does not say its vocabulary or context size, and {path}/config.json "
                "is not readable from here; give vocab_size"
            )
        version = version_from_wire(info.get("weight_version", "default"))
        return ModelInfo(path, version, vocab_size, context, str(info.get("kernel", "")))

    async def busy_s(self) -> float | None:
        """See Engine.busy_s. The embedded engine counts, SGLang does not."""
        answer = as_object(await self._call("GET", "/server_info"), "/server_info")
        value = answer.get("busy_s")
        return float(value) if isinstance(value, int | float) else None

    async def aclose(self) -> None:
        """See Engine.aclose."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=ABORT_WAIT_S)
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _generate_streamed(self, body: Any, on_tokens: OnTokens) -> Completion:
        whole = StreamedCompletion()
        async with aclosing(self._events("/generate", body)) as batches:
            async for events in batches:
                # A cumulative chunk holds the ones before it: of many that have arrived, the last is enough.
                for event in events[-1:] if whole.cumulative else events:
                    new = whole.feed(event)
                    if new is not None:
                        on_tokens(new)
        if not whole.finished:
            raise EngineUnavailable(
                f"{self.base_url}/generate ended its stream before the completion finished"
            )
        return whole.completion()

    async def _abort_left(self, rid: str) -> None:
        try:
            await self.abort(rid)
        except EngineError as error:  # nobody waits for the answer; the server ends it a little later
            log.warning("the generation %s, whose caller has left, could not be aborted: %s", rid, error)

    async def _context_length(self) -> int | None:
        answer = as_object(await self._call("GET", "/server_info"), "/server_info")
        value = answer.get("context_length")
        return value if isinstance(value, int) else None

    async def _check_ids(self, input_ids: TokenIds) -> None:
        if self._vocab_size is None:
            self._vocab_size = (await self.model_info()).vocab_size
        if not len(input_ids):
            raise EngineRejected("input_ids is empty")
        low, high = int(np.min(input_ids)), int(np.max(input_ids))
        if low < 0 or high >= self._vocab_size:
            wrong = low if low < 0 else high
            raise EngineRejected(f"token id {wrong} is outside the engine's vocabulary of {self._vocab_size}")

    async def _call(
        self, method: str, path: str, body: Any = None, timeout: aiohttp.ClientTimeout | None = None
    ) -> Any:
        """One request; the parsed JSON, None for an empty body, or an error of the tree."""
        url = self.base_url + path
        timeout = timeout or self._control_timeout
        with _mapped_errors(url, timeout):
            async with self._open(method, url, body, timeout) as response:
                raw, status = await response.read(), response.status
        if (error := error_of(url, status, raw)) is not None:
            raise error
        if not raw:
            return None
        try:
            return orjson.loads(raw)
        except ValueError:
            return raw.decode(errors="replace")  # /flush_cache and /health answer in words

    async def _events(self, path: str, body: Any) -> AsyncGenerator[list[bytes], None]:
        """The events of a streamed answer, in the batches in which they arrive, without the last, [DONE]."""
        url, timeout, reader = self.base_url + path, self._request_timeout, EventReader()
        with _mapped_errors(url, timeout):
            async with self._open("POST", url, body, timeout) as response:
                if (error := error_of(url, response.status, b"")) is not None:
                    raise error_of(url, response.status, await response.read()) or error
                async for received in response.content.iter_any():
                    events = reader.feed(received)
                    done = bool(events) and events[-1] == DONE
                    if events[: len(events) - done]:
                        yield events[: len(events) - done]
                    if done:
                        await _finish(response)
                        return

    def _open(
        self, method: str, url: str, body: Any, timeout: aiohttp.ClientTimeout
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        if self._session is None:
            # No limit on connections: how many calls are in flight is the caller's admission to decide.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            )
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        return self._session.request(method, url, data=data, headers=JSON, timeout=timeout)


async def _finish(response: aiohttp.ClientResponse) -> None:
    """Read to the end, which follows at once, so that the connection can be used again."""
    with suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(END_WAIT_S):
            await response.read()


@contextmanager
def _mapped_errors(url: str, timeout: aiohttp.ClientTimeout) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise EngineUnavailable(f"{url} did not answer within {timeout.total:g} s") from error
    except aiohttp.ClientError as error:
        raise EngineUnavailable(f"{url} is not reachable: {error}") from error


def _local_config(path: str) -> dict[str, Any]:
    file = Path(path) / "config.json"
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text())
    except ValueError:
        return {}
    return config if isinstance(config, dict) else {}
