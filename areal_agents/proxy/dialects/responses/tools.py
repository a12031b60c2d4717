"""Converts tools of the Responses API to chat function tools, and calls of custom tools back.

A custom tool takes free text. The model sees it as a function with one string argument, `input`, and the
client receives the text of that argument. Tools that the server would have to run are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from areal_agents.errors import shown
from areal_agents.proxy.calls.request import CallPolicy
from areal_agents.proxy.dialects import reading

_INPUT = "input"


def read_tools(value: Any) -> tuple[dict[str, Any], ...]:
    """Return `tools` as chat function tools. Raise RequestError 400 for a tool that the server would run."""
    if value is None:
        return ()
    if not isinstance(value, list):
        reading.refuse(f"tools must be a list, got {shown(value)}", "tools")
    return tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(value))


def read_tool_choice(
    value: Any, tools: tuple[dict[str, Any], ...], *, where: str = "tool_choice"
) -> tuple[CallPolicy, str | None]:
    """Return the call policy, and the tool that must be called, if the choice names one."""
    if value is None or value == "auto":
        return "auto", None
    if value == "none":
        return "none", None
    names = [tool["function"]["name"] for tool in tools]
    if value == "required":
        if not names:
            reading.refuse('tool_choice "required" needs at least one tool in tools', where)
        return "required", None
    if not isinstance(value, dict):
        reading.refuse(
            f'tool_choice must be "auto", "none", "required" or an object, got {shown(value)}', where
        )
    kind = value.get("type")
    if kind == "allowed_tools":
        return _allowed(value, names, where)
    if kind not in ("function", "custom"):
        reading.unsupported(f"tool_choice of type {shown(kind)} is not supported; name a function", where)
    if value.get("name") not in names:
        reading.refuse(
            f"tool_choice names {shown(value.get('name'))}, which is not in tools: {shown(names)}",
            f"{where}.name",
        )
    return "required", value["name"]


def custom_names(body: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the custom tools of a validated request."""
    return frozenset(tool["name"] for tool in body.get("tools") or () if tool["type"] == "custom")


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


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        reading.refuse(f"a tool must be an object, got {shown(tool)}", where)
    kind = tool.get("type")
    if kind not in ("function", "custom"):
        reading.unsupported(
            f"tools of type {shown(kind)} are not supported, because this server runs no tools; use function "
            "or custom tools, which the client runs",
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


def _allowed(value: Mapping[str, Any], names: list[str], where: str) -> tuple[CallPolicy, str | None]:
    listed = value.get("tools")
    tools = listed if isinstance(listed, list) else []
    allowed = [tool.get("name") for tool in tools if isinstance(tool, dict)]
    if len(allowed) != len(tools) or any(name not in allowed for name in names):
        reading.unsupported(
            "tool_choice of type allowed_tools must allow every tool; send only the tools that may be called",
            where,
        )
    return read_tool_choice(value.get("mode", "auto"), tuple({"function": {"name": n}} for n in names))
