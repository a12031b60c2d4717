"""Finds what a chat template writes around a reply by rendering small conversations.

Nothing is assumed from a model's name: a marker counts only if this template wrote it around a probe.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal_agents.errors import ConfigError, RenderingError
from areal_agents.rendering.templates.template import ChatTemplate
from areal_agents.rendering.tokenization.tokenizer import Tokenizer

MARK = "zqx7305mark"  # ends the reply of a probe; messages that contain it are not extended
_HERMES_CALL = re.compile(r"<tool_call>\s*(\{.*\})\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Markup:
    """How one template writes a reply.

    Attributes:
        head: the messages that this template requires before the first user message.
        reply_end, calls_end: the token that closes a reply without and with tool calls; None if the template
            closes it with no special token.
        reasoning: whether reasoning is written as <think>…</think> before the content.
        calls: whether a tool call is written as a JSON object in <tool_call>…</tool_call>.
        raw_arguments: whether arguments given as a JSON string are written unchanged, not quoted.
    """

    head: tuple[Mapping[str, Any], ...]
    reply_end: int | None
    calls_end: int | None
    reasoning: bool
    calls: bool
    raw_arguments: bool


def find_markup(template: ChatTemplate, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> Markup:
    """Find the markup of a template. ConfigError if it cannot render a question.

    Args:
        eos_ids: the end-of-text tokens of the model folder.
    """
    head = _head(template)
    question = [*head, {"role": "user", "content": "Where?"}]
    plain = template.render([*question, {"role": "assistant", "content": MARK}], add_generation_prompt=False)
    reply_end = _end_token(plain, tokenizer, eos_ids)
    called = _render_call(template, question, {"query": MARK})
    ends = [*eos_ids, *([] if reply_end is None else [reply_end])]
    return Markup(
        head=tuple(head),
        reply_end=reply_end,
        calls_end=None if called is None else _end_token(called, tokenizer, ends),
        reasoning="</think>" in template.source,
        calls=called is not None and _is_hermes(called),
        raw_arguments=called is not None
        and called == _render_call(template, question, json.dumps({"query": MARK})),
    )


def function_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A tool call in the form of the chat API; `arguments` is a JSON string or an object."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _head(template: ChatTemplate) -> list[dict[str, Any]]:
    """The messages that must precede a question: none, or a system prompt."""
    refusal: RenderingError | None = None
    for head in ([], [{"role": "system", "content": "Answer."}]):
        try:
            text = template.render([*head, {"role": "user", "content": MARK}], add_generation_prompt=True)
        except RenderingError as error:
            refusal = error
            continue
        if MARK not in text:
            raise ConfigError(
                f"the chat template must write the user's message, but for {MARK!r} it wrote {text!r}"
            )
        return head
    raise ConfigError(f"the chat template cannot render a user message: {refusal}") from refusal


def _render_call(template: ChatTemplate, question: list[Any], arguments: Any) -> str | None:
    """The text of a conversation whose reply has one call, or None if the template cannot write it."""
    call = function_call("call00001", "lookup", arguments)
    reply = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        text = template.render([*question, reply], add_generation_prompt=False)
    except RenderingError:
        return None
    return text if MARK in text else None


def _end_token(text: str, tokenizer: Tokenizer, ends: Sequence[int]) -> int | None:
    """The first added token after the mark that is in `ends`, or else the first special token after it."""
    if MARK not in text:
        return None
    behind = tokenizer.encode(text[text.rindex(MARK) + len(MARK) :])
    known = [token for token in behind if token in ends and token in tokenizer.added_token_ids]
    special = [token for token in behind if token in tokenizer.special_token_ids]
    return next(iter([*known, *special]), None)


def _is_hermes(text: str) -> bool:
    found = _HERMES_CALL.search(text[text.rfind("<tool_call>") :])
    if found is None:
        return False
    try:
        call = json.loads(found.group(1))
    except ValueError:
        return False
    return call == {"name": "lookup", "arguments": {"query": MARK}}
