"""The dialect of OpenAI's chat completions API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from areal_agents.core.completion import Grammar
from areal_agents.core.messages import Message, ToolCall
from areal_agents.errors import RequestError, shown
from areal_agents.proxy.calls.request import CallPolicy, CompletedTurn, ModelRequest, SamplingWish
from areal_agents.proxy.dialects import reading
from areal_agents.proxy.dialects.base import ReadContext
from areal_agents.proxy.dialects.chat.answers import ChatStream, chat_answer
from areal_agents.proxy.dialects.reading import refuse
from areal_agents.proxy.dialects.replayed import Group
from areal_agents.proxy.dialects.writing import COMMENT, openai_error
from areal_agents.rendering import Tokenizer

_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class ChatDialect:
    """POST /v1/chat/completions; see `Dialect`."""

    name = "chat"
    keepalive = COMMENT

    def referenced_turn(self, body: Mapping[str, Any]) -> str | None:
        """See `Dialect.referenced_turn`. Requests of this API do not refer to turns."""
        return None

    def read(self, body: Mapping[str, Any], context: ReadContext) -> ModelRequest:
        """See `Dialect.read`."""
        return reading.within_depth(lambda: _read(body, context))

    def answer(self, body: Mapping[str, Any], done: Sequence[CompletedTurn], tokenizer: Tokenizer) -> bytes:
        """See `Dialect.answer`. The answer is a `ChatCompletion`."""
        return chat_answer(body, done, tokenizer)

    def stream(
        self,
        body: Mapping[str, Any],
        request: ModelRequest,
        turn_ids: Sequence[str],
        created_at: float,
        tokenizer: Tokenizer,
    ) -> ChatStream:
        """See `Dialect.stream`. The stream has `ChatCompletionChunk`s, then [DONE]."""
        return ChatStream(body, turn_ids, created_at, tokenizer)

    def error(self, refusal: RequestError) -> bytes:
        """See `Dialect.error`."""
        return openai_error(refusal)


def _read(body: Mapping[str, Any], context: ReadContext) -> ModelRequest:
    raw_messages = body.get("messages")
    if not isinstance(raw_messages, list) or not raw_messages:
        refuse("messages must be a list with at least one message", "messages")
    if len(raw_messages) > context.max_messages:
        refuse(
            f"a request may have at most {context.max_messages} messages, got {len(raw_messages)}", "messages"
        )
    reading.refuse_fields_of_other_servers(body)
    if body.get("web_search_options") is not None:
        reading.unsupported(
            "web_search_options is not supported, because this server runs no tools; remove it",
            "web_search_options",
        )
    for name in ("functions", "function_call"):
        if body.get(name):
            reading.unsupported(f"{name} is not supported; use tools", name)
    modalities = body.get("modalities") or []
    if not isinstance(modalities, list):
        refuse(f"modalities must be a list, got {shown(modalities)}", "modalities")
    if "audio" in modalities:
        reading.unsupported("this model writes text only", "modalities")
    tools = _tools(body.get("tools"))
    calls, named = _tool_choice(body.get("tool_choice"), tools)
    options = reading.template_options(body)
    return ModelRequest(
        messages=_messages(raw_messages, context),
        tools=tools,
        tools_id=reading.context_digest(tools, options),
        wish=_wish(body),
        calls=calls,
        callable_tools=named,
        parallel_calls=body.get("parallel_tool_calls") is not False,
        output=_output(body.get("response_format")),
        choices=reading.choices(body),
        template_options=options,
        logprobs=bool(body.get("logprobs")),
        label=context.label,
    )


def _wish(body: Mapping[str, Any]) -> SamplingWish:
    limits = [reading.positive(body, name) for name in ("max_completion_tokens", "max_tokens")]
    return SamplingWish(
        max_tokens=min((limit for limit in limits if limit is not None), default=None),
        logit_bias=True if body.get("logit_bias") else None,
        stop=reading.stops(body.get("stop")),
        temperature=reading.number(body, "temperature"),
        top_p=reading.number(body, "top_p"),
        top_k=reading.top_k(body),
        min_p=reading.number(body, "min_p"),
        frequency_penalty=reading.number(body, "frequency_penalty"),
        presence_penalty=reading.number(body, "presence_penalty"),
        seed=reading.integer(body, "seed"),
        top_logprobs=_top_logprobs(body),
    )


def _top_logprobs(body: Mapping[str, Any]) -> int:
    count = reading.integer(body, "top_logprobs") or 0
    if not 0 <= count <= 20:
        refuse(f"top_logprobs must be from 0 to 20, got {count}", "top_logprobs")
    if count and not body.get("logprobs"):
        refuse("top_logprobs needs logprobs: true", "top_logprobs")
    return count


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        refuse(f"tools must be a list, got {shown(value)}", "tools")
    for index, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            refuse('a tool must have type "function" and a function object', f"tools[{index}]")
        if not isinstance(function.get("name"), str) or not function["name"]:
            refuse("a function tool must have a name", f"tools[{index}].function.name")
    return tuple(value)


def _tool_choice(value: Any, tools: Sequence[Mapping[str, Any]]) -> tuple[CallPolicy, tuple[str, ...]]:
    if value in (None, "auto"):
        return "auto", ()
    if value == "none":
        return "none", ()
    if value == "required":
        if not tools:
            refuse('tool_choice "required" needs at least one tool in tools', "tool_choice")
        return "required", ()
    names = [tool["function"]["name"] for tool in tools]
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        return _allowed_tools(value.get("allowed_tools"), names)
    name = _function_name(value)
    if name is None:
        refuse(
            'tool_choice must be "auto", "none", "required", or an object that names a function or allows '
            f"some, got {shown(value)}",
            "tool_choice",
        )
    if name not in names:
        refuse(f"tool_choice names {shown(name)}, which is not in tools", "tool_choice")
    return "required", (name,)


def _allowed_tools(value: Any, names: Sequence[str]) -> tuple[CallPolicy, tuple[str, ...]]:
    where = "tool_choice.allowed_tools"
    listed = value.get("tools") if isinstance(value, dict) else None
    if not isinstance(listed, list):
        refuse(f"allowed_tools must be an object with mode and a list of tools, got {shown(value)}", where)
    allowed = [_function_name(tool) for tool in listed]
    return reading.allowed_tools(value.get("mode", "auto"), allowed, names, where)


def _function_name(value: Any) -> str | None:
    """Return the name in {"type": "function", "function": {"name": …}}; None for anything else."""
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _output(value: Any) -> Grammar | None:
    kind = value.get("type") if isinstance(value, dict) else value
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return reading.JSON_OBJECT
    if kind == "json_schema":
        form = value.get("json_schema")
        if not isinstance(form, dict):
            refuse(
                'response_format with type "json_schema" must have json_schema: {name, schema}',
                "response_format.json_schema",
            )
        return reading.json_grammar(form.get("schema", {}), "response_format.json_schema.schema")
    return refuse(
        f"response_format must be of type text, json_object or json_schema, got {shown(value)}",
        "response_format",
    )


def _messages(raw: list[Any], context: ReadContext) -> tuple[Message, ...]:
    """Return the canonical messages. The role developer becomes system.

    A tool message without an id answers the first unanswered call, and one without a name gets that of its
    call.
    """
    history = context.memo.known(raw)
    groups = history.groups
    unanswered = _unanswered(groups)
    for index in range(len(groups), len(raw)):
        item = raw[index]
        if not isinstance(item, dict):
            refuse(f"a message must be an object, got {shown(item)}", f"messages[{index}]")
        call_id, tool_name = _answered(item, unanswered) if item.get("role") == "tool" else ("", "")
        message = _message(item, index, call_id, tool_name)
        if message.role == "assistant":
            unanswered = {call.id: call.name for call in message.tool_calls}
        groups.append((message,))
    context.memo.keep(history, raw)
    return tuple([message for (message,) in groups])


def _unanswered(groups: list[Group]) -> dict[str, str]:
    """Return the calls of the last reply that no tool message has answered, as call id → name of the tool."""
    answered = set()
    for (message,) in reversed(groups):
        if message.role == "assistant":
            return {call.id: call.name for call in message.tool_calls if call.id not in answered}
        answered.add(message.tool_call_id)
    return {}


def _answered(item: Mapping[str, Any], unanswered: dict[str, str]) -> tuple[str, str]:
    """Return the id and the tool name of the call that a tool message answers, "" for what is unknown."""
    call_id = item.get("tool_call_id") or item.get("id")
    if not isinstance(call_id, str):
        call_id = next(iter(unanswered), "")
    return call_id, unanswered.pop(call_id, "")


def _message(item: Mapping[str, Any], index: int, call_id: str, tool_name: str) -> Message:
    where = f"messages[{index}]"
    wire_role = item.get("role")
    role: Any = _ROLES.get(wire_role) if isinstance(wire_role, str) else None
    if role is None:
        refuse(
            f"role must be system, developer, user, assistant or tool, got {shown(wire_role)}",
            f"{where}.role",
        )
    name = item.get("name")
    fields: dict[str, Any] = {"name": name if isinstance(name, str) else None}
    if role == "assistant":
        reasoning = item.get("reasoning_content") or item.get("reasoning")
        fields["reasoning"] = reasoning if isinstance(reasoning, str) else ""
        fields["tool_calls"] = _tool_calls(item.get("tool_calls"), f"{where}.tool_calls")
    elif role == "tool":
        fields["tool_call_id"] = call_id or None
        fields["name"] = fields["name"] or tool_name or None
    return Message(role=role, content=reading.text(item.get("content"), f"{where}.content"), **fields)


def _tool_calls(value: Any, where: str) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        refuse(f"tool_calls must be a list, got {shown(value)}", where)
    calls = []
    for index, item in enumerate(value):
        function = item.get("function") if isinstance(item, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            refuse("a tool call must have a function with a name", f"{where}[{index}]")
        call_id = item.get("id")
        arguments = reading.arguments_text(function.get("arguments"))
        calls.append(ToolCall(call_id if isinstance(call_id, str) else "", name, arguments))
    return tuple(calls)
