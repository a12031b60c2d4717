"""Parsing functions that dialects share: numbers, strings, content parts, tools and limits.

Requests are parsed as plain dicts, because typed parsing loses fields that real clients send. Unknown fields
are ignored. A known field that is not supported is refused by name, never ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from areal_agents.core.completion import Grammar
from areal_agents.core.messages import tools_digest
from areal_agents.errors import RequestError, shown
from areal_agents.proxy.calls.request import CallPolicy
from areal_agents.proxy.values import refuse_many_values

T = TypeVar("T")
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
# Fields of other servers that constrain the output or change its probabilities, so they cannot be ignored.
_GRAMMARS_OF_OTHER_SERVERS = (
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "json_schema",
    "regex", "ebnf", "structural_tag",
)  # fmt: skip
_SAMPLING_OF_OTHER_SERVERS = ("min_tokens", "repetition_penalty")
_NEUTRAL: tuple[Any, ...] = (None, 0, 1, "", [], {})
_MAX_CHOICES = 128
_MOST_ARGUMENT_VALUES = 50_000
_MAX_STOPS, _MAX_STOP_CHARACTERS = 64, 1_000


def refuse(message: str, param: str, code: str = "invalid_value") -> NoReturn:
    """Raise RequestError 400 for an invalid value of the field `param`."""
    raise RequestError(message, code=code, param=param)


def unsupported(message: str, param: str) -> NoReturn:
    """Raise RequestError 400 for the field `param`, which is known but not supported."""
    raise RequestError(message, code="unsupported_parameter", param=param)


def refuse_fields_of_other_servers(body: Mapping[str, Any]) -> None:
    """Raise RequestError 400 for a field of another server's API that would affect the output."""
    for name in _GRAMMARS_OF_OTHER_SERVERS:
        if body.get(name) not in _NEUTRAL:
            unsupported(f"{name} is not supported; use response_format or tools of chat completions", name)
    for name in _SAMPLING_OF_OTHER_SERVERS:
        if body.get(name) not in _NEUTRAL:
            unsupported(f"{name} is not supported; remove it from the request", name)


def within_depth(read: Callable[[], T]) -> T:
    """Return the result of `read`. Raise RequestError 400 if the request is nested too deeply for it."""
    try:
        return read()
    except RecursionError:
        raise RequestError("the JSON of the body is nested too deeply", code="invalid_json") from None


def number(body: Mapping[str, Any], name: str) -> float | None:
    """Return the finite number in a field, or None if it is absent or null."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        refuse(f"{name} must be a finite number, got {shown(value)}", name)
    return float(value)


def integer(body: Mapping[str, Any], name: str) -> int | None:
    """Return the integer in a field, or None if it is absent or null."""
    value = body.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        refuse(f"{name} must be an integer, got {shown(value)}", name)
    return value


def positive(body: Mapping[str, Any], name: str) -> int | None:
    """Return the integer in a field, which must be at least 1, or None if it is absent or null."""
    value = integer(body, name)
    if value is not None and value < 1:
        refuse(f"{name} must be at least 1, got {value}", name)
    return value


def flag(body: Mapping[str, Any], name: str) -> bool:
    """Return the boolean in a field, or False if it is absent or null."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        refuse(f"{name} must be true or false, got {shown(value)}", name)
    return bool(value)


def choices(body: Mapping[str, Any], name: str = "n") -> int:
    """Return the number of choices in a field, from 1 to 128; 1 if it is absent or null."""
    value = positive(body, name) or 1
    if value > _MAX_CHOICES:
        refuse(f"{name} must be at most {_MAX_CHOICES}, got {value}", name)
    return value


def top_k(body: Mapping[str, Any]) -> int | None:
    """Return `top_k`; -1 and 0 both mean no limit."""
    value = integer(body, "top_k")
    return 0 if value == -1 else value


