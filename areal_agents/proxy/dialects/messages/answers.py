"""Writes a recorded turn as Anthropic's Message, whole or as events.

A message has thinking, whose signature is the turn's handle, then text, then tool calls. The events of a
stream add up to the same message, except that text after a tool call keeps its position.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson
from pydantic_core import PydanticSerializationError
from pydantic_core import to_json as deep_json

from areal_agents.core.messages import ToolCall
from areal_agents.errors import RequestError
from areal_agents.proxy.calls.request import CompletedTurn
from areal_agents.proxy.dialects.turn_ids import handle_of, wire_id
from areal_agents.proxy.dialects.writing import EVENT_STREAM, event, model_name
from areal_agents.rendering import Tokenizer

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def message_answer(body: Mapping[str, Any], done: CompletedTurn, tokenizer: Tokenizer) -> bytes:
    """Return the JSON of the answer to a request that does not stream.

    Raise RequestError 502 if the input of a tool call is nested too deeply.
    """
    reply = done.turn.reply
    content: list[dict[str, Any]] = []
    if reply.reasoning:
        content.append(_thinking_block(reply.reasoning, handle_of(done.turn.id)))
    if reply.content or not (reply.reasoning or reply.tool_calls):
        content.append(_text_block(reply.content))  # even if empty, because clients read content[0]
    content += [_tool_use(call, _input(call)) for call in reply.tool_calls]
    return orjson.dumps(
        _message(body, done.turn.id, content=content, usage=_usage(done), **_why_stopped(done, tokenizer))
    )


class MessageStream:
    """Writes Anthropic's events; see `StreamWriter`. One block is open at a time."""

    media_type = EVENT_STREAM

    def __init__(
        self,
        body: Mapping[str, Any],
        turn_id: str,
        tokenizer: Tokenizer,
        error: Callable[[RequestError], bytes],
    ) -> None:
        self._body = body
        self._turn_id = turn_id
        self._tokenizer = tokenizer
        self._error = error
        self._blocks = 0
        self._open = ""  # the type of the open block, "" for none

    def start(self) -> bytes:
        """Return message_start and a ping. The prompt's length is not known yet; message_delta has it."""
        usage = {
            "input_tokens": 0,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        }
        opened = _message(
            self._body, self._turn_id, content=[], stop_reason=None, stop_sequence=None, usage=usage
        )
        return _event("message_start", message=opened) + event(b'{"type": "ping"}', "ping")

    def reasoning(self, choice: int, text: str) -> bytes:
        """Return a thinking_delta; open a thinking block first if none is open."""
        head = b""
        if self._open != "thinking":
            head = self._start(_thinking_block("", ""))
        return head + self._delta("thinking_delta", thinking=text)

    def content(self, choice: int, text: str) -> bytes:
        """Return a text_delta; open a text block first if none is open."""
        head = b"" if self._open == "text" else self._start(_text_block(""))
        return head + self._delta("text_delta", text=text)

    def call(self, choice: int, call: ToolCall) -> bytes:
        """Return a complete tool_use block."""
        start = self._start(_tool_use(call, {}))
        return start + self._delta("input_json_delta", partial_json=call.arguments) + self._stop()

    def finish(self, done: Sequence[CompletedTurn]) -> bytes:
        """Return the end of the last block, message_delta with the usage, and message_stop."""
        out = self._stop() if self._blocks else self._start(_text_block("")) + self._stop()
        out += _event("message_delta", delta=_why_stopped(done[0], self._tokenizer), usage=_usage(done[0]))
        return out + _event("message_stop")

    def error(self, refusal: RequestError) -> bytes:
        """Return an error event."""
        return event(self._error(refusal), "error")

    def _start(self, block: dict[str, Any]) -> bytes:
        closed = self._stop()
        self._open = block["type"]
        self._blocks += 1
        return closed + _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _delta(self, kind: str, **fields: str) -> bytes:
        return _event("content_block_delta", index=self._blocks - 1, delta={"type": kind, **fields})

    def _stop(self) -> bytes:
        if not self._open:
            return b""
        head = b""
        if self._open == "thinking":
            head = self._delta("signature_delta", signature=handle_of(self._turn_id))
        self._open = ""
        return head + _event("content_block_stop", index=self._blocks - 1)


def _message(body: Mapping[str, Any], turn_id: str, **fields: Any) -> dict[str, Any]:
    return {
        "id": wire_id(turn_id, "msg_"),
        "type": "message",
        "role": "assistant",
        "model": model_name(body),
        **fields,
    }


def _thinking_block(thinking: str, signature: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": thinking, "signature": signature}


def _text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _tool_use(call: ToolCall, arguments: Mapping[str, Any] | orjson.Fragment) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _input(call: ToolCall) -> orjson.Fragment:
    """Return the arguments of a call as an object. orjson refuses integers of more than 64 bits."""
    try:
        return orjson.Fragment(deep_json(json.loads(call.arguments)))
    except PydanticSerializationError as error:
        raise RequestError(
            f"the reply has a tool call whose input cannot be written as JSON: {error}",
            status=502,
            code="unwritable_reply",
        ) from error


def _usage(done: CompletedTurn) -> dict[str, int]:
    """Return the usage. In Anthropic's API input_tokens excludes cached tokens; clients add up all three."""
    return {
        "input_tokens": done.prompt_tokens - done.reused_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": done.reused_tokens,
        "output_tokens": len(done.turn.completion),
    }


def _why_stopped(done: CompletedTurn, tokenizer: Tokenizer) -> dict[str, str | None]:
    """Return the stop_reason, and the stop_sequence that ended the reply or None."""
    if done.finish_reason == "stop" and (found := _stop_sequence(done, tokenizer)) is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": found}
    return {"stop_reason": _STOP_REASONS[done.finish_reason], "stop_sequence": None}


def _stop_sequence(done: CompletedTurn, tokenizer: Tokenizer) -> str | None:
    """Return the stop sequence that ended the reply, None if the model ended its turn.

    If the last tokens have several, it is the one that was complete first, and of equals the longest.
    """
    sampling, ids = done.turn.sampling, done.turn.completion.token_ids
    if not sampling.stop or not len(ids) or int(ids[-1]) in sampling.stop_token_ids:
        return None
    longest = max(len(stop.encode()) for stop in sampling.stop)
    tail = tokenizer.decode(ids[-longest - 1 :].tolist())  # a token has at least one byte
    found = [(tail.find(stop) + len(stop), -len(stop), stop) for stop in sampling.stop if stop in tail]
    return min(found)[2] if found else None


def _event(kind: str, **fields: Any) -> bytes:
    return event(orjson.dumps({"type": kind, **fields}), kind)
