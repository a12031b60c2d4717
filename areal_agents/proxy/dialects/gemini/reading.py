"""Converts a body of Google's API to a canonical request.

Names of fields are read in both forms that Google's servers accept, `systemInstruction` and
`system_instruction`. A recorded reply becomes one assistant message, with its texts joined, its thoughts as
reasoning, and the turn that a thought signature names. Streaming clients send it back in pieces, each a
content of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from areal_agents.core.completion import Grammar
from areal_agents.core.messages import Message, ToolCall
from areal_agents.errors import RequestError, shown
from areal_agents.proxy.calls.request import CallPolicy, ModelRequest, SamplingWish
from areal_agents.proxy.dialects import reading
from areal_agents.proxy.dialects.base import ReadContext
from areal_agents.proxy.dialects.gemini.schemas import json_schema
from areal_agents.proxy.dialects.gemini.signatures import turn_of_signature
from areal_agents.proxy.dialects.reading import refuse, unsupported
from areal_agents.proxy.dialects.replayed import Group, MessageMemo, joined_replies

Fields = dict[str, Any]

# Older clients send results as "function".
_ROLES = {"user": "user", "function": "user", "model": "assistant"}
_TEXT_TYPES = ("text/plain",)
_JSON_TYPE = "application/json"
_ANY_JSON = Grammar("json_schema", '{"anyOf": [{"type": "object"}, {"type": "array"}]}')
_SCHEMAS = ("responseSchema", "responseJsonSchema", "_responseJsonSchema")
_MOST_TOP_LOGPROBS = 20
_SETTINGS = frozenset(
    {
        *_SCHEMAS, "candidateCount", "frequencyPenalty", "logprobs", "maxOutputTokens", "presencePenalty",
        "responseLogprobs", "responseMimeType", "responseModalities", "seed", "stopSequences", "temperature",
        "topK", "topP",
    }
)  # fmt: skip
_DATA = ("text", "functionCall", "functionResponse")  # the fields of a part of which it has one


def camel(value: Mapping[str, Any]) -> Fields:
    """Return the fields of an object by their names in camel case."""
    return {_camel(name): field for name, field in value.items()}


def _camel(name: str) -> str:
    head, *words = name.split("_")
    return head + "".join([word[:1].upper() + word[1:] for word in words]) if head and words else name


def read_request(body: Mapping[str, Any], context: ReadContext) -> ModelRequest:
    """Return the canonical form of a body.

    Raise RequestError 400; `param` is the path of the invalid field, for example "contents[0].parts[1]".
    """
    return reading.within_depth(lambda: _canonical(camel(body), context, counting=False))


def read_count(body: Mapping[str, Any], context: ReadContext) -> ModelRequest:
    """Return the canonical form of a body of countTokens, whose last content may be a reply.

    It has contents alone, or a whole `generateContentRequest`.
    """
    fields = camel(body)
    whole = fields.get("generateContentRequest")
    if whole is not None and not isinstance(whole, dict):
        refuse(f"generateContentRequest must be an object, got {shown(whole)}", "generateContentRequest")
    chosen = fields if whole is None else camel(whole)
    return reading.within_depth(lambda: _canonical(chosen, context, counting=True))


def generation_config(fields: Mapping[str, Any]) -> Fields:
    """Return `generationConfig` of a body; {} without one."""
    return _object(fields, "generationConfig", "generationConfig")


def ignored_settings(fields: Mapping[str, Any]) -> list[str]:
    """Return the settings of a body, within its generationConfig, that have no effect."""
    config = fields.get("generationConfig")
    settings = camel(config) if isinstance(config, dict) else {}
    thinking = settings.pop("thinkingConfig", None)
    inner = camel(thinking) if isinstance(thinking, dict) else {}
    return [
        *(f"generationConfig.{name}" for name in settings if name not in _SETTINGS),
        *(f"generationConfig.thinkingConfig.{name}" for name in inner if name != "includeThoughts"),
    ]


def wants_thoughts(fields: Mapping[str, Any]) -> bool:
    """Whether a body asks for the model's thoughts."""
    thinking = _object(generation_config(fields), "thinkingConfig", "generationConfig.thinkingConfig")
    with _within("generationConfig.thinkingConfig"):
        return reading.flag(thinking, "includeThoughts")