def stops(value: Any, param: str = "stop") -> tuple[str, ...]:
    """Return the stop strings, given as a string or as a list of strings.

    Their number and length are limited, because each piece of a streamed reply is searched for each of them.
    """
    found = [value] if isinstance(value, str) and value else (value or [])
    if not isinstance(found, list) or not all(isinstance(stop, str) and stop for stop in found):
        refuse(f"{param} must be a string or a list of strings, got {shown(value)}", param)
    if len(found) > _MAX_STOPS:
        refuse(f"{param} may have at most {_MAX_STOPS} strings, got {len(found)}", param)
    if (longest := max(map(len, found), default=0)) > _MAX_STOP_CHARACTERS:
        refuse(
            f"a string of {param} may have at most {_MAX_STOP_CHARACTERS} characters, got {longest}", param
        )
    return tuple(found)


def allowed_tools(
    mode: Any, allowed: Sequence[str | None], names: Sequence[str], where: str
) -> tuple[CallPolicy, tuple[str, ...]]:
    """Return the call policy of a tool_choice of type allowed_tools, and the tools that must be called from.

    If a call is required, a grammar permits the allowed tools only. In mode auto nothing would keep the model
    from calling another tool that it is offered, so there all must be allowed.

    Args:
        allowed: the names that the request allows; None for an entry that has none.
        names: the tools that it offers.
    """
    if mode not in ("auto", "required"):
        refuse(f'the mode of allowed_tools must be "auto" or "required", got {shown(mode)}', where)
    chosen = tuple(name for name in names if name in allowed)
    is_subset = None in allowed or len(chosen) < len(names)
    if not chosen or (is_subset and mode == "auto"):
        unsupported(
            "tool_choice of type allowed_tools must allow every tool, unless its mode is required and it "
            "allows at least one; send only the tools that may be called",
            where,
        )
    return mode, chosen if is_subset else ()


def text(content: Any, where: str) -> str:
    """Return the text of a message's content: a string, null, or a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        refuse("content must be a string, null or a list of parts", where)
    return "".join(text_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def text_part(part: Any, where: str) -> str:
    """Return the text of one part. Images, audio and files are refused; the model accepts only text."""
    found = part if isinstance(part, str) else None
    if isinstance(part, dict):
        kind = part.get("type", "text")
        if kind not in _TEXT_PARTS:
            refuse(f"this model accepts only text, got a part of type {shown(kind)}", where)
        found = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(found, str):
        refuse("the text of a part must be a string", where)
    return found


def arguments_text(value: Any) -> str:
    """Return the arguments of a replayed tool call as a JSON string; a string is returned unchanged.

    Raise RequestError 413 for a string with very many JSON values, because comparisons parse it.
    """
    if isinstance(value, str):
        if len(value) > _MOST_ARGUMENT_VALUES:
            refuse_many_values(value.encode(errors="surrogatepass"), _MOST_ARGUMENT_VALUES)
        return value
    return "{}" if value is None else json.dumps(value, ensure_ascii=False)


def template_options(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the chat template: `chat_template_kwargs` and `enable_thinking`."""
    options = body.get("chat_template_kwargs")
    if options is None:
        options = {}
    if not isinstance(options, dict):
        refuse(f"chat_template_kwargs must be an object, got {shown(options)}", "chat_template_kwargs")
    if "enable_thinking" in body:
        options = {**options, "enable_thinking": flag(body, "enable_thinking")}
    return options


def context_digest(tools: tuple[dict[str, Any], ...], options: Mapping[str, Any]) -> str:
    """Return a digest of the tools and template options of a conversation."""
    return tools_digest([*tools, {"template": dict(options)}] if options else tools)


def json_grammar(schema: Any, where: str) -> Grammar:
    """Return the grammar of a JSON schema. Raise RequestError 400 if the schema is not an object."""
    if not isinstance(schema, dict):
        refuse(f"a JSON schema must be an object, got {shown(schema)}", where)
    return Grammar("json_schema", json.dumps(schema, ensure_ascii=False))


JSON_OBJECT = Grammar("json_schema", '{"type": "object"}')
