"""The dialect of OpenAI's Responses API, whose requests may refer to earlier responses by id.

Earlier responses are found among the turns of the episode, so they are available as long as the episode is
open, whatever `store` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from areal_agents.core.completion import Grammar
from areal_agents.core.messages import Message
from areal_agents.errors import RequestError, shown
from areal_agents.proxy.calls.request import CompletedTurn, ModelRequest, SamplingWish
from areal_agents.proxy.dialects import reading
from areal_agents.proxy.dialects.base import ReadContext
from areal_agents.proxy.dialects.responses.answers import (
    ended_response,
    logprobs,
    output_items,
    response,
    wants_logprobs,
)
from areal_agents.proxy.dialects.responses.events import ResponsesStream
from areal_agents.proxy.dialects.responses.items import history_after, named_turn, read_items
from areal_agents.proxy.dialects.responses.tools import read_tool_choice, read_tools
from areal_agents.proxy.dialects.turn_ids import turn_id_of
from areal_agents.proxy.dialects.writing import COMMENT, openai_error
from areal_agents.rendering import Tokenizer

# Fields that are not supported, and what the client should do instead.
_REFUSED = {
    "background": "remove it, and wait for the response",
    "conversation": "send previous_response_id or all input items",
    "context_management": "compact the conversation in the client",
    "prompt": "send instructions and input",
}
_MOST_TOP_LOGPROBS = 20


class ResponsesDialect:
    """POST /v1/responses; see `Dialect`."""

    name = "responses"
    keepalive = COMMENT

    def referenced_turn(self, body: Mapping[str, Any]) -> str | None:
        """Return the turn of previous_response_id, else that of the first item that names a turn, or None."""
        previous = turn_id_of(body.get("previous_response_id"))
        if previous is not None:
            return previous
        items = body.get("input")
        named = (
            (named_turn(item) for item in items if isinstance(item, dict)) if isinstance(items, list) else ()
        )
        return next((turn for turn in named if turn), None)

    def read(self, body: Mapping[str, Any], context: ReadContext) -> ModelRequest:
        """See `Dialect.read`."""
        return reading.within_depth(lambda: _read(body, context))

    def answer(self, body: Mapping[str, Any], done: Sequence[CompletedTurn], tokenizer: Tokenizer) -> bytes:
        """See `Dialect.answer`. The answer is a `Response`."""
        [turn] = done
        output = output_items(body, turn, logprobs(body, turn.turn.completion, tokenizer))
        return orjson.dumps(ended_response(body, turn.created_at, turn, output))

    def stream(
        self,
        body: Mapping[str, Any],
        request: ModelRequest,
        turn_ids: Sequence[str],
        created_at: float,
        tokenizer: Tokenizer,
    ) -> ResponsesStream:
        """See `Dialect.stream`. This API has one reply per request."""
        [turn_id] = turn_ids
        return ResponsesStream(body, turn_id, created_at, tokenizer)

    def error(self, refusal: RequestError) -> bytes:
        """See `Dialect.error`."""
        return openai_error(refusal)


def checked_fields(body: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the tools of a request.

    Raises:
        RequestError: a field beside the conversation is not supported, or cannot be repeated in the answer.
    """
    for name, advice in _REFUSED.items():
        if body.get(name):
            reading.unsupported(f"{name} is not supported; {advice}", name)
    if body.get("n") not in (None, 1):
        reading.unsupported(f"n must be 1 in this API, got {shown(body['n'])}", "n")
    for name, kind in (("include", list), ("metadata", dict), ("reasoning", dict), ("text", dict)):
        if body.get(name) is not None and not isinstance(body[name], kind):
            expected = "a list" if kind is list else "an object"
            reading.refuse(f"{name} must be {expected}, got {shown(body[name])}", name)
    tools = read_tools(body.get("tools"))
    _refuse_unanswerable(body)
    return tools


