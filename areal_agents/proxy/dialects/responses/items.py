"""Converts input items of the Responses API to messages, and finds the turn that an item id names.

The reply of one turn is several items (reasoning, text, calls), and comes back as one assistant message.
Items that name different turns are never one message; items that name none are one message as long as
they stand together in an order that one reply can have.
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
from areal_agents.proxy.dialects.responses.tools import custom_arguments, custom_input
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
_SETTINGS = ("configuration_update",)  # of the reasoning effort and the like, which are not ours to set
# How some clients replay reasoning to a model that they do not know: as an assistant message of its own.
_INLINE_REASONING = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)


def item_id(turn_id: str, kind: ItemKind, index: int) -> str:
    """The id of an item of a turn: its `index`-th call, or its `index`-th piece of text."""
    base = wire_id(turn_id, _PREFIXES[kind])
    return f"{base}_{index}" if index or kind in _CALLS else base


def turn_of_item(value: object) -> str | None:
    """The turn that an item's id names, None for an id that is not ours."""
    kind, _ = _split(value)
    return turn_id_of(value) if kind is not None else None


def _split(value: object) -> tuple[str | None, str]:
    if isinstance(value, str):
        for kind, prefix in _PREFIXES.items():
            if value.startswith(prefix):
                return kind, value.removeprefix(prefix)
    return None, ""


def named_turn(item: Mapping[str, Any]) -> str:
    """The turn that a replayed item of a reply names, by its handle or by its id; "" for none."""
    return turn_id_of(item.get("encrypted_content")) or turn_of_item(item.get("id")) or ""


def history_after(forest: Forest, turn_id: str) -> list[Message]:
    """The conversation up to and with the reply of a recorded turn, without its instructions."""
    out: list[Message] = []
    turns = forest.path(turn_id).turns
    for turn in turns:
        out += [*turn.new_messages, replace(turn.reply, handle=turn.id)]
    return out[1:] if turns[-1].has_instructions else out


def read_items(items: list[Any], forest: Forest, earlier: list[Message]) -> list[Message]:
    """The messages of `items`, which follow the messages `earlier`.

    RequestError 400 names the item that is malformed, of a type that this server cannot read, or a
    reference to an item of no recorded turn.
    """
    reader = _Reader(forest)
    for message in earlier:
        reader.names.update((call.id, call.name) for call in message.tool_calls)
    for index, item in enumerate(items):
        reader.read(item, f"input[{index}]")
    return reader.messages()


@dataclass(slots=True)
class _Reply:
    """The items of one assistant message so far. `turn` is "" while none of them names its turn."""

    turn: str = ""
    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    answered: bool = False  # the output of a tool has come since

    def takes(self, kind: ItemKind, turn: str) -> bool:
        """Whether an item can belong to this reply too."""
        if turn and self.turn:
            return turn == self.turn
        if self.answered:
            return False
        # With a call unanswered no other reply can have begun; without one, a reply has one text, at its end.
        return kind in _CALLS or bool(self.calls) or not self.content

    def message(self) -> Message:
        """The whole message."""
        return Message(
            role="assistant",
            content="".join(self.content),
            reasoning="".join(self.reasoning),
            tool_calls=tuple(self.calls),
            handle=self.turn,
        )


class _Reader:
    """Reads items one by one. `names` has the tool's name of each call id seen."""

    def __init__(self, forest: Forest) -> None:
        self._forest = forest
        self._out: list[Message | _Reply] = []
        self._last: _Reply | None = None  # the reply that the next item may belong to
        self._recorded: dict[str, str] | None = None  # arguments of the episode's calls, once they are needed
        self.names: dict[str, str] = {}

    def messages(self) -> list[Message]:
        return [part.message() if isinstance(part, _Reply) else part for part in self._out]

    def read(self, item: Any, where: str) -> None:
        if not isinstance(item, dict):
            reading.refuse("an input item must be an object", where)
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
            # Under an id of ours it is what was sampled, tags and all.
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
            reading.refuse("a call needs the name of its tool", f"{where}.name")
        if not isinstance(call_id, str) or not call_id:
            reading.refuse("a call needs a call_id", f"{where}.call_id")
        if kind == "custom_tool_call":
            arguments = self._custom_arguments(call_id, item.get("input"), where)
        else:
            arguments = reading.arguments_text(item.get("arguments"))
        self._add_call(kind, named_turn(item), ToolCall(call_id, name, arguments))

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
            return arguments  # the model need not have written them in our form
        return custom_arguments(text)

    def _output(self, item: Mapping[str, Any], where: str) -> None:
        call_id = item.get("call_id")
        if not isinstance(call_id, str) or not call_id:
            reading.refuse("the output of a call needs its call_id", f"{where}.call_id")
        text = reading.text(item.get("output"), f"{where}.output")
        self._out.append(
            Message(role="tool", content=text, tool_call_id=call_id, name=self.names.get(call_id))
        )
        if self._last is not None:
            self._last.answered = True

    def _reference(self, item: Mapping[str, Any], where: str) -> None:
        """Rebuild the item from its turn. A reply streamed in several pieces is whole in the first."""
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

    def _reply(self, kind: ItemKind, turn: str) -> _Reply:
        """The reply that an item belongs to, begun if it is the first."""
        if self._last is None or not self._last.takes(kind, turn):
            self._last = _Reply()
            self._out.append(self._last)
        self._last.turn = self._last.turn or turn
        return self._last


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    """The text of a reasoning item: its content where it has any, else its summary."""
    for name, joint in (("content", ""), ("summary", "\n\n")):
        parts = item.get(name) or []
        if not isinstance(parts, list):
            reading.refuse(f"{name} must be a list of parts", f"{where}.{name}")
        texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
        if not all(isinstance(text, str) for text in texts):
            reading.refuse("a part of reasoning needs a string as its text", f"{where}.{name}")
        if texts:
            return joint.join(text for text in texts if text is not None)
    return ""
