"""Converts a body of the Messages API to a canonical request.

A recorded reply becomes one assistant message, with its text blocks joined, its thinking as reasoning, and
the turn that its signature names. cache_control is ignored, because clients move it from message to message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from areal_agents.core.completion import Grammar
from areal_agents.core.messages import Message, ToolCall
from areal_agents.errors import RequestError, shown
from areal_agents.proxy.calls.request import CallPolicy, ModelRequest, SamplingWish
from areal_agents.proxy.dialects import reading
from areal_agents.proxy.dialects.base import ReadContext
from areal_agents.proxy.dialects.reading import refuse, unsupported
from areal_agents.proxy.dialects.replayed import Group, MessageMemo, joined_replies
from areal_agents.proxy.dialects.turn_ids import turn_id_of

Block = Mapping[str, Any]


def read_request(body: Mapping[str, Any], context: ReadContext, *, counting: bool = False) -> ModelRequest:
    """Return the canonical form of a body.

    Args:
        counting: whether only the prompt's length is needed: max_tokens may be absent, and the last message
            may be a reply.

    Raises:
        RequestError: 400; `param` is the path of the invalid field, for example "messages.0.content.1".
    """
    return reading.within_depth(lambda: _canonical(body, context, counting))


def named_turn(body: Mapping[str, Any]) -> str | None:
    """Return the turn that the last assistant message with a handle names, or None."""
    found = body.get("messages")
    for item in reversed(found if isinstance(found, list) else []):
        if isinstance(item, dict) and item.get("role") == "assistant":
            content = item.get("content")
            blocks = [b for b in content if isinstance(b, dict)] if isinstance(content, list) else []
            if handle := _handle(item, blocks):
                return handle
    return None


def _canonical(body: Mapping[str, Any], context: ReadContext, counting: bool) -> ModelRequest:
    found = body.get("messages")
    if not isinstance(found, list) or not found:
        refuse("messages: at least one message is required", "messages")
    if len(found) > context.max_messages:
        refuse(f"a request may have at most {context.max_messages} messages, got {len(found)}", "messages")
    if not counting and body.get("max_tokens") is None:
        refuse("max_tokens: Field required", "max_tokens")
    if body.get("thread") is not None:
        # On exactly these details the SDK sends the conversation again, whole and without threads.
        raise RequestError(
            "threads are not supported; send the whole conversation in messages",
            code="thread_unsupported_request",
            param="thread",
            details={"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
        )
    for name in ("container", "mcp_servers"):
        if body.get(name):
            unsupported(f"{name} is not supported; run the tools in the client", name)
    messages = (*_system(body.get("system")), *_messages(found, context.memo))
    if not counting and messages[-1].role == "assistant":
        unsupported("prefill is not supported; the last message must be a user message", "messages")
    tools, options = _tools(body.get("tools")), reading.template_options(body)
    calls, named, parallel = _tool_choice(body.get("tool_choice"), tools)
    return ModelRequest(
        messages=messages,
        tools=tools,
        tools_id=reading.context_digest(tools, options),
        wish=_wish(body),
        calls=calls,
        callable_tools=named,
        parallel_calls=parallel,
        output=_output(body),
        template_options=options,
        label=context.label,
    )


def _wish(body: Mapping[str, Any]) -> SamplingWish:
    return SamplingWish(
        max_tokens=reading.positive(body, "max_tokens"),
        temperature=reading.number(body, "temperature"),
        top_p=reading.number(body, "top_p"),
        top_k=reading.top_k(body),
        stop=reading.stops(body.get("stop_sequences"), "stop_sequences"),
    )


def _output(body: Mapping[str, Any]) -> Grammar | None:
    """Return the grammar of `output_config.format` or of the older `output_format`, or None."""
    config = body.get("output_config")
    if config is not None and not isinstance(config, dict):
        refuse(f"output_config must be an object, got {shown(config)}", "output_config")
    where, form = "output_config.format", (config or {}).get("format")
    if form is None:
        where, form = "output_format", body.get("output_format")
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        refuse(f'{where} must be of type "json_schema", got {shown(form)}', where)
    return reading.json_grammar(form.get("schema"), f"{where}.schema")


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    """Return client tools as chat function tools, with only the fields that are shown to the model."""
    if value is None:
        return ()
    if not isinstance(value, list):
        refuse(f"tools must be a list, got {shown(value)}", "tools")
    tools = []
    for index, tool in enumerate(value):
        where = f"tools.{index}"
        if not isinstance(tool, dict):
            refuse(f"a tool must be an object, got {shown(tool)}", where)
        if tool.get("type") not in (None, "custom"):
            unsupported(
                f"only client tools with an input_schema are supported, got type {shown(tool['type'])}",
                where,
            )
        if not isinstance(tool.get("name"), str) or not tool["name"]:
            refuse("a tool must have a name", f"{where}.name")
        if not isinstance(tool.get("input_schema"), dict):
            refuse("a tool must have an input_schema, which is an object", f"{where}.input_schema")
        function = {"name": tool["name"], "description": tool.get("description") or ""}
        if not isinstance(function["description"], str):
            refuse("a description must be a string", f"{where}.description")
        tools.append({"type": "function", "function": {**function, "parameters": tool["input_schema"]}})
    return tuple(tools)


def _tool_choice(value: Any, tools: Sequence[Mapping[str, Any]]) -> tuple[CallPolicy, tuple[str, ...], bool]:
    """Return the call policy, the tools that may be called, () for all, and whether calls may be parallel."""
    if value is None:
        return "auto", (), True
    if not isinstance(value, dict):
        refuse(f"tool_choice must be an object, got {shown(value)}", "tool_choice")
    parallel = not reading.flag(value, "disable_parallel_tool_use")
    match value.get("type"):
        case "auto":
            return "auto", (), parallel
        case "none":
            return "none", (), parallel
        case "any":
            if not tools:
                refuse('tool_choice of type "any" needs at least one tool in tools', "tool_choice")
            return "required", (), parallel
        case "tool":
            name = value.get("name")
            if not isinstance(name, str) or name not in [tool["function"]["name"] for tool in tools]:
                refuse(f"tool_choice names {shown(name)}, which is not in tools", "tool_choice.name")
            return "required", (name,), parallel
        case kind:
            refuse(f"tool_choice.type must be auto, any, tool or none, got {shown(kind)}", "tool_choice.type")


def _system(value: Any) -> tuple[Message, ...]:
    text = "" if value is None else _paragraphs(_blocks(value, "system"), "system")
    return (Message("system", text),) if text else ()


def _messages(found: Sequence[Any], memo: MessageMemo) -> list[Message]:
    history = memo.known(found)
    groups = history.groups
    tool_names: dict[str, str] = {}  # call id → name of the tool
    for index, item in enumerate(found):
        if index == len(groups):
            groups.append(_group(item, f"messages.{index}", tool_names))
        for message in groups[index]:
            tool_names |= {call.id: call.name for call in message.tool_calls}
    memo.keep(history, found)
    return joined_replies(groups)


def _group(item: Any, where: str, tool_names: Mapping[str, str]) -> Group:
    """Return the canonical messages of one message of the API."""
    if not isinstance(item, dict):
        refuse(f"a message must be an object, got {shown(item)}", where)
    blocks = _blocks(item.get("content"), f"{where}.content")
    match item.get("role"):
        case "user":
            return tuple(_user(blocks, f"{where}.content", tool_names))
        case "system":
            return (Message("system", _paragraphs(blocks, f"{where}.content")),)
        case "assistant":
            return (_assistant(item, blocks, f"{where}.content"),)
        case role:
            return refuse(f"role must be user, assistant or system, got {shown(role)}", f"{where}.role")


def _assistant(item: Mapping[str, Any], blocks: Sequence[Block], where: str) -> Message:
    content, reasoning = [], []
    calls = []
    for index, block in enumerate(blocks):
        at = f"{where}.{index}"
        match block.get("type", "text"):
            case "text":
                content.append(_text(block, "text", at))
            case "thinking":
                reasoning.append(_text(block, "thinking", at))
            case "redacted_thinking":
                pass  # has no text, but may have a handle
            case "tool_use":
                calls.append(_call(block, at))
            case kind:
                unsupported(f"blocks of type {shown(kind)} are not supported in assistant messages", at)
    return Message(
        "assistant",
        "".join(content),
        reasoning="".join(reasoning),
        tool_calls=tuple(calls),
        handle=_handle(item, blocks),
    )


def _handle(item: Mapping[str, Any], blocks: Sequence[Block]) -> str:
    """Return the turn that a message names with a signature or, if the client sends it back, with its id."""
    carried = [block.get("signature") or block.get("data") for block in blocks]
    named = [turn for value in (*carried, item.get("id")) if (turn := turn_id_of(value))]
    return named[0] if named else ""


def _call(block: Block, where: str) -> ToolCall:
    name, call_id = block.get("name"), block.get("id")
    if not isinstance(name, str) or not name:
        refuse("a tool_use block must have the name of its tool", f"{where}.name")
    return ToolCall(
        call_id if isinstance(call_id, str) else "", name, reading.arguments_text(block.get("input"))
    )


def _user(blocks: Sequence[Block], where: str, tool_names: Mapping[str, str]) -> list[Message]:
    """Return a message for each tool result, then one with the other blocks, if there are any."""
    out: list[Message] = []
    others = []
    for index, block in enumerate(blocks):
        at = f"{where}.{index}"
        if block.get("type") != "tool_result":
            others.append((block, at))
            continue
        call_id = block.get("tool_use_id")
        if not isinstance(call_id, str):
            refuse("a tool_result block must have the id of its tool_use block", f"{at}.tool_use_id")
        name = tool_names.get(call_id)
        out.append(_result(block, at, call_id, name))
    if others or not out:
        out.append(Message("user", _joined(others)))
    return out


def _result(block: Block, where: str, call_id: str, name: str | None) -> Message:
    text = _paragraphs(_blocks(block.get("content"), f"{where}.content"), f"{where}.content")
    return Message("tool", text, tool_call_id=call_id, name=name)


def _blocks(content: Any, where: str) -> Sequence[Block]:
    """Return content as blocks: a string becomes one text block, and null becomes ()."""
    if content is None:
        return ()
    if isinstance(content, str):
        return ({"type": "text", "text": content},)
    if not isinstance(content, list):
        refuse(f"content must be a string or a list of blocks, got {shown(content)}", where)
    for index, block in enumerate(content):
        if not isinstance(block, dict):
            refuse(f"a block must be an object, got {shown(block)}", f"{where}.{index}")
    return content


def _paragraphs(blocks: Sequence[Block], where: str) -> str:
    return _joined((block, f"{where}.{index}") for index, block in enumerate(blocks))


def _joined(blocks: Iterable[tuple[Block, str]]) -> str:
    """Join text blocks (block, path), each on a new line; for all roles except the assistant's."""
    return "\n".join(_text_block(block, where) for block, where in blocks)


def _text_block(block: Block, where: str) -> str:
    kind = block.get("type", "text")
    if kind != "text":
        unsupported(f"this model accepts only text, got a block of type {shown(kind)}", where)
    return _text(block, "text", where)


def _text(block: Block, field: str, where: str) -> str:
    value = block.get(field)
    if not isinstance(value, str):
        refuse(f"must be a string, got {shown(value)}", f"{where}.{field}")
    return value
