"""Writes a recorded turn as Anthropic's Message, whole or as events.

A message has thinking, whose signature is the turn's handle, then text, then tool calls. The events of a
stream add up to the same message, except that text after a tool call keeps its position.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anthropic.types import (
    InputJSONDelta,
    Message,
    MessageDeltaUsage,
    MessageTokensCount,
    RawContentBlockDeltaEvent,
    RawContentBlockStartEvent,
    RawContentBlockStopEvent,
    RawMessageDeltaEvent,
    RawMessageStartEvent,
    RawMessageStopEvent,
    SignatureDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
    Usage,
)
from anthropic.types.raw_message_delta_event import Delta
from pydantic import BaseModel

from areal_agents.core.messages import ToolCall
from areal_agents.errors import RequestError
from areal_agents.proxy.calls.request import CompletedTurn
from areal_agents.proxy.dialects.turn_ids import handle_of, wire_id
from areal_agents.proxy.dialects.writing import event, model_name, to_json, typed
from areal_agents.rendering import Tokenizer

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def count_json(tokens: int) -> bytes:
    """Return the JSON of a `MessageTokensCount`."""
    return to_json(typed(MessageTokensCount, input_tokens=tokens))


def message(body: Mapping[str, Any], done: CompletedTurn, tokenizer: Tokenizer) -> Message:
    """Return the answer to a request that does not stream."""
    reply = done.turn.reply
    content: list[BaseModel] = []
    if reply.reasoning:
        signature = handle_of(done.turn.id)
        content.append(typed(ThinkingBlock, type="thinking", thinking=reply.reasoning, signature=signature))
    if reply.content or not (reply.reasoning or reply.tool_calls):
        content.append(_text_block(reply.content))  # even if empty, because clients read content[0]
    content += [_tool_use(call, json.loads(call.arguments)) for call in reply.tool_calls]
    stop_reason, stop_sequence = _why_stopped(done, tokenizer)
    return _message(
        body,
        done.turn.id,
        content=content,
        stop_reason=stop_reason,
        stop_sequence=stop_sequence,
        usage=typed(Usage, **_usage(done)),
    )


class MessageStream:
    """Writes Anthropic's events; see `StreamWriter`. One block is open at a time."""

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
        usage = typed(
            Usage, input_tokens=0, cache_creation_input_tokens=0, cache_read_input_tokens=0, output_tokens=0
        )
        opened = _message(
            self._body, self._turn_id, content=[], stop_reason=None, stop_sequence=None, usage=usage
        )
        return _event(typed(RawMessageStartEvent, type="message_start", message=opened)) + event(
            b'{"type": "ping"}', "ping"
        )

    def reasoning(self, choice: int, text: str) -> bytes:
        """Return a thinking_delta; open a thinking block first if none is open."""
        head = b""
        if self._open != "thinking":
            head = self._start(typed(ThinkingBlock, type="thinking", thinking="", signature=""))
        return head + self._delta(typed(ThinkingDelta, type="thinking_delta", thinking=text))

    def content(self, choice: int, text: str) -> bytes:
        """Return a text_delta; open a text block first if none is open."""
        head = b"" if self._open == "text" else self._start(_text_block(""))
        return head + self._delta(typed(TextDelta, type="text_delta", text=text))

    def call(self, choice: int, call: ToolCall) -> bytes:
        """Return a complete tool_use block."""
        start = self._start(_tool_use(call, {}))
        delta = typed(InputJSONDelta, type="input_json_delta", partial_json=call.arguments)
        return start + self._delta(delta) + self._stop()

    def finish(self, done: Sequence[CompletedTurn]) -> bytes:
        """Return the end of the last block, message_delta with the usage, and message_stop."""
        out = self._stop() if self._blocks else self._start(_text_block("")) + self._stop()
        stop_reason, stop_sequence = _why_stopped(done[0], self._tokenizer)
        delta = typed(Delta, stop_reason=stop_reason, stop_sequence=stop_sequence)
        usage = typed(MessageDeltaUsage, **_usage(done[0]))
        out += _event(typed(RawMessageDeltaEvent, type="message_delta", delta=delta, usage=usage))
        return out + _event(typed(RawMessageStopEvent, type="message_stop"))

    def error(self, refusal: RequestError) -> bytes:
        """Return an error event."""
        return event(self._error(refusal), "error")

    def _start(self, block: ThinkingBlock | TextBlock | ToolUseBlock) -> bytes:
        closed = self._stop()
        self._open = block.type
        self._blocks += 1
        started = typed(
            RawContentBlockStartEvent,
            type="content_block_start",
            index=self._blocks - 1,
            content_block=block,
        )
        return closed + _event(started)

    def _delta(self, delta: BaseModel) -> bytes:
        return _event(
            typed(RawContentBlockDeltaEvent, type="content_block_delta", index=self._blocks - 1, delta=delta)
        )

    def _stop(self) -> bytes:
        if not self._open:
            return b""
        head = b""
        if self._open == "thinking":
            signature = handle_of(self._turn_id)
            head = self._delta(typed(SignatureDelta, type="signature_delta", signature=signature))
        self._open = ""
        stopped = typed(RawContentBlockStopEvent, type="content_block_stop", index=self._blocks - 1)
        return head + _event(stopped)


def _message(body: Mapping[str, Any], turn_id: str, **fields: Any) -> Message:
    return typed(
        Message,
        id=wire_id(turn_id, "msg_"),
        type="message",
        role="assistant",
        model=model_name(body),
        **fields,
    )


def _text_block(text: str) -> TextBlock:
    return typed(TextBlock, type="text", text=text)


def _tool_use(call: ToolCall, arguments: dict[str, Any]) -> ToolUseBlock:
    return typed(ToolUseBlock, type="tool_use", id=call.id, name=call.name, input=arguments)


def _usage(done: CompletedTurn) -> dict[str, int]:
    """Return the usage. In Anthropic's API input_tokens excludes cached tokens; clients add up all three."""
    return {
        "input_tokens": done.prompt_tokens - done.reused_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": done.reused_tokens,
        "output_tokens": len(done.turn.completion),
    }


def _why_stopped(done: CompletedTurn, tokenizer: Tokenizer) -> tuple[str, str | None]:
    """Return the stop_reason, and the stop sequence that ended the reply or None."""
    if done.finish_reason == "stop" and (found := _stop_sequence(done, tokenizer)) is not None:
        return "stop_sequence", found
    return _STOP_REASONS[done.finish_reason], None


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


def _event(value: BaseModel) -> bytes:
    return event(to_json(value), value.type)  # type: ignore[attr-defined]