def named_turn(body: Mapping[str, Any]) -> str | None:
    """Return the turn that the last content with a known thought signature names, or None."""
    contents = body.get("contents")
    for item in reversed(contents if isinstance(contents, list) else []):
        parts = item.get("parts") if isinstance(item, dict) else None
        found = [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        if handle := _handle([camel(part) for part in found]):
            return handle
    return None


def _canonical(fields: Fields, context: ReadContext, *, counting: bool) -> ModelRequest:
    contents = _contents(fields.get("contents"), context.max_messages)
    if fields.get("cachedContent"):
        unsupported("cachedContent is not supported; send the contents themselves", "cachedContent")
    messages = (*_system(fields.get("systemInstruction")), *_messages(contents, context.memo))
    if not counting and messages[-1].role == "assistant":
        unsupported("the last content must have the role user; prefill is not supported", "contents")
    config = generation_config(fields)
    wants_thoughts(fields)  # refused here if it is no flag; the answer's writer reads it
    with _within("generationConfig"):
        _refuse_other_modalities(config)
        wish, output = _wish(config), _output(config)
        choices, logprobs = (
            reading.choices(config, "candidateCount"),
            reading.flag(config, "responseLogprobs"),
        )
    tools, options = _tools(fields.get("tools")), reading.template_options(_template_fields(fields))
    calls, named = _tool_choice(fields, tools)
    return ModelRequest(
        messages=messages,
        tools=tools,
        tools_id=reading.context_digest(tools, options),
        wish=wish,
        calls=calls,
        callable_tools=named,
        output=output,
        choices=choices,
        template_options=options,
        logprobs=logprobs,
        label=context.label,
    )


@contextmanager
def _within(where: str) -> Iterator[None]:
    """Name the fields of errors by their path in the request, of which `where` is the beginning."""
    try:
        yield
    except RequestError as error:
        if error.param is not None:
            error.param = f"{where}.{error.param}"
        raise


def _template_fields(fields: Fields) -> Fields:
    """Return the options of the chat template under the names that all dialects have for them."""
    names = {"chatTemplateKwargs": "chat_template_kwargs", "enableThinking": "enable_thinking"}
    return {name: fields[given] for given, name in names.items() if given in fields}


# Settings


def _wish(config: Fields) -> SamplingWish:
    best = reading.integer(config, "logprobs") or 0
    if not 0 <= best <= _MOST_TOP_LOGPROBS:
        refuse(f"logprobs must be from 0 to {_MOST_TOP_LOGPROBS}, got {best}", "logprobs")
    wants_logprobs = reading.flag(config, "responseLogprobs")
    if best and not wants_logprobs:
        refuse("logprobs needs responseLogprobs: true", "logprobs")
    return SamplingWish(
        max_tokens=reading.positive(config, "maxOutputTokens"),
        temperature=reading.number(config, "temperature"),
        top_p=reading.number(config, "topP"),
        top_k=_top_k(config),
        frequency_penalty=reading.number(config, "frequencyPenalty"),
        presence_penalty=reading.number(config, "presencePenalty"),
        seed=reading.integer(config, "seed"),
        stop=reading.stops(config.get("stopSequences"), "stopSequences"),
        top_logprobs=best,
    )


def _top_k(config: Fields) -> int | None:
    """Return `topK`, which the SDK sends as a float; -1 and 0 both mean no limit."""
    value = reading.number(config, "topK")
    if value is None:
        return None
    if not value.is_integer():
        refuse(f"topK must be an integer, got {value}", "topK")
    return 0 if value == -1 else int(value)


def _output(config: Fields) -> Grammar | None:
    """Return the grammar that the reply must match, or None."""
    kind = config.get("responseMimeType")
    found = [name for name in _SCHEMAS if config.get(name) is not None]
    if kind is not None and not isinstance(kind, str):
        refuse(f"responseMimeType must be a string, got {shown(kind)}", "responseMimeType")
    if kind and kind not in (*_TEXT_TYPES, _JSON_TYPE):
        unsupported(
            f"responseMimeType must be text/plain or {_JSON_TYPE}, got {shown(kind)}; for an enum send "
            f"{_JSON_TYPE} with a schema that has the enum",
            "responseMimeType",
        )
    if not found:
        return _ANY_JSON if kind == _JSON_TYPE else None
    if len(found) > 1:
        refuse(f"only one of {found[0]} and {found[1]} may be set", found[1])
    if kind in _TEXT_TYPES:
        refuse(f"{found[0]} needs responseMimeType: {_JSON_TYPE}", "responseMimeType")
    # gemini-cli sends Google's form of a schema in the field for JSON Schema, too.
    return reading.json_grammar(json_schema(config[found[0]]), found[0])


def _refuse_other_modalities(config: Fields) -> None:
    modalities = config.get("responseModalities") or []
    if not isinstance(modalities, list) or not all(isinstance(one, str) for one in modalities):
        refuse(f"responseModalities must be a list, got {shown(modalities)}", "responseModalities")
    if any(one.upper() not in ("TEXT", "MODALITY_UNSPECIFIED") for one in modalities):
        unsupported("this model writes text only; set responseModalities to [TEXT]", "responseModalities")


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    """Return the declared functions as chat function tools."""
    if value is None:
        return ()
    if not isinstance(value, list):
        refuse(f"tools must be a list, got {shown(value)}", "tools")
    tools = []
    for index, tool in enumerate(value):
        where = f"tools[{index}]"
        if not isinstance(tool, dict):
            refuse(f"a tool must be an object, got {shown(tool)}", where)
        fields = camel(tool)
        if others := [
            name for name, field in fields.items() if name != "functionDeclarations" and field is not None
        ]:
            unsupported(
                f"{others[0]} is not supported, because this server runs no tools; use functionDeclarations",
                f"{where}.{others[0]}",
            )
        declared = fields.get("functionDeclarations")
        if declared is not None and not isinstance(declared, list):
            refuse("functionDeclarations must be a list", f"{where}.functionDeclarations")
        tools += [
            _function(one, f"{where}.functionDeclarations[{place}]")
            for place, one in enumerate(declared or ())
        ]
    return tuple(tools)


def _function(value: Any, where: str) -> dict[str, Any]:
    """Return a chat function tool with only the fields that are shown to the model."""
    if not isinstance(value, dict):
        refuse(f"a function declaration must be an object, got {shown(value)}", where)
    fields = camel(value)
    name, description = fields.get("name"), fields.get("description") or ""
    if not isinstance(name, str) or not name:
        refuse("a function declaration must have a name", f"{where}.name")
    if not isinstance(description, str):
        refuse("a description must be a string", f"{where}.description")
    given = fields.get("parametersJsonSchema")
    parameters = json_schema(fields.get("parameters") if given is None else given)
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        refuse("the parameters of a function must be an object", f"{where}.parameters")
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def _tool_choice(fields: Fields, tools: Sequence[Mapping[str, Any]]) -> tuple[CallPolicy, tuple[str, ...]]:
    """Return the call policy, and the functions that may be called with ANY; () for all."""
    where = "toolConfig.functionCallingConfig"
    config = _object(_object(fields, "toolConfig", "toolConfig"), "functionCallingConfig", where)
    mode, allowed = config.get("mode"), config.get("allowedFunctionNames") or []
    if not isinstance(mode, str | None):
        refuse(f"mode must be a string, got {shown(mode)}", f"{where}.mode")
    declared = [tool["function"]["name"] for tool in tools]
    if not isinstance(allowed, list) or not all(isinstance(name, str) for name in allowed):
        refuse(
            f"allowedFunctionNames must be a list of names, got {shown(allowed)}",
            f"{where}.allowedFunctionNames",
        )
    if unknown := [name for name in allowed if name not in declared]:
        refuse(f"{shown(unknown[0])} is not in tools", f"{where}.allowedFunctionNames")
    excludes = bool(allowed) and set(allowed) != set(declared)
    match (mode or "AUTO").upper():
        case "ANY":
            if not tools:
                refuse("mode ANY needs at least one function declaration in tools", f"{where}.mode")
            return "required", tuple(name for name in declared if name in allowed) if excludes else ()
        case "AUTO" | "VALIDATED" | "MODE_UNSPECIFIED":
            if excludes:
                unsupported(
                    "allowedFunctionNames needs mode ANY; leave the other functions out of tools",
                    f"{where}.allowedFunctionNames",
                )
            return "auto", ()
        case "NONE":
            return "none", ()
    return refuse(f"mode must be AUTO, ANY, NONE or VALIDATED, got {shown(mode)}", f"{where}.mode")


# Contents


def _contents(value: Any, most: int) -> list[Any]:
    """Return the list of contents; a single one, or a string, counts as a list of one."""
    contents = [value] if isinstance(value, dict | str) else value
    if not isinstance(contents, list) or not contents:
        refuse("contents must be a list with at least one content", "contents")
    if len(contents) > most:
        refuse(f"a request may have at most {most} contents, got {len(contents)}", "contents")
    return contents


def _system(value: Any) -> tuple[Message, ...]:
    if value is None:
        return ()
    parts = _parts(_content(value, "systemInstruction"), "systemInstruction")
    text = _joined(parts)
    return (Message("system", text),) if text else ()


def _messages(contents: list[Any], memo: MessageMemo) -> list[Message]:
    history = memo.known(contents)
    calls = _Unanswered()
    for index, item in enumerate(contents):
        if index == len(history.groups):
            history.groups.append(_group(item, f"contents[{index}]", calls))
        else:
            calls.follow(history.groups[index])
    memo.keep(history, contents)
    return joined_replies(history.groups)


class _Unanswered:
    """The calls that no result has answered yet, of each reply, in order."""

    def __init__(self) -> None:
        self._replies: list[list[ToolCall]] = []
        self._in_reply = False  # whether the last content was one of the model's

    def begin(self, *, is_reply: bool) -> None:
        """Begin a content. Adjacent contents of the model are pieces of one reply."""
        if is_reply and not self._in_reply:
            self._replies.append([])
        self._in_reply = is_reply

    def called(self, calls: Sequence[ToolCall]) -> None:
        """Add calls of the reply that was begun last."""
        self._replies[-1] += calls

    def follow(self, group: Group) -> None:
        """Take note of a content that was read earlier."""
        self.begin(is_reply=group[0].role == "assistant")
        for message in group:
            if message.role == "assistant":
                self.called(message.tool_calls)
            elif message.role == "tool":
                self._take(message.tool_call_id or "", message.name or "")

    def answered(self, call_id: str, name: str, where: str) -> ToolCall:
        """Return the call that a result answers.

        A result without an id answers the first unanswered call of its function, in the last reply that has
        one. Raise RequestError 400 if there is none; a call that an id names is looked for later.
        """
        found = self._take(call_id, name)
        if found is None and call_id:
            return ToolCall(call_id, name, "")
        if found is None:
            raise RequestError(
                f"{where}: this is the result of the function {shown(name)}, but no content before it has an "
                "unanswered functionCall of this function; send the model's content with the call, too",
                code="invalid_conversation",
                param="contents",
            )
        return found

    def _take(self, call_id: str, name: str) -> ToolCall | None:
        for calls in reversed(self._replies):
            for index, call in enumerate(calls):
                if call.id == call_id if call_id else call.name == name:
                    return calls.pop(index)
        return None


def _group(item: Any, where: str, calls: _Unanswered) -> Group:
    """Return the canonical messages of one content."""
    content = _content(item, where)
    role = content.get("role") or "user"
    parts = _parts(content, where)
    match _ROLES.get(role) if isinstance(role, str) else None:
        case "assistant":
            group: Group = (_assistant(parts),)
            calls.follow(group)
            return group
        case "user":
            calls.begin(is_reply=False)
            return tuple(_user(parts, calls))
    return refuse(f"role must be user or model, got {shown(role)}", f"{where}.role")


def _content(value: Any, where: str) -> Fields:
    if isinstance(value, str):
        return {"parts": [{"text": value}]}
    if not isinstance(value, dict):
        refuse(f"a content must be an object with parts, got {shown(value)}", where)
    return camel(value)


def _parts(content: Fields, where: str) -> list[tuple[Fields, str]]:
    """Return the parts of a content, each with its path."""
    found = content.get("parts")
    if isinstance(found, dict):
        found = [found]
    if found is not None and not isinstance(found, list):
        refuse(f"parts must be a list, got {shown(found)}", f"{where}.parts")
    parts = []
    for index, part in enumerate(found or ()):
        at = f"{where}.parts[{index}]"
        if isinstance(part, str):
            part = {"text": part}
        if not isinstance(part, dict):
            refuse(f"a part must be an object, got {shown(part)}", at)
        parts.append((camel(part), at))
    return parts


def _assistant(parts: Sequence[tuple[Fields, str]]) -> Message:
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    for part, where in parts:
        if part.get("functionCall") is not None:
            calls.append(_call(part["functionCall"], f"{where}.functionCall"))
        elif (text := _text(part, where)) is not None:
            (reasoning if part.get("thought") is True else content).append(text)
    return Message(
        "assistant",
        "".join(content),
        reasoning="".join(reasoning),
        tool_calls=tuple(calls),
        handle=_handle([part for part, _ in parts]),
    )


def _handle(parts: Iterable[Fields]) -> str:
    """Return the turn that the first known signature of a content names, "" without one."""
    named = (turn_of_signature(part.get("thoughtSignature")) for part in parts)
    return next((turn for turn in named if turn), "")


def _call(value: Any, where: str) -> ToolCall:
    if not isinstance(value, dict):
        refuse(f"a functionCall must be an object, got {shown(value)}", where)
    name, call_id = value.get("name"), value.get("id")
    if not isinstance(name, str) or not name:
        refuse("a functionCall must have the name of its function", f"{where}.name")
    return ToolCall(
        call_id if isinstance(call_id, str) else "", name, reading.arguments_text(value.get("args"))
    )


def _user(parts: Sequence[tuple[Fields, str]], calls: _Unanswered) -> list[Message]:
    """Return a message for each function response, then one with the other parts, if there are any."""
    out: list[Message] = []
    others = []
    for part, where in parts:
        if part.get("functionResponse") is not None:
            out.append(_result(part["functionResponse"], f"{where}.functionResponse", calls))
        else:
            others.append((part, where))
    if others or not out:
        out.append(Message("user", _joined(others)))
    return out


def _result(value: Any, where: str, calls: _Unanswered) -> Message:
    if not isinstance(value, dict):
        refuse(f"a functionResponse must be an object, got {shown(value)}", where)
    name, call_id = value.get("name"), value.get("id")
    if not isinstance(name, str) or not name:
        refuse("a functionResponse must have the name of its function", f"{where}.name")
    if value.get("parts"):
        unsupported("this model accepts only text, so a functionResponse may have no parts", f"{where}.parts")
    call = calls.answered(call_id if isinstance(call_id, str) else "", name, where)
    return Message("tool", _output_text(value.get("response")), tool_call_id=call.id or None, name=name)


def _output_text(response: Any) -> str:
    """Return what the model reads: the function's output alone if the response has nothing else."""
    if isinstance(response, dict) and list(response) == ["output"]:
        response = response["output"]
    if isinstance(response, str):
        return response
    return "" if response is None else json.dumps(response, ensure_ascii=False)


def _joined(parts: Iterable[tuple[Fields, str]]) -> str:
    """Join text parts, each on a new line; for all roles except the model's."""
    texts = [text for part, where in parts if (text := _text(part, where)) is not None]
    return "\n".join(texts)


def _text(part: Fields, where: str) -> str | None:
    """Return the text of a part, None for one that has only a signature. All other parts are refused."""
    value = part.get("text")
    if isinstance(value, str):
        return value
    if value is not None:
        refuse(f"text must be a string, got {shown(value)}", f"{where}.text")
    if "thoughtSignature" in part or "thought" in part:
        return None
    kind = next((name for name, field in part.items() if field is not None), None)
    if kind in _DATA:
        unsupported(f"a {kind} is not supported in a content of this role", f"{where}.{kind}")
    if kind is None:
        refuse("a part must have text, a functionCall or a functionResponse", where)
    return unsupported(f"this model accepts only text, got a part with {shown(kind)}", f"{where}.{kind}")


def _object(fields: Mapping[str, Any], name: str, where: str) -> Fields:
    """Return the object in a field, {} if it is absent or null."""
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        refuse(f"{name} must be an object, got {shown(value)}", where)
    return camel(value)
