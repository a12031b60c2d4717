"""A client of SGLang's native HTTP protocol, for the real server and the embedded one alike.

Token ids are checked before they are sent: one outside the vocabulary ends a real server. Every wait has a
time limit, and every answer is checked before it becomes a Completion.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
import numpy as np
import orjson

from areal_agents.core.completion import Completion, FinishReason, SamplingParams, TokenIds
from areal_agents.errors import EngineError, EngineRejected, EngineUnavailable
from areal_agents.inference.engine import ModelInfo, PauseMode, version_from_wire

log = logging.getLogger(__name__)

FINISH_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
JSON = {"Content-Type": "application/json"}
# Below the 5 s after which SGLang's server closes an idle connection: a call must not meet the closing.
KEEP_ALIVE_S = 3.0
ABORT_WAIT_S = 5.0  # longest wait, when closing, for the aborts of cancelled calls
MESSAGE_LIMIT = 300  # characters of a server's error text that are passed on


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

    async def generate(self, rid: str, input_ids: TokenIds, sampling: SamplingParams) -> Completion:
        """See Engine.generate."""
        await self._check_ids(input_ids)
        body = {
            "rid": rid,
            "input_ids": np.ascontiguousarray(input_ids),
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": False,
            "sampling_params": sampling_to_wire(sampling),
        }
        try:
            answer = await self._call("POST", "/generate", body, self._request_timeout)
        except asyncio.CancelledError:
            # A real server looks for closed connections every 4 s only, and samples on until then.
            task = asyncio.create_task(self._abort_cancelled(rid))
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
            raise EngineError(f"{self.base_url} did not take the weights at {path}: {_shorten(str(answer))}")

    async def health(self) -> None:
        """See Engine.health."""
        await self._call("GET", "/health")

    async def model_info(self) -> ModelInfo:
        """See Engine.model_info. What SGLang leaves out is read from the model folder's config.json."""
        info = _as_object(await self._call("GET", "/model_info"), "/model_info")
        path = info.get("model_path")
        if not isinstance(path, str):
            raise EngineError(f"{self.base_url}/model_info names no model_path: {_shorten(str(info))}")
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

    async def aclose(self) -> None:
        """See Engine.aclose."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=ABORT_WAIT_S)
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _abort_cancelled(self, rid: str) -> None:
        try:
            await self.abort(rid)
        except EngineError as error:  # nobody waits for the answer; the server ends it a little later
            log.warning("the cancelled generation %s could not be aborted: %s", rid, error)

    async def _context_length(self) -> int | None:
        answer = _as_object(await self._call("GET", "/server_info"), "/server_info")
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
        if self._session is None:
            # No limit on connections: how many calls are in flight is the caller's admission to decide.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            )
        timeout = timeout or self._control_timeout
        url = self.base_url + path
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        try:
            async with self._session.request(
                method, url, data=data, headers=JSON, timeout=timeout
            ) as response:
                raw, status = await response.read(), response.status
        except TimeoutError as error:
            raise EngineUnavailable(f"{url} did not answer within {timeout.total:g} s") from error
        except aiohttp.ClientError as error:
            raise EngineUnavailable(f"{url} is not reachable: {error}") from error
        if 400 <= status < 500:
            raise EngineRejected(f"{url} refused the request ({status}): {_message(raw)}")
        if status != 200:
            raise EngineUnavailable(f"{url} answered {status}: {_message(raw)}")
        if not raw:
            return None
        try:
            return orjson.loads(raw)
        except ValueError:
            return raw.decode(errors="replace")  # /flush_cache and /health answer in words


def sampling_to_wire(sampling: SamplingParams) -> dict[str, Any]:
    """SGLang's sampling_params; what is at its default is left out where the defaults agree."""
    wire: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "ignore_eos": sampling.ignore_eos,
    }
    if sampling.frequency_penalty:
        wire["frequency_penalty"] = sampling.frequency_penalty
    if sampling.presence_penalty:
        wire["presence_penalty"] = sampling.presence_penalty
    if sampling.stop:
        wire["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        wire["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.seed is not None:
        wire["sampling_seed"] = sampling.seed
    return wire


def completion_from_wire(answer: Any) -> Completion:
    """A /generate answer as a Completion; EngineError if ids, logprobs and versions do not fit together."""
    meta = _as_object(_as_object(answer, "/generate").get("meta_info"), "/generate meta_info")
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else reason
    if not isinstance(kind, str) or kind not in FINISH_REASONS:
        raise EngineError(
            f"/generate ended with finish_reason {reason!r}; expected one of {sorted(FINISH_REASONS)}"
        )
    try:
        ids = [int(i) for i in answer["output_ids"]]
        triples = meta["output_token_logprobs"] if ids else []
        if [int(triple[1]) for triple in triples] != ids:
            raise EngineError(
                f"/generate returned {len(ids)} ids and logprobs of {len(triples)} other tokens"
            )
        return Completion(
            token_ids=ids,  # type: ignore[arg-type]
            logprobs=[float(triple[0]) for triple in triples],  # type: ignore[arg-type]
            versions=_versions(meta, len(ids)),
            finish_reason=FINISH_REASONS[kind],
        )
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise EngineError(f"/generate returned an answer that cannot be read: {error!r}") from error


def _versions(meta: Mapping[str, Any], count: int) -> np.ndarray:
    """[count] version of each token, from the spans, or from weight_version where a server has no spans."""
    spans = meta.get("weight_versions")
    if not spans:
        return np.full(count, version_from_wire(meta.get("weight_version", "default")), np.int32)
    versions = np.full(count, -1, np.int32)
    for span in spans:
        versions[span["start"] : span["end"]] = version_from_wire(span["version"])
    if (versions < 0).any():
        raise EngineError(f"weight_versions {spans} do not cover the {count} tokens sampled")
    return versions


def _as_object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise EngineError(f"{what} is not a JSON object: {_shorten(str(value))}")
    return value


def _message(raw: bytes) -> str:
    """The error text of an answer in any of SGLang's forms."""
    try:
        body = orjson.loads(raw)
    except ValueError:
        return _shorten(raw.decode(errors="replace"))
    error = body.get("error", body.get("message", body)) if isinstance(body, dict) else body
    return _shorten(str(error.get("message", error) if isinstance(error, dict) else error))


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MESSAGE_LIMIT else line[: MESSAGE_LIMIT - 1] + "…"


def _local_config(path: str) -> dict[str, Any]:
    file = Path(path) / "config.json"
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text())
    except ValueError:
        return {}
    return config if isinstance(config, dict) else {}
