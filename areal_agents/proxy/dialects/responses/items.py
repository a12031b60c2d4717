"""Converts input items of the Responses API to messages, and finds the turn that an item id names.

A reply is several items (reasoning, text, calls), which are converted back to one assistant message. Items
that name different turns never form one message. Adjacent items that name no turn form one message if a
single reply can have them in this order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from areal_agents.core.forest import Forest
from areal_agents.core.messages import Message, ToolCall
from areal_agents.errors import RequestError, shown
from areal_agents.proxy.dialects import reading
from areal_agents.proxy.dialects.responses.tools import custom_arguments, custom_input, flat_name
from areal_agents.proxy.dialects.turn_ids import turn_id_of, wire_id

ItemKind = Literal["reasoning", "message", "function_call", "custom_tool_call"]
_PREFIXES: dict[str, str] = {
    "reasoning": "rs_",
    "message": "msg_",
    "function_call": "fc_",
    "custom_tool_call": "ctc_",
}
_CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_SETTINGS = ("configuration_update",)  # changes settings such as the reasoning effort; ignored
# Some clients replay the reasoning of a model that they do not know as a separate assistant message.
_INLINE_REASONING = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)


def item_id(turn_id: str, kind: ItemKind, index: int) -> str:
    """Return the id of an item of a turn: of its `index`-th call, or of its `index`-th piece of text."""
    base = wire_id(turn_id, _PREFIXES[kind])
    return f"{base}_{index}" if index or kind in _CALLS else base


def turn_of_item(value: object) -> str | None:
    """Return the turn that an item's id names, None if the id has another form."""
    kind, _ = _split(value)
    return turn_id_of(value) if kind is not None else None


def _split(value: object) -> tuple[str | None, str]:
    if isinstance(value, str):
        for kind, prefix in _PREFIXES.items():
            if value.startswith(prefix):
                return kind, value.removeprefix(prefix)
    return None, ""


def named_turn(item: Mapping[str, Any]) -> str:
    """Return the turn that a replayed item names with its handle or its id, "" for none."""
    return turn_id_of(item.get("encrypted_content")) or turn_of_item(item.get("id")) or ""


def history_after(forest: Forest, turn_id: str) -> list[Message]:
    """Return the conversation up to and including the reply of a recorded turn, without its instructions."""
    out: list[Message] = []
    turns = forest.path(turn_id).turns
    for turn in turns:
        out += [*turn.new_messages, replace(turn.reply, handle=turn.id)]
    return out[1:] if turns[-1].has_instructions else out


def read_items(items: list[Any], forest: Forest, earlier: list[Message]) -> list[Message]:
    """Return the messages of `items`, which follow the messages `earlier`.

    Raise RequestError 400, which names the item, if an item is malformed, has an unsupported type, or refers
    to an unknown item.
    """
    reader = _ItemReader(forest)
    for message in earlier:
        reader.names.update((call.id, call.name) for call in message.tool_calls)
    for index, item in enumerate(items):
        reader.read(item, f"input[{index}]")
    return reader.messages()


@dataclass(slots=True)
class _ReplyItems:
    """The items of one assistant message that were read so far. `turn` is "" if none of them names a turn."""

    turn: str = ""
    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    answered: bool = False  # whether the output of a tool has followed

    def takes(self, kind: ItemKind, turn: str) -> bool:
        """Whether the next item can belong to this reply."""
        if turn and self.turn:
            return turn == self.turn
        if self.answered:
            return False
        # Until its calls are answered, no other reply can begin. Without calls, a reply ends with its text.
        return kind in _CALLS or bool(self.calls) or not self.content

    def message(self) -> Message:
        """Return the assistant message."""
        return Message(
            role="assistant",
            content="".join(self.content),
            reasoning="".join(self.reasoning),
            tool_calls=tuple(self.calls),
            handle=self.turn,
        )


