"""Replies of a model whose chat template the library does not know: reasoning, content, Hermes tool calls.

Only markup that the template itself writes is read; everything else stays content, as sampled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from renderers import ParsedResponse, ParsedToolCall, ToolCallParseStatus
from renderers.parsers import Qwen3ToolParser
from renderers.parsing import parse_qwen3
from renderers.reasoning import scan_reasoning

from areal_agents.rendering.markup import Markup
from areal_agents.rendering.tokenizer import Tokenizer

_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_OPENED = re.compile(r"<think>\s*\Z")
_LOOK_BACK = 16  # tokens at the end of a prompt; a reasoning opener stands within the last three


class TemplateReplies:
    """Parses completions. Stateless.

    Attributes:
        text_markers: markup that is read but is no token of its own, so that it may arrive in pieces.
    """

    def __init__(self, tokenizer: Tokenizer, markup: Markup, stop_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._markup = markup
        self._stops = frozenset(stop_token_ids)
        self._call_open = tokenizer.added_token_id("<tool_call>")
        self._call_close = tokenizer.added_token_id("</tool_call>")
        self._think_close = tokenizer.added_token_id("</think>")
        markers = ["<think>", "</think>"] if markup.reasoning else []
        markers += ["<tool_call>", "</tool_call>"] if markup.calls else []
        self.text_markers = tuple(text for text in markers if tokenizer.added_token_id(text) is None)

    def parse(self, token_ids: Sequence[int], prompt_ids: Sequence[int] = ()) -> ParsedResponse:
        """What the completion says. Calls carry their token span where their markers are tokens."""
        end = next((i for i, token in enumerate(token_ids) if token in self._stops), len(token_ids))
        ids = list(token_ids[:end])
        if not self._markup.calls or self._call_open is None or self._call_close is None:
            return self._parse_text(ids, prompt_ids)
        if self._markup.reasoning:
            return parse_qwen3(
                self._tokenizer,
                ids,
                stop_ids=set(self._stops),
                tool_call_id=self._call_open,
                tool_call_end_id=self._call_close,
                reasoning_end_id=self._think_close,
                prefilled_thinking=self.opens_reasoning(prompt_ids),
            )
        content, calls = Qwen3ToolParser(self._tokenizer).extract(ids)
        return ParsedResponse(self._tokenizer.decode(content).strip(), tool_calls=calls)

    def opens_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the prompt itself opened the reasoning that the reply goes on with."""
        if not self._markup.reasoning:
            return False
        return _OPENED.search(self._tokenizer.decode(list(prompt_ids[-_LOOK_BACK:]))) is not None

    def _parse_text(self, ids: list[int], prompt_ids: Sequence[int]) -> ParsedResponse:
        text = self._tokenizer.decode(ids)
        reasoning = None
        if self._markup.reasoning:
            region = scan_reasoning(self._tokenizer, ids, prefilled=self.opens_reasoning(prompt_ids))
            if region.is_open:
                return ParsedResponse("", reasoning_content=region.text, reasoning_complete=False)
            if region.text is not None:
                reasoning = region.text.strip() or None
                text = text.partition("</think>")[2]
        start = text.find("<tool_call>") if self._markup.calls else -1
        content = text if start < 0 else text[:start]
        found = [] if start < 0 else list(_CALL.finditer(text, start))
        return ParsedResponse(
            content.strip(), reasoning_content=reasoning, tool_calls=[_call(match) for match in found]
        )


def _call(match: re.Match[str]) -> ParsedToolCall:
    """One block; a malformed one keeps its delimiters, as there is no span to find them by."""
    inside = match.group(1).strip()
    if not match.group(2):
        return ParsedToolCall(match.group(0), status=ToolCallParseStatus.UNCLOSED_BLOCK)
    try:
        call = json.loads(inside)
    except json.JSONDecodeError:
        return ParsedToolCall(match.group(0), status=ToolCallParseStatus.INVALID_JSON)
    name = call.get("name") if isinstance(call, dict) else None
    arguments = call.get("arguments", {}) if isinstance(call, dict) else None
    if not isinstance(name, str) or not name:
        status = ToolCallParseStatus.MISSING_NAME
    elif not isinstance(arguments, dict):
        status = ToolCallParseStatus.MALFORMED_STRUCTURE
    else:
        return ParsedToolCall(inside, name=name, arguments=arguments)
    return ParsedToolCall(match.group(0), status=status)
