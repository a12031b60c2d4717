"""Writes recorded turns as Google's GenerateContentResponse, whole or in pieces.

A candidate has thoughts if the request asks for them, then text, then calls. The first text and the first
call carry the signature of the turn. The parts of a stream's pieces add up to those of the whole answer; the
last piece has a finish reason and the usage.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from areal_agents.core.messages import Message, ToolCall
from areal_agents.core.trajectory import Turn
from areal_agents.errors import RequestError
from areal_agents.proxy.calls.request import CompletedTurn
from areal_agents.proxy.dialects.gemini.reading import camel, generation_config, wants_thoughts
from areal_agents.proxy.dialects.gemini.signatures import signature_of
from areal_agents.proxy.dialects.turn_ids import wire_id
from areal_agents.proxy.dialects.writing import EVENT_STREAM, TokenTexts, event, model_name
from areal_agents.rendering import Tokenizer

Part = dict[str, Any]

KEEPALIVE = b"\n"  # means nothing between events, nor between the elements of an array
_JSON = "application/json"
_FINISH = {"stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS"}
# Raw line separators of Unicode, at which some clients split the lines of a stream.
_ESCAPED = {b"\xe2\x80\xa8": b"\\u2028", b"\xe2\x80\xa9": b"\\u2029", b"\xc2\x85": b"\\u0085"}


def count_json(tokens: int) -> bytes:
    """Return the JSON of a CountTokensResponse."""
    return orjson.dumps({"totalTokens": tokens})


def model_description(name: str, max_context: int) -> dict[str, Any]:
    """Return the description of a model; `max_context` is its context length in tokens."""
    return {
        "name": f"models/{name}",
        "version": "policy",
        "displayName": name,
        "inputTokenLimit": max_context,
        "outputTokenLimit": max_context,
        "supportedGenerationMethods": ["generateContent", "countTokens"],
    }


def content_answer(body: Mapping[str, Any], done: Sequence[CompletedTurn], tokenizer: Tokenizer) -> bytes:
    """Return the JSON of the answer to a request that does not stream.

    Raise RequestError 502 if the arguments of a call cannot be written as JSON.
    """
    fields = camel(body)
    with_thoughts = wants_thoughts(fields)
    candidates = [
        _candidate(index, _parts(item.turn, with_thoughts)) | _ending(fields, item, tokenizer)
        for index, item in enumerate(done)
    ]
    turn_ids = [item.turn.id for item in done]
    return _json(_response(body, turn_ids, candidates, done))


class ContentStream:
    """Writes the pieces of one answer: events, or the elements of one JSON array. See `StreamWriter`."""

    def __init__(
        self,
        body: Mapping[str, Any],
        turn_ids: Sequence[str],
        tokenizer: Tokenizer,
        error: Callable[[RequestError], bytes],
    ) -> None:
        self._body = body
        self._fields = camel(body)
        self._with_thoughts = wants_thoughts(self._fields)
        self._turn_ids = turn_ids
        self._tokenizer = tokenizer
        self._error = error
        self._is_array = body.get("alt") != "sse"
        self._pieces = 0
        self._signed: set[tuple[int, str]] = set()  # (choice, kind of part) that has the signature
        self.media_type = _JSON if self._is_array else EVENT_STREAM

    def start(self) -> bytes:
        """Return the beginning of the array; events need none."""
        return b"[" if self._is_array else b""

    def reasoning(self, choice: int, text: str) -> bytes:
        """Return a piece with a thought; a keep-alive if the client has not asked for thoughts."""
        if not self._with_thoughts:
            return KEEPALIVE
        return self._piece([_candidate(choice, [_thought(text)])])

    def content(self, choice: int, text: str) -> bytes:
        """Return a piece with text."""
        return self._piece([_candidate(choice, [self._sign(choice, "text", {"text": text})])])

    def call(self, choice: int, call: ToolCall) -> bytes:
        """Return a piece with one complete call."""
        return self._piece([_candidate(choice, [self._sign(choice, "call", _call(call))])])

    def finish(self, done: Sequence[CompletedTurn]) -> bytes:
        """Return the last piece, which has every candidate's finish reason, and the end of the array."""
        candidates = [
            _candidate(index, [{"text": ""}]) | _ending(self._fields, item, self._tokenizer)
            for index, item in enumerate(done)
        ]
        return self._piece(candidates, done) + (b"]" if self._is_array else b"")

    def error(self, refusal: RequestError) -> bytes:
        """Return the error as Google's servers send it in a stream: as JSON that is not part of an event."""
        if self._is_array:
            return self._element(self._error(refusal)) + b"]"
        return self._error(refusal) + b"\n"

    def _sign(self, choice: int, kind: str, part: Part) -> Part:
        """Add the signature to the first part of a kind."""
        if (choice, kind) in self._signed:
            return part
        self._signed.add((choice, kind))
        return part | {"thoughtSignature": signature_of(self._turn_ids[choice])}

    def _piece(self, candidates: list[dict[str, Any]], done: Sequence[CompletedTurn] = ()) -> bytes:
        piece = _json(_response(self._body, self._turn_ids, candidates, done))
        if self._is_array:
            return self._element(piece)
        for raw, escaped in _ESCAPED.items():
            piece = piece.replace(raw, escaped)
        return event(piece)

    def _element(self, data: bytes) -> bytes:
        self._pieces += 1
        return data if self._pieces == 1 else b",\n" + data