class _ItemReader:
    """Reads items one by one. `names` has the name of the tool for each call id."""

    def __init__(self, forest: Forest) -> None:
        self._forest = forest
        self._out: list[Message | _ReplyItems] = []
        self._last: _ReplyItems | None = None  # the reply that the next item may belong to
        self._recorded: dict[str, str] | None = None  # arguments by call id, loaded when needed
        self.names: dict[str, str] = {}

    def messages(self) -> list[Message]:
        return [part.message() if isinstance(part, _ReplyItems) else part for part in self._out]

    def read(self, item: Any, where: str) -> None:
        if not isinstance(item, dict):
            reading.refuse(f"an input item must be an object, got {shown(item)}", where)
        kind: Any = item.get("type") or ("message" if "role" in item else None)
        if kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            self._reply("reasoning", named_turn(item)).reasoning.append(_reasoning(item, where))
        elif kind in _CALLS:
            self._call(kind, item, where)
        elif kind in _OUTPUTS:
            self._output(item, where)
        elif kind == "item_reference":
            self._reference(item, where)
        elif kind not in _SETTINGS:
            reading.unsupported(f"input items of type {shown(kind)} are not supported", f"{where}.type")

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role: Any = "system" if item.get("role") == "developer" else item.get("role")
        if role not in ("system", "user", "assistant"):
            reading.refuse(
                f"role must be system, developer, user or assistant, got {shown(item.get('role'))}",
                f"{where}.role",
            )
        text = reading.text(item.get("content"), f"{where}.content")
        if role == "assistant":
            # An item with the id of a turn has the sampled text, which may contain the tags.
            thought = None if named_turn(item) else _INLINE_REASONING.match(text)
            if thought is not None:
                self._reply("reasoning", "").reasoning.append(thought[1])
                text = text[thought.end() :]
                if not text:
                    return
            self._reply("message", named_turn(item)).content.append(text)
            return
        self._out.append(Message(role=role, content=text))
        self._last = None

    def _call(self, kind: ItemKind, item: Mapping[str, Any], where: str) -> None:
        name, call_id = item.get("name"), item.get("call_id")
        if not isinstance(name, str) or not name:
            reading.refuse("a call must have the name of its tool", f"{where}.name")
        if not isinstance(call_id, str) or not call_id:
            reading.refuse("a call must have a call_id", f"{where}.call_id")
        if kind == "custom_tool_call":
            arguments = self._custom_arguments(call_id, item.get("input"), where)
        else:
            arguments = reading.arguments_text(item.get("arguments"))
        flat = flat_name(name, item.get("namespace"))
        self._add_call(kind, named_turn(item), ToolCall(call_id, flat, arguments))

    def _add_call(self, kind: ItemKind, turn: str, call: ToolCall) -> None:
        self._reply(kind, turn).calls.append(call)
        self.names[call.id] = call.name

    def _custom_arguments(self, call_id: str, text: Any, where: str) -> str:
        if not isinstance(text, str):
            reading.refuse(f"input must be a string, got {shown(text)}", f"{where}.input")
        if self._recorded is None:
            replies = (turn.reply for turn in self._forest.turns)
            self._recorded = {call.id: call.arguments for reply in replies for call in reply.tool_calls}
        arguments = self._recorded.get(call_id)
        if arguments is not None and custom_input(arguments) == text:
            return arguments  # as the model wrote them, which `custom_arguments` may format differently
        return custom_arguments(text)

    def _output(self, item: Mapping[str, Any], where: str) -> None:
        call_id = item.get("call_id")
        if not isinstance(call_id, str) or not call_id:
            reading.refuse("the output of a call must have its call_id", f"{where}.call_id")
        text = reading.text(item.get("output"), f"{where}.output")
        self._out.append(
            Message(role="tool", content=text, tool_call_id=call_id, name=self.names.get(call_id))
        )
        if self._last is not None:
            self._last.answered = True

    def _reference(self, item: Mapping[str, Any], where: str) -> None:
        """Restore an item from its turn. If a text was streamed in several items, the first has all of it."""
        value = item.get("id")
        kind, rest = _split(value)
        turn_id = turn_of_item(value)
        reply = self._forest[turn_id].reply if turn_id is not None and turn_id in self._forest else None
        digits = rest.partition("_")[2]
        index = int(digits) if digits.isdecimal() and len(digits) < 9 else 0
        if reply is None or turn_id is None or (kind in _CALLS and index >= len(reply.tool_calls)):
            raise RequestError(
                f"Item with id '{value}' not found.", code="item_not_found", param=f"{where}.id"
            )
        if kind == "reasoning":
            self._reply("reasoning", turn_id).reasoning.append("" if index else reply.reasoning)
        elif kind == "message":
            self._reply("message", turn_id).content.append("" if index else reply.content)
        else:
            self._add_call("function_call", turn_id, reply.tool_calls[index])

    def _reply(self, kind: ItemKind, turn: str) -> _ReplyItems:
        """Return the reply that an item belongs to; begin a new one if needed."""
        if self._last is None or not self._last.takes(kind, turn):
            self._last = _ReplyItems()
            self._out.append(self._last)
        self._last.turn = self._last.turn or turn
        return self._last


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    """Return the text of a reasoning item: its content if it has any, else its summary."""
    for name, joint in (("content", ""), ("summary", "\n\n")):
        parts = item.get(name) or []
        if not isinstance(parts, list):
            reading.refuse(f"{name} must be a list of parts", f"{where}.{name}")
        texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
        if not all(isinstance(text, str) for text in texts):
            reading.refuse("the text of a reasoning part must be a string", f"{where}.{name}")
        if texts:
            return joint.join(text for text in texts if text is not None)
    return ""
