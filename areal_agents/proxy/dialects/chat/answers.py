"""Writes recorded turns as OpenAI chat completions, whole or as a stream of chunks.

A stream has a chunk with the role of each choice, then deltas, then a finish chunk for each choice, a usage
chunk if requested, and [DONE]. No chunk has both content and tool calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from areal_agents.core.messages import Message, ToolCall
from areal_agents.core.trajectory import Turn
from areal_agents.errors import RequestError
from areal_agents.proxy.calls.request import CompletedTurn
from areal_agents.proxy.dialects.writing import (
    DONE,
    EVENT_STREAM,
    TokenTexts,
    event,
    model_name,
    openai_error,
)
from areal_agents.rendering import Tokenizer


def chat_answer(body: Mapping[str, Any], done: Sequence[CompletedTurn], tokenizer: Tokenizer) -> bytes:
    """Return the JSON of a `ChatCompletion`.

    Its id is that of the first choice's turn. With several choices, each has the id of its turn in `turn_id`.
    """
    with_logprobs = bool(body.get("logprobs"))
    choices: list[dict[str, Any]] = [
        {
            "index": index,
            "finish_reason": item.finish_reason,
            "message": _message(item.turn.reply),
            "logprobs": _logprobs(item.turn, tokenizer) if with_logprobs else None,
        }
        for index, item in enumerate(done)
    ]
    if len(done) > 1:
        for choice, item in zip(choices, done, strict=True):
            choice["turn_id"] = item.turn.id  # with which a reward refers to this choice
    answer = {
        "id": done[0].turn.id,
        "object": "chat.completion",
        "created": int(done[0].created_at),
        "model": model_name(body),
        "choices": choices,
        "usage": _usage(done),
    }
    return orjson.dumps(answer)


class ChatStream:
    """Writes the chunks of one answer; see `StreamWriter`."""

    media_type = EVENT_STREAM

    def __init__(
        self, body: Mapping[str, Any], turn_ids: Sequence[str], created_at: float, tokenizer: Tokenizer
    ) -> None:
        options = body.get("stream_options")
        self._with_usage = bool(options.get("include_usage")) if isinstance(options, dict) else False
        self._with_logprobs = bool(body.get("logprobs"))
        self._id = turn_ids[0]
        self._created = int(created_at)
        self._model = model_name(body)
        self._choices = len(turn_ids)
        self._calls = [0] * len(turn_ids)
        self._tokenizer = tokenizer

    def start(self) -> bytes:
        """See `StreamWriter.start`."""
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(choice, delta) for choice in range(self._choices))

    def reasoning(self, choice: int, text: str) -> bytes:
        """See `StreamWriter.reasoning`."""
        return self._chunk(choice, {"reasoning_content": text})

    def content(self, choice: int, text: str) -> bytes:
        """See `StreamWriter.content`."""
        return self._chunk(choice, {"content": text})

    def call(self, choice: int, call: ToolCall) -> bytes:
        """See `StreamWriter.call`."""
        index = self._calls[choice]
        self._calls[choice] += 1
        return self._chunk(choice, {"tool_calls": [{"index": index, **_tool_call(call)}]})

    def finish(self, done: Sequence[CompletedTurn]) -> bytes:
        """See `StreamWriter.finish`."""
        out = []
        for choice, item in enumerate(done):
            logprobs = _logprobs(item.turn, self._tokenizer) if self._with_logprobs else None
            out.append(self._chunk(choice, {}, item.finish_reason, logprobs))
        if self._with_usage:
            out.append(self._event(choices=[], usage=_usage(done)))
        return b"".join([*out, DONE])

    def error(self, refusal: RequestError) -> bytes:
        """See `StreamWriter.error`. OpenAI's clients raise an exception for an event with an error."""
        return event(openai_error(refusal)) + DONE

    def _chunk(
        self,
        choice: int,
        delta: dict[str, Any],
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        item = {"index": choice, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
        return self._event(choices=[item])

    def _event(self, **fields: Any) -> bytes:
        if self._with_usage:
            fields.setdefault("usage", None)
        chunk = {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
            **fields,
        }
        return event(orjson.dumps(chunk))


def _message(reply: Message) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
    if reply.tool_calls:
        fields["content"] = reply.content or None  # with tool calls, OpenAI's API has null for empty content
        fields["tool_calls"] = [_tool_call(call) for call in reply.tool_calls]
    if reply.reasoning:
        fields["reasoning_content"] = reply.reasoning
    return fields


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _usage(done: Sequence[CompletedTurn]) -> dict[str, Any]:
    completion_tokens = sum(len(item.turn.completion) for item in done)
    return {
        "prompt_tokens": done[0].prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": done[0].prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": done[0].reused_tokens},
    }


def _logprobs(turn: Turn, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the logprobs of a completion in OpenAI's form, with the alternatives if they were requested."""
    return {"content": TokenTexts(tokenizer).entries(turn.completion), "refusal": None}
