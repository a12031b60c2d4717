"""Writes the event stream of the Responses API: items are added, filled and finished one after the other.

The last event has the Response object, which consists of the items that the stream has sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import orjson

from areal_agents.core.messages import ToolCall
from areal_agents.errors import RequestError
from areal_agents.proxy.calls.request import CompletedTurn
from areal_agents.proxy.dialects.responses.answers import (
    Item,
    Status,
    call_item,
    ended_response,
    logprobs,
    message_item,
    output_items,
    reasoning_item,
    response,
    text_part,
)
from areal_agents.proxy.dialects.responses.items import ItemKind, item_id
from areal_agents.proxy.dialects.responses.tools import client_tools
from areal_agents.proxy.dialects.writing import EVENT_STREAM, event
from areal_agents.rendering import Tokenizer

TextKind = Literal["reasoning", "message"]


class ResponsesStream:
    """Writes the events of one reply; see `StreamWriter`."""

    media_type = EVENT_STREAM

    def __init__(
        self, body: Mapping[str, Any], turn_id: str, created_at: float, tokenizer: Tokenizer
    ) -> None:
        self._body = body
        self._turn_id = turn_id
        self._created_at = created_at
        self._tokenizer = tokenizer
        self._tools = client_tools(body)
        self._sequence = 0
        self._output: list[Item] = []  # the finished items
        self._open: TextKind | None = None  # the kind of the item that is being filled
        self._texts: list[str] = []  # the pieces of its text
        self._pieces: dict[TextKind, int] = {"reasoning": 0, "message": 0}  # finished items of each kind

    def start(self) -> bytes:
        begun = response(self._body, self._turn_id, self._created_at, "in_progress")
        return self._event("response.created", response=begun) + self._event(
            "response.in_progress", response=begun
        )

    def reasoning(self, choice: int, text: str) -> bytes:
        opening = self._enter("reasoning")
        self._texts.append(text)
        return opening + self._item_event(
            "response.reasoning_summary_text.delta", summary_index=0, delta=text
        )

    def content(self, choice: int, text: str) -> bytes:
        opening = self._enter("message")
        self._texts.append(text)
        return opening + self._item_event(
            "response.output_text.delta", content_index=0, delta=text, logprobs=[]
        )

    def call(self, choice: int, call: ToolCall) -> bytes:
        closing = self._close("completed", [])
        index = sum(item["type"] not in ("reasoning", "message") for item in self._output)
        item = call_item(self._turn_id, index, call, self._tools)
        field = "input" if item["type"] == "custom_tool_call" else "arguments"
        name = "response.custom_tool_call_input" if field == "input" else "response.function_call_arguments"
        text = item[field]
        where = {"item_id": item["id"], "output_index": len(self._output)}
        # Some clients read the name from the last of these events.
        named = {"name": item["name"]} if field == "arguments" else {}
        events = [
            self._added({**item, field: "", "status": "in_progress"}),
            self._event(f"{name}.delta", **where, delta=text) if text else b"",
            self._event(f"{name}.done", **where, **named, **{field: text}),
            self._done(item),
        ]
        return closing + b"".join(events)

    def finish(self, done: Sequence[CompletedTurn]) -> bytes:
        [turn] = done
        out = b""
        if not turn.turn.reply.tool_calls and not any(item["type"] == "message" for item in self._output):
            out += self._enter("message")
        cut = turn.finish_reason == "length" and self._open == "message" and not turn.turn.reply.tool_calls
        tokens = logprobs(self._body, turn.turn.completion, self._tokenizer)
        out += self._close("incomplete" if cut else "completed", tokens)
        output = output_items(self._body, turn, tokens)
        if [item["id"] for item in output] != [item["id"] for item in self._output]:
            output = self._output  # text after a call was streamed as an item of its own
        ended = ended_response(self._body, self._created_at, turn, output)
        return out + self._event(f"response.{ended['status']}", response=ended)

    def error(self, refusal: RequestError) -> bytes:
        failed = response(
            self._body,
            self._turn_id,
            self._created_at,
            "failed",
            output=self._output,
            error={"code": _error_code(refusal), "message": refusal.message},
        )
        return self._event("response.failed", response=failed)

    def _enter(self, kind: TextKind) -> bytes:
        """Close the open item and open one of another kind; b"" if one of this kind is open."""
        if self._open == kind:
            return b""
        out = self._close("completed", [])
        self._open, self._texts = kind, []
        if kind == "reasoning":
            out += self._added(reasoning_item(self._turn_id, "", "in_progress", self._pieces[kind]))
            part = {"type": "summary_text", "text": ""}
            return out + self._item_event("response.reasoning_summary_part.added", summary_index=0, part=part)
        out += self._added(message_item(self._turn_id, [], "in_progress", self._pieces[kind]))
        return out + self._item_event("response.content_part.added", content_index=0, part=text_part("", []))

    def _close(self, status: Status, tokens: list[Item]) -> bytes:
        """Close the open item, whose text has the logprobs `tokens`; b"" if none is open."""
        kind, text = self._open, "".join(self._texts)
        if kind is None:
            return b""
        if kind == "reasoning":
            item = reasoning_item(self._turn_id, text, status, self._pieces[kind])
            part = {"type": "summary_text", "text": text}
            events = [
                self._item_event("response.reasoning_summary_text.done", summary_index=0, text=text),
                self._item_event("response.reasoning_summary_part.done", summary_index=0, part=part),
            ]
        else:
            part = text_part(text, tokens)
            item = message_item(self._turn_id, [part], status, self._pieces[kind])
            events = [
                self._item_event("response.output_text.done", content_index=0, text=text, logprobs=tokens),
                self._item_event("response.content_part.done", content_index=0, part=part),
            ]
        self._open = None
        self._pieces[kind] += 1
        return b"".join(events) + self._done(item)

    def _added(self, item: Item) -> bytes:
        # Only the finished item has the handle, because some clients concatenate the fields of both.
        begun = {name: value for name, value in item.items() if name != "encrypted_content"}
        return self._event("response.output_item.added", output_index=len(self._output), item=begun)

    def _done(self, item: Item) -> bytes:
        out = self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        return out

    def _item_event(self, name: str, /, **fields: Any) -> bytes:
        """Return an event of the open item."""
        assert self._open is not None
        kind: ItemKind = self._open
        where = {
            "item_id": item_id(self._turn_id, kind, self._pieces[self._open]),
            "output_index": len(self._output),
        }
        return self._event(name, **where, **fields)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        data = {"type": name, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event(orjson.dumps(data), name)


def _error_code(refusal: RequestError) -> str:
    """Return the error code of a failed response; clients retry after "server_error"."""
    if refusal.status == 429:
        return "rate_limit_exceeded"
    return refusal.code if refusal.status < 500 else "server_error"
