"""Converts tools of the Responses API to chat function tools, and calls of them back.

A custom tool takes free text. The model sees it as a function with one string argument, `input`, and the
client receives the text of that argument. A tool of a namespace is a function whose name begins with the
namespace. Tools that a server of OpenAI would run are left out, unless the request forces a call of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areal_agents.errors import shown
from areal_agents.proxy.calls.request import CallPolicy
from areal_agents.proxy.dialects import reading

_INPUT = "input"
# Tools that run on OpenAI's servers. Clients such as codex always offer some, and work without them.
_HOSTED = {
    "code_interpreter", "file_search", "image_generation", "mcp", "tool_search", "web_search",
    "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ClientTool:
    """How the client knows a tool that the model calls by one flat name."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


def read_tools(value: Any) -> tuple[dict[str, Any], ...]:
    """Return `tools` as chat function tools, without the hosted ones.

    Raises:
        RequestError: 400; a tool is malformed or has an unknown type.
    """
    if value is None:
        return ()
    if not isinstance(value, list):
        reading.refuse(f"tools must be a list, got {shown(value)}", "tools")
    found: list[dict[str, Any]] = []
    for index, tool in enumerate(value):
        where = f"tools[{index}]"
        if not isinstance(tool, dict):
            reading.refuse(f"a tool must be an object, got {shown(tool)}", where)
        if tool.get("type") == "namespace":
            found += _namespace(tool, where)
        elif not _is_hosted(tool):
            found.append(_tool(tool, where))
    return tuple(found)


def hosted_tools(body: Mapping[str, Any]) -> list[str]:
    """Return the types of the tools that are left out, because OpenAI's servers would run them."""
    tools = body.get("tools")
    found = tools if isinstance(tools, list) else []
    return [tool["type"] for tool in found if isinstance(tool, dict) and _is_hosted(tool)]


def flat_name(name: str, namespace: object) -> str:
    """Return the name by which the model calls a tool."""
    if not isinstance(namespace, str) or not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def read_tool_choice(
    value: Any, tools: tuple[dict[str, Any], ...], *, where: str = "tool_choice"
) -> tuple[CallPolicy, tuple[str, ...]]:
    """Return the call policy, and the tools that may be called if a call is required; () for all."""
    if value is None or value == "auto":
        return "auto", ()
    if value == "none":
        return "none", ()
    names = [tool["function"]["name"] for tool in tools]
    if value == "required":
        if not names:
            reading.refuse('tool_choice "required" needs at least one tool in tools', where)
        return "required", ()
    if not isinstance(value, dict):
        reading.refuse(
            f'tool_choice must be "auto", "none", "required" or an object, got {shown(value)}', where
        )
    kind = value.get("type")
    if kind == "allowed_tools":
        return _allowed(value, names, where)
    if kind not in ("function", "custom"):
        reading.unsupported(f"tool_choice of type {shown(kind)} is not supported; name a function", where)
    named = flat_name(str(value.get("name")), value.get("namespace"))
    if named not in names:
        reading.refuse(
            f"tool_choice names {shown(value.get('name'))}, which is not in tools: {shown(names)}",
            f"{where}.name",
        )
    return "required", (named,)


def client_tools(body: Mapping[str, Any]) -> dict[str, ClientTool]:
    """Return the tools of a validated request, by the names that the model uses."""
    found: dict[str, ClientTool] = {}
    for tool in body.get("tools") or ():
        inner, namespace = (tool["tools"], tool["name"]) if tool["type"] == "namespace" else ([tool], None)
        for one in inner:
            if one["type"] in ("function", "custom"):
                name = one["name"]
                found[flat_name(name, namespace)] = ClientTool(name, namespace, one["type"] == "custom")
    return found


def custom_arguments(text: str) -> str:
    """Return the arguments of the function call that represents a custom tool's call."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """Return the text of a custom tool's call, or the arguments themselves if they have another form."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if isinstance(found, dict) and list(found) == [_INPUT] and isinstance(found[_INPUT], str):
        return found[_INPUT]
    return arguments


def _is_hosted(tool: Mapping[str, Any]) -> bool:
    kind = tool.get("type")
    return isinstance(kind, str) and kind in _HOSTED


def _namespace(group: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Return the tools of a namespace, whose description precedes the description of each of them."""
    name, description, tools = group.get("name"), group.get("description") or "", group.get("tools")
    if not isinstance(name, str) or not name:
        reading.refuse("a namespace of tools must have a name", f"{where}.name")
    if not isinstance(description, str):
        reading.refuse("the description of a namespace must be a string", f"{where}.description")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        reading.refuse("a namespace must have a list of tools", f"{where}.tools")
    found = [_tool(tool, f"{where}.tools[{index}]") for index, tool in enumerate(tools)]
    for tool in found:
        function = tool["function"]
        function["name"] = flat_name(function["name"], name)
        told = [text for text in (description, function.get("description")) if text]
        if told:
            function["description"] = "\n\n".join(told)
    return found


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in ("function", "custom"):
        reading.unsupported(
            f"tools of type {shown(kind)} are not supported; use function or custom tools, which the client "
            "runs",
            where,
        )
    if not isinstance(tool.get("name"), str) or not tool["name"]:
        reading.refuse(f"a {kind} tool must have a name", f"{where}.name")
    if kind == "custom":
        return {"type": "function", "function": _custom_function(tool, where)}
    parameters = tool.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        reading.refuse(f"parameters must be a JSON schema, got {shown(parameters)}", f"{where}.parameters")
    fields = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {f: tool[f] for f in fields if tool.get(f) is not None}}


def _custom_function(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    description = tool.get("description") or ""
    form = tool.get("format") or {}
    if not isinstance(form, dict) or not isinstance(description, str):
        reading.refuse(
            "the description of a custom tool must be a string, and its format must be an object", where
        )
    if form.get("type") == "grammar":  # shown to the model, not enforced
        definition, syntax = form.get("definition"), form.get("syntax")
        description = f"{description}\n\nThe input must match this {syntax} grammar:\n{definition}".strip()
    text = {"type": "string", "description": "The input of the tool, as plain text."}
    schema = {"type": "object", "properties": {_INPUT: text}, "required": [_INPUT]}
    return {"name": tool["name"], "description": description, "parameters": schema}


def _allowed(value: Mapping[str, Any], names: list[str], where: str) -> tuple[CallPolicy, tuple[str, ...]]:
    listed = value.get("tools")
    tools = listed if isinstance(listed, list) else []
    allowed = [
        flat_name(str(tool.get("name")), tool.get("namespace")) if isinstance(tool, dict) else None
        for tool in tools
    ]
    return reading.allowed_tools(value.get("mode", "auto"), allowed, names, where)
