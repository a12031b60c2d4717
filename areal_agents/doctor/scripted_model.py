"""A scripted model that exercises an agent: it thinks, calls the tools that it is offered, and then answers.

It sees only prompts, as any model does, so it finds the tools in the rendered prompt, and writes its calls in
the format of the template.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal_agents.core.messages import Message, ToolCall
from areal_agents.doctor.instances import instance_of
from areal_agents.errors import RenderingError
from areal_agents.rendering import ChatRenderer
from areal_agents.testing import ScriptedCall, ScriptedReply

ANSWER = "This is the scripted model of areal-agents doctor; it has seen your message."
_THOUGHT = "The scripted model thinks a little."
_CALLS_IN_A_ROW = 2
_QUESTION = Message("user", "?")
_SECTION = ("<tools>\n", "\n</tools>")  # for model families that list tools as JSON lines
_PROBE = {
    "type": "function",
    "function": {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool as the prompt offers it."""

    name: str
    parameters: Mapping[str, Any]


class ScriptedModel:
    """A script for the scripted engine. It must be called on one event loop only."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._asked: Counter[tuple[str, ...]] = Counter()  # by the names of the offered tools
        self._called: Counter[tuple[str, ...]] = Counter()
        probe = renderer.tokenizer.decode(renderer.render([_QUESTION], [_PROBE]).tolist())
        self._lists_tools = _SECTION[0] in probe

    def __call__(self, call: ScriptedCall) -> ScriptedReply:
        params = call.body.get("sampling_params") or {}
        allowed = _allowed(params, self._tools(call.prompt_text))
        if allowed.tools and (not allowed.answer or self._calls_now(allowed.tools)):
            return self._reply(_called(self._next_of(allowed.tools)))
        if allowed.schema is not None:
            return self._reply(Message("assistant", json.dumps(instance_of(allowed.schema))))
        return self._reply(Message("assistant", ANSWER, reasoning=_THOUGHT))

    def _calls_now(self, tools: Sequence[Tool]) -> bool:
        """Whether the next reply calls a tool: some calls are followed by an answer, then by calls again."""
        names = tuple(tool.name for tool in tools)
        self._asked[names] += 1
        return self._asked[names] % (_CALLS_IN_A_ROW + 1) != 0

    def _next_of(self, tools: Sequence[Tool]) -> Tool:
        """Return the tools in turn."""
        names = tuple(tool.name for tool in tools)
        self._called[names] += 1
        return tools[(self._called[names] - 1) % len(tools)]

    def _tools(self, prompt: str) -> list[Tool]:
        if self._lists_tools:  # what looks like a tool elsewhere is part of a message
            prompt = prompt.partition(_SECTION[0])[2].partition(_SECTION[1])[0]
        return tools_in(prompt)

    def _reply(self, message: Message) -> ScriptedReply:
        """Return the tokens of `message` as the template renders it, up to the first stop token."""
        asked = self._renderer.render([_QUESTION]).tolist()
        try:
            whole = self._renderer.render([_QUESTION, message], generation_prompt=False).tolist()
        except RenderingError as error:
            return ScriptedReply(
                error=f"the template cannot render the scripted reply: {error}", error_status=400
            )
        if whole[: len(asked)] != asked:  # some templates open a reply with tokens that they omit later
            return ScriptedReply(message.content or _as_text(message))
        ids = whole[len(asked) :]
        ends = [index for index, token in enumerate(ids) if token in self._renderer.stop_token_ids]
        return ScriptedReply(token_ids=tuple(ids[: ends[0] + 1] if ends else ids))


def tools_in(prompt: str) -> list[Tool]:
    """Return the tools that a prompt offers: JSON objects with a name and parameters."""
    found: dict[str, Tool] = {}
    for data in _objects(prompt):
        function = data.get("function", data)
        if not isinstance(function, dict):
            continue
        name, parameters = function.get("name"), function.get("parameters")
        if isinstance(name, str) and isinstance(parameters, dict) and "arguments" not in function:
            found.setdefault(name, Tool(name, parameters))
    return list(found.values())


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield the outermost JSON objects that begin a line."""
    decoder = json.JSONDecoder()
    at = text.find("{")
    while at >= 0:
        end = at + 1
        if at == 0 or text[at - 1] in "\n [":
            try:
                data, end = decoder.raw_decode(text, at)
            except ValueError:
                pass
            else:
                yield data
        at = text.find("{", end)


@dataclass(frozen=True, slots=True)
class _Allowed:
    """The forms that a reply may have: a call of one of these tools, text, or JSON that fits `schema`."""

    tools: tuple[Tool, ...]
    answer: bool = True
    schema: Any = None


def _allowed(params: Mapping[str, Any], offered: Sequence[Tool]) -> _Allowed:
    """Return what the sampling parameters of a request allow as a reply."""
    if schema := params.get("json_schema"):
        return _Allowed((), schema=json.loads(schema))
    if not (tag := params.get("structural_tag")):
        return _Allowed(tuple(offered))
    nodes = list(_leaves(json.loads(tag)["format"]))
    texts = "".join(node for node in nodes if isinstance(node, str))
    tools = tuple(tool for tool in offered if json.dumps(tool.name, ensure_ascii=False)[1:-1] in texts)
    # The name of a tool precedes its arguments, so a schema without a name before it is that of an answer.
    before = ""
    for node in nodes:
        if not isinstance(node, str):
            break
        before += node
    schemas = [node for node in nodes if not isinstance(node, str)]
    is_answer = bool(schemas) and not any(tool.name in before for tool in tools)
    return _Allowed(tools, is_answer, schemas[0]["json_schema"] if is_answer else None)


def _leaves(node: Any) -> Iterator[str | dict[str, Any]]:
    """Yield the constant strings and the JSON schemas of a structural tag, in order."""
    if isinstance(node, list):
        for item in node:
            yield from _leaves(item)
    elif isinstance(node, dict):
        if "json_schema" in node:
            yield node
        elif node.get("type") == "const_string":
            yield str(node["value"])
        else:
            for value in node.values():
                yield from _leaves(value)


def _called(tool: Tool) -> Message:
    arguments = json.dumps(instance_of(tool.parameters) or {})
    call = ToolCall("call_0", tool.name, arguments)
    return Message("assistant", "", reasoning=_THOUGHT, tool_calls=(call,))


def _as_text(message: Message) -> str:
    """Return the calls in the markup that most templates share."""
    return "\n".join(
        f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n</tool_call>'
        for call in message.tool_calls
    )
