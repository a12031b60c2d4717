"""The chat-completions dialect: a raw request to a canonical one, a recorded turn to OpenAI's answer.

Requests are read as plain dicts, since typed parsing loses what real clients send; unknown fields
pass. What is known and cannot be honoured is refused, never ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from openai.types.chat import ChatCompletion, ChatCompletionMessage, ChatCompletionTokenLogprob
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_message_function_tool_call import (
    ChatCompletionMessageFunctionToolCall,
    Function,
)
from openai.types.completion_usage import CompletionUsage
from pydantic import BaseModel

from areal_agents.core.messages import Message, ToolCall, tools_digest
from areal_agents.core.trajectory import Turn
from areal_agents.errors import RequestError
from areal_agents.proxy.request import CompletedTurn, ModelRequest, SamplingWish
from areal_agents.rendering import Tokenizer

M = TypeVar("M", bound=BaseModel)


def parse_request(body: Mapping[str, Any], *, max_messages: int, label: str = "") -> ModelRequest:
    """The canonical form of a chat request. RequestError 400 names the field that is at fault."""
    try:
        return _canonical(body, max_messages, label)
    except RecursionError:
        raise RequestError("the request is nested too deeply", code="invalid_json") from None


def _canonical(body: Mapping[str, Any], max_messages: int, label: str) -> ModelRequest:
    raw_messages = body.get("messages")
    if not isinstance(raw_messages, list) or not raw_messages:
        _refuse("messages must be a list with at least one message", "messages")
    if len(raw_messages) > max_messages:
        _refuse(f"at most {max_messages} messages are accepted, got {len(raw_messages)}", "messages")
    _refuse_unsupported(body)
    tools = _tools(body.get("tools"))
    return ModelRequest(
        messages=_messages(raw_messages),
        tools=tools,
        tools_id=tools_digest(tools),
        wish=_wish(body),
        calls="none" if body.get("tool_choice") == "none" else "auto",
        parallel_calls=body.get("parallel_tool_calls") is not False,
        label=label,
    )


def build_response(body: Mapping[str, Any], done: CompletedTurn, tokenizer: Tokenizer) -> bytes:
    """The JSON of OpenAI's ChatCompletion for a recorded turn."""
    turn, reply = done.turn, done.turn.reply
    fields: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
    if reply.tool_calls:
        fields["content"] = reply.content or None  # beside calls, as OpenAI: no text is null
        fields["tool_calls"] = [
            _typed(
                ChatCompletionMessageFunctionToolCall,
                id=call.id,
                type="function",
                function=_typed(Function, name=call.name, arguments=call.arguments),
            )
            for call in reply.tool_calls
        ]
    if reply.reasoning:
        fields["reasoning_content"] = reply.reasoning
    choice = _typed(
        Choice,
        index=0,
        finish_reason=done.finish_reason,
        message=_typed(ChatCompletionMessage, **fields),
        logprobs=_logprobs(turn, tokenizer) if body.get("logprobs") else None,
    )
    completion_tokens = len(turn.completion)
    usage = _typed(
        CompletionUsage,
        prompt_tokens=done.prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=done.prompt_tokens + completion_tokens,
    )
    model = body.get("model")
    response = _typed(
        ChatCompletion,
        id=turn.id,
        object="chat.completion",
        created=int(done.created_at),
        model=model if isinstance(model, str) and model else "policy",
        choices=[choice],
        usage=usage,
    )
    return response.__pydantic_serializer__.to_json(response, exclude_unset=True)


def _typed(kind: type[M], **fields: Any) -> M:
    """An `openai.types` object of values that are known to fit.

    pydantic's own `model_construct`: that of openai walks every type again, at ten times the cost.
    """
    return BaseModel.model_construct.__func__(kind, **fields)  # type: ignore[attr-defined]


def _refuse(message: str, param: str, code: str = "invalid_value") -> NoReturn:
    raise RequestError(message, code=code, param=param)


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    """What is known to the dialect, asked for, and not offered by this release."""
    if body.get("stream"):
        _refuse("stream is not supported yet: send stream: false", "stream", "unsupported_parameter")
    if body.get("n") not in (None, 1):
        _refuse(f"n must be 1, got {body['n']!r}", "n", "unsupported_parameter")
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        _refuse(
            f'tool_choice must be "auto" or "none", got {choice!r}', "tool_choice", "unsupported_parameter"
        )
    form = body.get("response_format")
    if form is not None and (not isinstance(form, dict) or form.get("type") != "text"):
        _refuse(
            f'response_format must be {{"type": "text"}}, got {form!r}',
            "response_format",
            "unsupported_parameter",
        )
    if body.get("top_logprobs"):
        _refuse("top_logprobs is not supported", "top_logprobs", "unsupported_parameter")
    for name in ("functions", "function_call"):
        if body.get(name):
            _refuse(f"{name} is not supported: use tools", name, "unsupported_parameter")


