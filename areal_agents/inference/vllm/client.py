"""The client of vLLM's HTTP API, for servers that `environment/serve.py` has started.

Token ids are checked before they are sent. Every wait has a time limit, and every answer is checked before it
becomes a Completion.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np

from areal_agents.core.completion import Completion, SamplingParams, TokenIds
from areal_agents.errors import EngineError, EngineRejected, EngineUnavailable
from areal_agents.inference.adapter_calls import completion_under, with_served_adapter
from areal_agents.inference.answers import SentRequest, end_ids_of
from areal_agents.inference.encoded_ids import EncodedIds
from areal_agents.inference.engine import (
    ModelInfo,
    OnTokens,
    PromptScores,
    adapter_name,
    version_from_wire,
)
from areal_agents.inference.sglang.scoring import check_range
from areal_agents.inference.sglang.transport import HttpTransport
from areal_agents.inference.sglang.wire import as_object, shorten
from areal_agents.inference.vllm.control import VLLMControl
from areal_agents.inference.vllm.wire import (
    PATH,
    WIRE_ID,
    StreamedCompletion,
    completion_from_wire,
    request_to_wire,
    scores_from_wire,
    scoring_to_wire,
)

logger = logging.getLogger(__name__)

ABORT_WAIT_S = 5.0  # longest wait, when closing, for the aborts of cancelled calls
VERSION_WAIT_S = 2.0  # longest wait for the version: an update of weights keeps vLLM from answering


class VLLMEngine(VLLMControl):
    """One vLLM server; implements `engine.Engine`.

    Args:
        base_url: for example http://127.0.0.1:8000.
        request_timeout_s: longest wait for one completion.
        control_timeout_s: longest wait for anything else.
        update_timeout_s: longest wait for one step of an update of weights or adapters; the default is
            `control_timeout_s`.
        connect_timeout_s: longest wait for a connection.
        adapters: whether the policy is a LoRA adapter. Every call queries the version of the server and names
            the adapter of that version (none for version 0); all tokens of the call carry that version.
        decode: decodes token ids, including special tokens. If given, a completion that reports a stop string
            must contain it.
        key: the key of the server; "" if it has none.
    """

    def __init__(
        self,
        base_url: str,
        *,
        request_timeout_s: float = 600.0,
        control_timeout_s: float = 120.0,
        update_timeout_s: float | None = None,
        connect_timeout_s: float = 10.0,
        adapters: bool = False,
        decode: Callable[[Sequence[int]], str] | None = None,
        key: str = "",
    ) -> None:
        http = HttpTransport(base_url, connect_timeout_s=connect_timeout_s, key=key)
        super().__init__(
            http, control_timeout_s=control_timeout_s, update_timeout_s=update_timeout_s or control_timeout_s
        )
        self._request_timeout_s = request_timeout_s
        self._adapters = adapters
        self._decode = decode
        self._encoded = EncodedIds()
        self._info: ModelInfo | None = None  # the latest model info; None after the server was unreachable
        self._aborts: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> VLLMEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

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
        """See Engine.generate. The pieces of a stream have no versions: vLLM tells them at the end."""
        if sampling.routed_experts_from is not None:
            raise EngineRejected(f"{self.base_url}: routed experts are not supported with vLLM; use SGLang")
        info = await self._check_ids(input_ids)
        asked = SentRequest(
            sampling,
            info.vocab_size,
            len(input_ids),
            WIRE_ID + rid,
            most_tokens=info.effective_context,
            end_ids=info.end_ids,
            decode=self._decode,
        )
        interval = None if on_tokens is None else stream_interval
        body = request_to_wire(rid, input_ids, sampling, stream_interval=interval)
        body["token_ids"] = self._encoded.json(input_ids, affinity)
        if not self._adapters:
            return await self._generate(rid, body, on_tokens, asked)
        return await with_served_adapter(
            self.model_info, lambda version: self._generate_under(version, rid, body, on_tokens, asked)
        )

    async def score(
        self, rid: str, input_ids: TokenIds, *, start: int, top: int = 0, affinity: str = ""
    ) -> PromptScores:
        """See Sampler.score. P is at most `max_context` - 1, since vLLM samples one token."""
        info = await self._check_ids(input_ids)
        check_range(len(input_ids), start, top, info.vocab_size)
        body = scoring_to_wire(rid, input_ids, top)

        async def scored(version: int | None) -> PromptScores:
            named = {**body, "model": adapter_name(version)} if version else body
            with self._aborting(rid):
                answer = await self._http.call("POST", PATH, named, timeout_s=self._request_timeout_s)
            scores = scores_from_wire(answer, input_ids, start=start, top=top, vocab_size=info.vocab_size)
            return scores if version is None else replace(scores, version=version)

        if not self._adapters:
            return await scored(None)
        return await with_served_adapter(self.model_info, scored)

    def move_to(self, base_url: str) -> None:
        """Send every further request to another address, where the engine was started again.

        Requests that are under way stay where they are.
        """
        if base_url.rstrip("/") != self.base_url:
            self._http.base_url = base_url.rstrip("/")
            self._info = None

    async def abort(self, rid: str) -> None:
        """See Engine.abort."""
        await self._call("POST", "/abort_requests", {"request_ids": [WIRE_ID + rid]})

    async def health(self) -> None:
        """See Engine.health."""
        await self._call("GET", "/health")

    async def model_info(self) -> ModelInfo:
        """See Engine.model_info. While weights are loaded, the version is the one before."""
        try:
            version = await self._version()
            if self._info is None:
                self._info = await self._first_info(version)
        except EngineUnavailable:
            self._info = None
            raise  # the next answer may come from another server
        self._info = replace(self._info, version=version)
        return self._info

    async def busy_s(self) -> float | None:
        """See Engine.busy_s. vLLM does not count."""
        return None

    async def aclose(self) -> None:
        """See Engine.aclose."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=ABORT_WAIT_S)
        await super().aclose()

    async def _version(self) -> int:
        try:
            answer = await self._http.call("GET", "/weight_info", timeout_s=VERSION_WAIT_S)
        except EngineUnavailable:
            if self._info is None:
                answer = await self._call("GET", "/weight_info")
            else:
                # During an update the part of vLLM that knows the version does not answer, and this does.
                await self._http.call("GET", "/health", timeout_s=VERSION_WAIT_S)
                return self._info.version
        return version_from_wire(as_object(answer, "/weight_info").get("weight_version", "default"))

    async def _first_info(self, version: int) -> ModelInfo:
        found = await self._described()
        if found["logprobs_mode"] != "processed_logprobs":
            raise EngineError(
                f"{self.base_url} was started with --logprobs-mode {shorten(found['logprobs_mode'])}; use "
                "processed_logprobs, the logprobs of the distribution that tokens are sampled from"
            )
        if found["pipeline"] != 1:
            raise EngineError(
                f"{self.base_url} was started with pipeline or data parallelism, which is not supported; use "
                "tensor parallelism, and several servers"
            )
        path, context = found["model_path"], found["max_model_len"]
        return ModelInfo(
            path,
            version,
            found["vocab_size"],
            context,
            workers=found["workers"],
            architecture=found["model_type"],
            effective_context=context,
            end_ids=await asyncio.to_thread(end_ids_of, path),
        )

    async def _generate(
        self, rid: str, body: Any, on_tokens: OnTokens | None, asked: SentRequest
    ) -> Completion:
        with self._aborting(rid):
            if on_tokens is not None:
                return await self._generate_streamed(body, on_tokens, asked)
            answer = await self._http.call("POST", PATH, body, timeout_s=self._request_timeout_s)
            return completion_from_wire(answer, asked)

    async def _generate_streamed(self, body: Any, on_tokens: OnTokens, asked: SentRequest) -> Completion:
        whole = StreamedCompletion(asked)
        async with aclosing(self._http.events(PATH, body, timeout_s=self._request_timeout_s)) as batches:
            async for events in batches:
                for event in events:
                    new = whole.feed(event)
                    if new is not None:
                        on_tokens(new)
        if not whole.finished:
            raise EngineUnavailable(f"{self.base_url}{PATH} ended its stream before the completion finished")
        return whole.completion()

    @contextmanager
    def _aborting(self, rid: str) -> Iterator[None]:
        """Abort the request `rid` on the server if its caller is cancelled, or its answer cannot be used."""
        try:
            yield
        except (EngineRejected, EngineUnavailable):
            raise
        except (asyncio.CancelledError, Exception):
            task = asyncio.create_task(self._abort_cancelled(rid))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)
            raise

    async def _abort_cancelled(self, rid: str) -> None:
        try:
            await self.abort(rid)
        # no caller waits; the server ends the generation when it notices the closed connection
        except EngineError as error:
            logger.warning("the cancelled generation %s could not be aborted: %s", rid, error)

    async def _generate_under(
        self, version: int, rid: str, body: Any, on_tokens: OnTokens | None, asked: SentRequest
    ) -> Completion:
        named = {**body, "model": adapter_name(version)} if version else body
        return await completion_under(
            version, on_tokens, lambda labelled: self._generate(rid, named, labelled, asked)
        )

    async def _check_ids(self, input_ids: TokenIds) -> ModelInfo:
        """Return the served model. Raises EngineRejected for empty input and for ids outside the
        vocabulary."""
        info = self._info or await self.model_info()
        if not len(input_ids):
            raise EngineRejected("input_ids is empty")
        low, high = int(np.min(input_ids)), int(np.max(input_ids))
        if low < 0 or high >= info.vocab_size:
            wrong = low if low < 0 else high
            raise EngineRejected(f"token id {wrong} is outside the engine's vocabulary of {info.vocab_size}")
        return info
