"""The client of SGLang's native HTTP protocol, for the real server and the embedded one.

Token ids are checked before they are sent: one outside the vocabulary ends a real server. Every wait has a
time limit, and every answer is checked before it becomes a Completion.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from areal_agents.core.completion import Completion, SamplingParams, TokenIds
from areal_agents.errors import ConfigError, EngineError, EngineRejected, EngineUnavailable
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
from areal_agents.inference.expert_routing import RequestedRouting, expert_layout
from areal_agents.inference.sglang.control import SGLangControl
from areal_agents.inference.sglang.scoring import check_range, scores_from_wire, scoring_to_wire
from areal_agents.inference.sglang.transport import HttpTransport
from areal_agents.inference.sglang.wire import (
    StreamedCompletion,
    as_object,
    completion_from_wire,
    sampling_to_wire,
    shorten,
)
from areal_agents.model_folder import read_object

logger = logging.getLogger(__name__)

ABORT_WAIT_S = 5.0  # longest wait, when closing, for the aborts of cancelled calls
# Suffix of every request id on the wire. SGLang aborts all requests whose ids begin with the given one; with
# a suffix that occurs nowhere else in an id, no id is the beginning of another.
RID_END = "$"


class SGLangEngine(SGLangControl):
    """One SGLang server; implements `engine.Engine`.

    Args:
        base_url: for example http://127.0.0.1:30000.
        request_timeout_s: longest wait for one completion.
        control_timeout_s: longest wait for anything else.
        update_timeout_s: longest wait for one step of an update of weights or adapters; the default is
            `control_timeout_s`.
        connect_timeout_s: longest wait for a connection.
        vocab_size: needed if the server does not report it and its model folder is not readable from here.
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
        vocab_size: int | None = None,
        adapters: bool = False,
        decode: Callable[[Sequence[int]], str] | None = None,
        key: str = "",
    ) -> None:
        http = HttpTransport(base_url, connect_timeout_s=connect_timeout_s, key=key)
        super().__init__(
            http, control_timeout_s=control_timeout_s, update_timeout_s=update_timeout_s or control_timeout_s
        )
        self._request_timeout_s = request_timeout_s
        self._given_vocab_size = vocab_size
        self._vocab_size = vocab_size  # the bound that token ids are checked against
        # the answer of /server_info, cached because it costs the engine a step
        self._server: dict[str, Any] | None = None
        self._adapters = adapters
        self._served: int | None = None  # the latest reported version
        self._info: ModelInfo | None = None  # the latest model info; None after the server was unreachable
        self._end_ids: frozenset[int] | None = None  # end-of-completion tokens of the served model, if known
        self._folder = ""  # the model folder that _end_ids was read from
        self._decode = decode
        self._encoded = EncodedIds()
        self._aborts: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> SGLangEngine:
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
        """See Engine.generate."""
        vocab_size = await self._check_ids(input_ids)
        info = self._info
        asked = SentRequest(
            sampling,
            vocab_size,
            len(input_ids),
            rid + RID_END,
            most_tokens=None if info is None else info.effective_context,
            end_ids=None if info is None else info.end_ids,
            decode=self._decode,
        )
        parameters = sampling_to_wire(sampling)
        if on_tokens is not None and stream_interval > 1:
            parameters["stream_interval"] = stream_interval
        body = {
            "rid": rid + RID_END,
            "input_ids": self._encoded.json(input_ids, affinity),
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": on_tokens is not None,
            "sampling_params": parameters,
        }
        if sampling.top_logprobs:
            body["top_logprobs_num"] = sampling.top_logprobs
        routing = await self._requested_routing(len(input_ids), sampling)
        if routing is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": routing.start}
        if not self._adapters:
            return await self._generate(body, on_tokens, routing, asked)
        return await with_served_adapter(
            self.model_info, lambda version: self._generate_under(version, body, on_tokens, routing, asked)
        )

    async def score(
        self, rid: str, input_ids: TokenIds, *, start: int, top: int = 0, affinity: str = ""
    ) -> PromptScores:
        """See Sampler.score."""
        vocab_size = await self._check_ids(input_ids)
        check_range(len(input_ids), start, top, vocab_size)
        body = {"rid": rid + RID_END, **scoring_to_wire(input_ids, start, top)}

        async def scored(version: int | None) -> PromptScores:
            named = {**body, "lora_path": adapter_name(version)} if version else body
            with self._aborting(rid):
                answer = await self._http.call("POST", "/generate", named, timeout_s=self._request_timeout_s)
            scores = scores_from_wire(answer, input_ids, start=start, top=top, vocab_size=vocab_size)
            return scores if version is None else replace(scores, version=version)

        if not self._adapters:
            return await scored(None)
        return await with_served_adapter(self.model_info, scored)

    async def _generate(
        self, body: Any, on_tokens: OnTokens | None, routing: RequestedRouting | None, asked: SentRequest
    ) -> Completion:
        with self._aborting(body["rid"].removesuffix(RID_END)):
            if on_tokens is not None:
                return await self._generate_streamed(body, on_tokens, routing, asked)
            answer = await self._http.call("POST", "/generate", body, timeout_s=self._request_timeout_s)
        completion = completion_from_wire(answer, routing, asked)
        self._note_version(answer["meta_info"].get("weight_version"))
        return completion

    @contextmanager
    def _aborting(self, rid: str) -> Iterator[None]:
        """Abort the request `rid` on the server if its caller is cancelled, or its answer cannot be used."""
        try:
            yield
        except (EngineRejected, EngineUnavailable):
            raise
        except (asyncio.CancelledError, Exception):
            # SGLang checks for closed connections only every 4 s, and continues sampling until then.
            task = asyncio.create_task(self._abort_cancelled(rid))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)
            raise

    async def _generate_under(
        self,
        version: int,
        body: Any,
        on_tokens: OnTokens | None,
        routing: RequestedRouting | None,
        asked: SentRequest,
    ) -> Completion:
        named = {**body, "lora_path": adapter_name(version)} if version else body
        return await completion_under(
            version, on_tokens, lambda labelled: self._generate(named, labelled, routing, asked)
        )

    def _note_version(self, weight_version: object) -> None:
        """Record the version of an answer; answers may arrive out of order, so the version never
        decreases."""
        if weight_version is not None:
            self._served = max(self._served or 0, version_from_wire(weight_version))

    def move_to(self, base_url: str) -> None:
        """Send every further request to another address, where the engine was started again.

        Requests that are under way stay where they are.
        """
        if base_url.rstrip("/") != self.base_url:
            self._http.base_url = base_url.rstrip("/")
            self._forget()

    def _forget(self) -> None:
        """Forget what the server has reported."""
        self._server, self._vocab_size, self._info = None, self._given_vocab_size, None
        self._end_ids, self._folder = None, ""

    async def abort(self, rid: str) -> None:
        """See Engine.abort."""
        await self._call("POST", "/abort_request", {"rid": rid + RID_END})

    async def health(self) -> None:
        """See Engine.health."""
        await self._call("GET", "/health")

    async def model_info(self) -> ModelInfo:
        """See Engine.model_info. What SGLang leaves out is read from the model folder's config.json."""
        try:
            info = as_object(await self._call("GET", "/model_info"), "/model_info")
        except EngineUnavailable:
            self._forget()
            raise  # the next answer may come from another server
        path = info.get("model_path")
        if not isinstance(path, str):
            raise EngineError(f"{self.base_url}/model_info names no model_path: {shorten(str(info))}")
        config = _local_config(path)
        vocab_size = self._given_vocab_size or info.get("vocab_size") or config.get("vocab_size")
        if self._server is None and not info.get("context_length"):
            self._server = await self._server_info()
        server = self._server or {}
        context = (
            info.get("context_length")
            or server.get("context_length")
            or config.get("max_position_embeddings")
        )
        if not isinstance(vocab_size, int) or not isinstance(context, int):
            sizes = {"vocab_size": vocab_size, "max_position_embeddings": context}
            raise EngineError(_unreported(self.base_url, path, config, sizes))
        version = self._served = version_from_wire(info.get("weight_version", "default"))
        kernel = str(info.get("kernel", ""))
        workers = server.get("tp_size") or 1
        experts, architecture = expert_layout(config), str(info.get("model_type") or "")
        if self._end_ids is None and path != self._folder:
            self._folder, self._end_ids = path, await asyncio.to_thread(end_ids_of, path)
        self._info = ModelInfo(
            path,
            version,
            vocab_size,
            context,
            kernel,
            experts,
            workers,
            architecture,
            effective_context=_effective_context(context, info, server),
            end_ids=self._end_ids,
            stages_weights=info.get("stages_weights") is True,
        )
        return self._info

    async def busy_s(self) -> float | None:
        """See Engine.busy_s. The embedded engine counts, SGLang does not."""
        value = (await self._server_info()).get("busy_s")
        return float(value) if isinstance(value, int | float) else None

    async def aclose(self) -> None:
        """See Engine.aclose."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=ABORT_WAIT_S)
        await super().aclose()

    async def _generate_streamed(
        self, body: Any, on_tokens: OnTokens, routing: RequestedRouting | None, asked: SentRequest
    ) -> Completion:
        whole = StreamedCompletion(self._served, asked)
        async with aclosing(
            self._http.events("/generate", body, timeout_s=self._request_timeout_s)
        ) as batches:
            async for events in batches:
                # A cumulative chunk contains all earlier ones, so only the last one received is parsed.
                for event in events[-1:] if whole.cumulative else events:
                    new = whole.feed(event)
                    if new is not None:
                        on_tokens(new)
        if not whole.finished:
            raise EngineUnavailable(
                f"{self.base_url}/generate ended its stream before the completion finished"
            )
        self._note_version(whole.weight_version)
        return whole.completion(routing)

    async def _requested_routing(
        self, prompt_tokens: int, sampling: SamplingParams
    ) -> RequestedRouting | None:
        if sampling.routed_experts_from is None:
            return None
        experts = (self._info or await self.model_info()).experts
        if experts is None:
            experts = (await self.model_info()).experts  # the folder may have become readable
        if experts is None:
            raise EngineError(
                f"routed experts are requested, but the model that {self.base_url} serves has none, or its "
                "folder's config.json is not readable from here"
            )
        return RequestedRouting(experts, sampling.routed_experts_from, prompt_tokens)

    async def _abort_cancelled(self, rid: str) -> None:
        try:
            await self.abort(rid)
        # no caller waits; the server ends the generation when it notices the closed connection
        except EngineError as error:
            logger.warning("the cancelled generation %s could not be aborted: %s", rid, error)

    async def _check_ids(self, input_ids: TokenIds) -> int:
        """Return the vocabulary size. Raises EngineRejected for empty input and for ids outside the
        vocabulary."""
        if self._vocab_size is None:
            self._vocab_size = (await self.model_info()).vocab_size
        if not len(input_ids):
            raise EngineRejected("input_ids is empty")
        low, high = int(np.min(input_ids)), int(np.max(input_ids))
        if low < 0 or high >= self._vocab_size:
            wrong = low if low < 0 else high
            raise EngineRejected(f"token id {wrong} is outside the engine's vocabulary of {self._vocab_size}")
        return self._vocab_size


def _effective_context(context: int, info: dict[str, Any], server: dict[str, Any]) -> int | None:
    """Return the length in tokens at which the server may end a completion early; None if not known.

    A server that reports its context length in /model_info, such as the embedded engine, uses all of it.
    SGLang ends two tokens earlier, or when only two pages and one token of its key-value cache are free.
    """
    if info.get("context_length"):
        return context
    tokens, page = server.get("max_total_num_tokens"), server.get("page_size") or 1
    if type(tokens) is not int or type(page) is not int or server.get("max_total_num_tokens_swa"):
        return None
    return min(context - 2, tokens - 2 * page - 1)


def _local_config(path: str) -> dict[str, Any]:
    """Return the model's config.json if it is readable under the engine's path from here, {} otherwise."""
    try:
        return read_object(Path(path) / "config.json")
    except ConfigError:
        return {}


def _unreported(url: str, path: str, config: Mapping[str, Any], sizes: Mapping[str, object]) -> str:
    """Say why the sizes of an engine's model are unknown; `config` is {} if its file is not readable."""
    if config:
        missing = " and ".join(name for name, value in sizes.items() if not isinstance(value, int))
        reason = f"has no {missing}; add it to the file"
    else:
        reason = "is not readable from here; start it on a folder that this machine can read under that path"
    return f"{url} does not report the size of its vocabulary or its context, and {path}/config.json {reason}"