def _read(body: Mapping[str, Any], context: ReadContext) -> ModelRequest:
    tools = checked_fields(body)
    calls, named = read_tool_choice(body.get("tool_choice"), tools)
    options = reading.template_options(body)
    messages, has_instructions = _messages(body, context)
    return ModelRequest(
        messages=messages,
        tools=tools,
        tools_id=reading.context_digest(tools, options),
        wish=_wish(body),
        calls=calls,
        callable_tools=named,
        parallel_calls=body.get("parallel_tool_calls") is None or reading.flag(body, "parallel_tool_calls"),
        output=_output_grammar(body.get("text") or {}),
        template_options=options,
        has_instructions=has_instructions,
        logprobs=wants_logprobs(body),
        label=context.label,
    )


def _refuse_unanswerable(body: Mapping[str, Any]) -> None:
    """Raise RequestError 400 if fields that the answer repeats are nested too deeply to be written."""
    try:
        orjson.dumps({"response": response(body, "", 0.0, "in_progress")})
    except orjson.JSONEncodeError as error:
        raise RequestError(f"the request cannot be repeated in its answer: {error}") from None


def _messages(body: Mapping[str, Any], context: ReadContext) -> tuple[tuple[Message, ...], bool]:
    """Return all messages of the conversation, and whether the first of them comes from `instructions`."""
    instructions, raw_input = body.get("instructions"), body.get("input")
    if instructions is not None and not isinstance(instructions, str):
        reading.refuse(f"instructions must be a string, got {shown(instructions)}", "instructions")
    if not isinstance(raw_input, str | list):
        reading.refuse(f"input must be a string or a list of items, got {shown(raw_input)}", "input")
    items = [{"role": "user", "content": raw_input}] if isinstance(raw_input, str) else raw_input
    if len(items) > context.max_messages:
        reading.refuse(
            f"a request may have at most {context.max_messages} input items, got {len(items)}", "input"
        )
    earlier = _earlier(body.get("previous_response_id"), context)
    messages = [*earlier, *read_items(items, context.forest, earlier)]
    if not messages:
        reading.refuse("input must have at least one item", "input")
    if instructions:
        messages.insert(0, Message(role="system", content=instructions))
    return tuple(messages), bool(instructions)


def _earlier(previous: Any, context: ReadContext) -> list[Message]:
    if previous is None:
        return []
    turn_id = turn_id_of(previous)
    if turn_id is None or turn_id not in context.forest:
        raise RequestError(
            f"Previous response with id '{previous}' not found.",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    return history_after(context.forest, turn_id)


def _wish(body: Mapping[str, Any]) -> SamplingWish:
    """Return the requested sampling parameters, including those that only other APIs define."""
    best = reading.integer(body, "top_logprobs") or 0
    if not 0 <= best <= _MOST_TOP_LOGPROBS:
        reading.refuse(f"top_logprobs must be from 0 to {_MOST_TOP_LOGPROBS}, got {best}", "top_logprobs")
    return SamplingWish(
        max_tokens=reading.positive(body, "max_output_tokens"),
        temperature=reading.number(body, "temperature"),
        top_p=reading.number(body, "top_p"),
        top_k=reading.top_k(body),
        min_p=reading.number(body, "min_p"),
        frequency_penalty=reading.number(body, "frequency_penalty"),
        presence_penalty=reading.number(body, "presence_penalty"),
        logit_bias=True if body.get("logit_bias") else None,
        seed=reading.integer(body, "seed"),
        stop=reading.stops(body.get("stop")),
        top_logprobs=best if wants_logprobs(body) else 0,
    )


def _output_grammar(text: Mapping[str, Any]) -> Grammar | None:
    form = text.get("format")
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return reading.JSON_OBJECT
    if kind != "json_schema":
        reading.refuse(
            f"text.format must be text, json_object or json_schema, got {shown(form)}", "text.format"
        )
    return reading.json_grammar(form.get("schema"), "text.format.schema")