def _wish(body: Mapping[str, Any]) -> SamplingWish:
    top_k = _integer(body, "top_k")
    limits = [_positive(body, name) for name in ("max_completion_tokens", "max_tokens")]
    given = [limit for limit in limits if limit is not None]
    return SamplingWish(
        max_tokens=min(given) if given else None,
        logit_bias=True if body.get("logit_bias") else None,
        stop=_stop(body.get("stop")),
        temperature=_number(body, "temperature"),
        top_p=_number(body, "top_p"),
        top_k=0 if top_k == -1 else top_k,  # both mean off
        min_p=_number(body, "min_p"),
        frequency_penalty=_number(body, "frequency_penalty"),
        presence_penalty=_number(body, "presence_penalty"),
        seed=_integer(body, "seed"),
    )


def _number(body: Mapping[str, Any], name: str) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        _refuse(f"{name} must be a number, got {value!r}", name)
    return float(value)


def _integer(body: Mapping[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        _refuse(f"{name} must be an integer, got {value!r}", name)
    return value


def _positive(body: Mapping[str, Any], name: str) -> int | None:
    value = _integer(body, name)
    if value is not None and value < 1:
        _refuse(f"{name} must be at least 1, got {value}", name)
    return value


def _stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) and value else (value or [])
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        _refuse(f"stop must be a text or a list of texts, got {value!r}", "stop")
    return tuple(stops)


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        _refuse("tools must be a list", "tools")
    for index, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            _refuse("only function tools are supported", f"tools[{index}]")
        if not isinstance(function.get("name"), str) or not function["name"]:
            _refuse("a function tool needs a name", f"tools[{index}].function.name")
    return tuple(value)


def _messages(raw: list[Any]) -> tuple[Message, ...]:
    """The messages; developer becomes system, and a system message after the first stays where it is.

    A tool message without an id answers the first open call; one without a name gets its call's.
    """
    out: list[Message] = []
    unanswered: dict[str, str] = {}  # call id → tool name, in the order of the calls
    for index, item in enumerate(raw):
        where = f"messages[{index}]"
        if not isinstance(item, dict):
            _refuse("a message must be an object", where)
        message = _message(item, where)
        if message.role == "assistant":
            unanswered = {call.id: call.name for call in message.tool_calls}
        elif message.role == "tool":
            message = _answer(message, unanswered)
        out.append(message)
    return tuple(out)


def _message(item: Mapping[str, Any], where: str) -> Message:
    role: Any = "system" if item.get("role") == "developer" else item.get("role")
    if role not in ("system", "user", "assistant", "tool"):
        _refuse(
            f"role must be system, developer, user, assistant or tool, got {item.get('role')!r}",
            f"{where}.role",
        )
    name = item.get("name")
    fields: dict[str, Any] = {"name": name if isinstance(name, str) else None}
    if role == "assistant":
        reasoning = item.get("reasoning_content") or item.get("reasoning")
        fields["reasoning"] = reasoning if isinstance(reasoning, str) else ""
        fields["tool_calls"] = _tool_calls(item.get("tool_calls"), f"{where}.tool_calls")
    elif role == "tool":
        call_id = item.get("tool_call_id") or item.get("id")
        fields["tool_call_id"] = call_id if isinstance(call_id, str) else None
    return Message(role=role, content=_text(item.get("content"), f"{where}.content"), **fields)


def _answer(message: Message, unanswered: dict[str, str]) -> Message:
    call_id = message.tool_call_id
    if call_id is None and unanswered:
        call_id = next(iter(unanswered))
    tool_name = unanswered.pop(call_id, None) if call_id is not None else None
    return Message(role="tool", content=message.content, tool_call_id=call_id, name=message.name or tool_name)


def _text(content: Any, where: str) -> str:
    """A message's text: a text, null, or a list of text parts, in any role."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        _refuse("content must be a text, null or a list of parts", where)
    texts = []
    for index, part in enumerate(content):
        text = part if isinstance(part, str) else None
        if isinstance(part, dict):
            kind = part.get("type", "text")
            if kind not in ("text", "input_text", "output_text", "refusal"):
                _refuse(f"this model reads text only, got a part of type {kind!r}", f"{where}[{index}]")
            text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            _refuse("a text part needs a text", f"{where}[{index}]")
        texts.append(text)
    return "".join(texts)


def _tool_calls(value: Any, where: str) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        _refuse("tool_calls must be a list", where)
    calls = []
    for index, item in enumerate(value):
        function = item.get("function") if isinstance(item, dict) else None
        if (
            not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
            or not function["name"]
        ):
            _refuse("a tool call needs a function with a name", f"{where}[{index}]")
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            arguments = "{}" if arguments is None else json.dumps(arguments, ensure_ascii=False)
        call_id = item.get("id")
        calls.append(ToolCall(call_id if isinstance(call_id, str) else "", function["name"], arguments))
    return tuple(calls)


def _logprobs(turn: Turn, tokenizer: Tokenizer) -> ChoiceLogprobs:
    content = []
    for token_id, logprob in zip(
        turn.completion.token_ids.tolist(), turn.completion.logprobs.tolist(), strict=True
    ):
        text = tokenizer.decode([token_id])
        content.append(
            _typed(
                ChatCompletionTokenLogprob,
                token=text,
                logprob=logprob,
                bytes=list(text.encode()),
                top_logprobs=[],
            )
        )
    return _typed(ChoiceLogprobs, content=content, refusal=None)
