"""Converts between the JSON of vLLM's /inference/v1/generate and the types of `core`.

Invariant: whatever its form, an answer becomes a Completion only if its ids, logprobs and versions agree with
each other and with the request; see `answers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import orjson

from areal_agents.core.completion import (
    Completion,
    FinishReason,
    GrammarKind,
    SamplingParams,
    TokenChunk,
    TokenIds,
    TopLogprobs,
)
from areal_agents.errors import EngineError, EngineRejected, EngineUnavailable
from areal_agents.inference.answers import LEAST_LOGPROB, SentRequest, check_logprobs, checked_spans
from areal_agents.inference.engine import PromptScores
from areal_agents.inference.sglang.scoring import check_agreement
from areal_agents.inference.sglang.wire import FINISH_REASONS, UNREADABLE, as_object, shorten

PATH = "/inference/v1/generate"
WIRE_ID = "generate-tokens-"  # what vLLM puts before the id of a request in its answers and for aborts
_GRAMMARS: Mapping[GrammarKind, str] = {
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}


def request_to_wire(
    rid: str, input_ids: TokenIds, sampling: SamplingParams, *, stream_interval: int | None = None
) -> dict[str, Any]:
    """Return the body that continues `input_ids` [P]; a `stream_interval` asks for a stream."""
    parameters: dict[str, Any] = {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "ignore_eos": sampling.ignore_eos,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        # vLLM lists the sampled token first and then the best ones, and counts it among those asked for.
        "logprobs": sampling.top_logprobs + 1 if sampling.top_logprobs else 0,
        "detokenize": bool(sampling.stop),
    }
    if sampling.stop:
        parameters["stop"] = list(sampling.stop)
    if sampling.stop_token_ids and not sampling.ignore_eos:  # vLLM would stop at them regardless
        parameters["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.seed is not None:
        parameters["seed"] = seed_at(sampling.seed, len(input_ids))
    if sampling.grammar is not None:
        parameters["structured_outputs"] = {_GRAMMARS[sampling.grammar.kind]: sampling.grammar.text}
    body: dict[str, Any] = {
        "request_id": rid,
        "token_ids": np.ascontiguousarray(input_ids),
        "sampling_params": parameters,
    }
    if stream_interval is not None:
        parameters["stream_interval"] = stream_interval
        body |= {
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
    return body


def seed_at(seed: int, position: int) -> int:
    """Return the seed for a request whose first token is sampled at `position`.

    vLLM's random numbers start anew with each request. A completion that is continued in a second request
    with the same seed would therefore repeat the random numbers that its first tokens were sampled with.
    """
    digest = blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1  # a positive int64


def completion_from_wire(answer: Any, asked: SentRequest) -> Completion:
    """Convert an answer that is not streamed.

    Raises EngineError if ids, logprobs and versions do not agree with each other or with `asked`, and
    EngineUnavailable if the answer reports a failure.
    """
    whole = _Answer(asked)
    whole.take(as_object(answer, PATH))
    return whole.completion()


class StreamedCompletion:
    """A completion that arrives in chunks, each with the new tokens. The last one has their versions."""

    def __init__(self, asked: SentRequest) -> None:
        self._answer = _Answer(asked)

    @property
    def finished(self) -> bool:
        """Whether the chunk with the finish reason has arrived."""
        return self._answer.reason is not None

    def feed(self, event: bytes) -> TokenChunk | None:
        """Process the data of one event and return its new tokens, None if there are none. Errors are those
        of `completion_from_wire`, and EngineRejected if the stream reports that the request was refused."""
        try:
            chunk = as_object(orjson.loads(event), PATH)
        except ValueError as error:
            raise EngineError(f"{PATH} streamed an event that is not JSON: {error}") from error
        if chunk.get("error"):
            raise _streamed_error(chunk["error"])
        if chunk.get("choices") == [] and self.finished:
            return None  # the usage at the end
        return self._answer.take(chunk)

    def completion(self) -> Completion:
        """Return the whole completion, once `finished`."""
        return self._answer.completion()


class _Answer:
    """Collects the tokens of one answer, and checks each part against the request."""

    def __init__(self, asked: SentRequest) -> None:
        self.reason: FinishReason | None = None
        self._asked = asked
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._top: list[tuple[tuple[int, float], ...]] = []
        self._spans: Any = None

    def take(self, part: Mapping[str, Any]) -> TokenChunk | None:
        """Add the tokens of `part`, a whole answer or one chunk, and return them; None if there are none."""
        if self.reason is not None:
            raise EngineError(f"{PATH} streamed a chunk after the one that ended the completion")
        try:
            (choice,) = part["choices"]
            reason = _finish_reason(choice)
            usage = part.get("usage") or {}
            meta = {"id": part["request_id"], "index": choice["index"]}
            if usage.get("prompt_tokens"):  # 0 in the chunk of a request that was aborted before its prefill
                meta["prompt_tokens"] = usage["prompt_tokens"]
            self._asked.check_meta(meta, reason)
            new = self._new_tokens(choice)
            if "completion_tokens" in usage and usage["completion_tokens"] != len(self._ids):
                raise EngineError(
                    f"{PATH} returned {len(self._ids)} tokens and counts {usage['completion_tokens']!r}"
                )
            if reason is not None:
                self._spans = choice["weight_versions"]
                matched = choice.get("stop_reason")
                if matched is None and self._ids:
                    matched = self._ids[-1]  # vLLM names no end-of-sequence token
                self._asked.check_end(self._ids, reason, matched)
        except UNREADABLE as error:
            raise EngineError(f"{PATH} returned an answer that cannot be read: {error!r}") from error
        self.reason = reason
        return new

    def completion(self) -> Completion:
        if self.reason is None:
            raise EngineError(f"{PATH} returned an answer without a finish reason")
        versions = np.empty(len(self._ids), np.int32)
        try:
            start = 0
            for version, end in checked_spans(self._spans or [], len(self._ids)):
                versions[start:end] = version
                start = end
            return Completion(
                token_ids=self._ids,  # type: ignore[arg-type]
                logprobs=self._logprobs,  # type: ignore[arg-type]
                versions=versions,
                finish_reason=self.reason,
                top_logprobs=tuple(self._top),
            )
        except UNREADABLE as error:
            raise EngineError(f"{PATH} returned an answer that cannot be read: {error!r}") from error

    def _new_tokens(self, choice: Mapping[str, Any]) -> TokenChunk | None:
        ids = choice["token_ids"] or []
        if not ids:
            return None
        content = choice["logprobs"]["content"]
        if any(type(id) is not int for id in ids) or [entry["token_id"] for entry in content] != ids:
            raise EngineError(f"{PATH} returned {len(ids)} ids and logprobs of {len(content)} other tokens")
        logprobs = [entry["logprob"] for entry in content]
        check_logprobs(logprobs)
        self._asked.check_tokens(self._ids[-1] if self._ids else None, ids, len(self._ids) + len(ids))
        top = _top_logprobs(content, self._asked.sampling.top_logprobs)
        self._ids += ids
        self._logprobs += logprobs
        self._top += top
        return TokenChunk(tuple(ids), tuple(map(float, logprobs)), top)


def scoring_to_wire(rid: str, input_ids: TokenIds, top: int) -> dict[str, Any]:
    """Return the body that scores all positions of `input_ids` [P]. vLLM samples at least one token."""
    parameters = {"max_tokens": 1, "temperature": 1.0, "ignore_eos": True, "detokenize": False}
    return {
        "request_id": rid,
        "token_ids": np.ascontiguousarray(input_ids),
        "sampling_params": {**parameters, "prompt_logprobs": top},
    }


def scores_from_wire(
    answer: Any, input_ids: TokenIds, *, start: int, top: int, vocab_size: int
) -> PromptScores:
    """Return the scores at positions `start`.. in an answer to `scoring_to_wire`.

    Raises EngineError if they belong to other tokens or cannot be logprobs of one distribution at each
    position, and EngineUnavailable if the request was aborted or failed.
    """
    try:
        (choice,) = as_object(answer, PATH)["choices"]
        if _finish_reason(choice) == "abort":
            raise EngineUnavailable("the engine aborted the scoring")
        rows = answer["prompt_logprobs"]
        if len(rows) != len(input_ids):
            raise EngineError(
                f"{PATH} returned logprobs of {len(rows)} prompt tokens, expected {len(input_ids)}"
            )
        tokens = input_ids[start:].tolist()
        logprobs, best = [], []
        for token, row in zip(tokens, rows[start:], strict=True):
            found = {int(id): float(entry["logprob"]) for id, entry in row.items()}
            logprobs.append(found[token])
            if len(found) > top:
                del found[token]  # it is listed beside the best, and is not one of them
            best.append(sorted(found.items(), key=lambda pair: -pair[1]))
        shape = (len(tokens), top)
        top_ids = np.array([[id for id, _ in row] for row in best], np.int32).reshape(shape)
        if top_ids.size and not (top_ids.min() >= 0 and top_ids.max() < vocab_size):
            raise EngineError(f"{PATH} returned top logprobs of ids outside its vocabulary of {vocab_size}")
        ((version, _),) = checked_spans(choice["weight_versions"], 1)
        scores = PromptScores(
            np.array(logprobs, np.float32),
            top_ids,
            np.array([[value for _, value in row] for row in best], np.float32).reshape(shape),
            version,
        )
    except UNREADABLE as error:
        raise EngineError(f"{PATH} returned scores that cannot be read: {error!r}") from error
    check_agreement(scores, input_ids[start:])
    return scores


def _finish_reason(choice: Mapping[str, Any]) -> FinishReason | None:
    reason = choice["finish_reason"]
    if reason is None:
        return None
    if reason == "error":
        raise EngineUnavailable(f"{PATH} failed: vLLM ended the request with an error; see its log")
    if reason not in FINISH_REASONS:
        raise EngineError(
            f"{PATH} ended with finish_reason {reason!r}; expected one of {sorted(FINISH_REASONS)}"
        )
    return FINISH_REASONS[reason]


def _top_logprobs(content: Sequence[Mapping[str, Any]], count: int) -> TopLogprobs:
    """Return each token's `count` best (id, logprob) pairs, best first, without those that a grammar
    excludes."""
    if not count:
        return ()
    return tuple(
        tuple(
            sorted(
                (
                    (int(item["token_id"]), float(item["logprob"]))
                    for item in entry["top_logprobs"]
                    if item["logprob"] >= LEAST_LOGPROB
                ),
                key=lambda pair: -pair[1],
            )[:count]
        )
        for entry in content
    )


def _streamed_error(error: Any) -> EngineError:
    details = error if isinstance(error, dict) else {"message": str(error)}
    message, code = shorten(str(details.get("message", details))), details.get("code")
    if isinstance(code, int) and 400 <= code < 500:
        return EngineRejected(f"{PATH} refused the request ({code}): {message}")
    return EngineUnavailable(f"{PATH} failed ({code}): {message}")