def _response(
    body: Mapping[str, Any],
    turn_ids: Sequence[str],
    candidates: list[dict[str, Any]],
    done: Sequence[CompletedTurn],
) -> dict[str, Any]:
    """Return a response; with `done`, the recorded turns, it has the usage."""
    usage = {"usageMetadata": _usage(done)} if done else {}
    return {
        "candidates": candidates,
        **usage,
        "modelVersion": model_name(body).removeprefix("models/"),
        "responseId": wire_id(turn_ids[0], "gen_"),
    }


def _candidate(index: int, parts: list[Part]) -> dict[str, Any]:
    return {"content": {"role": "model", "parts": parts}, "index": index}


def _parts(turn: Turn, with_thoughts: bool) -> list[Part]:
    """Return the parts of a recorded reply, of which there is at least one."""
    reply, signature = turn.reply, {"thoughtSignature": signature_of(turn.id)}
    parts: list[Part] = [_thought(reply.reasoning)] if reply.reasoning and with_thoughts else []
    if reply.content or not _has_more(reply, parts):
        parts.append({"text": reply.content} | signature)
    calls = [_call(call) for call in reply.tool_calls]
    return parts + [calls[0] | signature, *calls[1:]] if calls else parts


def _has_more(reply: Message, parts: list[Part]) -> bool:
    return bool(parts or reply.tool_calls)


def _thought(text: str) -> Part:
    return {"text": text, "thought": True}


def _call(call: ToolCall) -> Part:
    return {"functionCall": {"id": call.id, "name": call.name, "args": _arguments(call)}}


def _arguments(call: ToolCall) -> Any:
    """Return the arguments as a value to write; Google's API has an object, not a string."""
    try:
        return orjson.loads(call.arguments)
    except orjson.JSONDecodeError:  # numbers and characters that only Python's json reads
        try:
            return orjson.Fragment(json.dumps(json.loads(call.arguments), allow_nan=False))
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"the reply has a call of {call.name} whose arguments cannot be written as JSON: {error}",
                status=502,
                code="unwritable_reply",
            ) from error


def _ending(fields: Mapping[str, Any], done: CompletedTurn, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the fields of a candidate that are known at its end."""
    ending: dict[str, Any] = {"finishReason": _FINISH[done.finish_reason]}
    completion = done.turn.completion
    if generation_config(fields).get("responseLogprobs") and len(completion):
        texts = TokenTexts(tokenizer)
        chosen = zip(completion.token_ids.tolist(), completion.behavior_logprobs.tolist(), strict=True)
        ending["avgLogprobs"] = float(completion.behavior_logprobs.mean())
        ending["logprobsResult"] = {
            "chosenCandidates": [_token(texts, *pair) for pair in chosen],
            "topCandidates": [
                {"candidates": [_token(texts, *pair) for pair in best]} for best in completion.top_logprobs
            ],
        }
    return ending


def _token(texts: TokenTexts, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": texts.text(token_id), "tokenId": token_id, "logProbability": logprob}


def _usage(done: Sequence[CompletedTurn]) -> dict[str, int]:
    """Return the usage; thoughts are part of the candidates' tokens, because they are found in the text."""
    sampled = sum(len(item.turn.completion) for item in done)
    return {
        "promptTokenCount": done[0].prompt_tokens,
        "cachedContentTokenCount": done[0].reused_tokens,
        "candidatesTokenCount": sampled,
        "totalTokenCount": done[0].prompt_tokens + sampled,
    }


def _json(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise RequestError(
            f"the reply cannot be written as JSON: {error}", status=502, code="unwritable_reply"
        ) from error
