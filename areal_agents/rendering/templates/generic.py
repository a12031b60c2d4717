"""The chat format of a model that the library does not know, defined by the model's own template.

A conversation is rendered as any server that runs this template renders it, and is extended only in the ways
that `extension` has proven; otherwise the result is None, and the caller renders in full. In a reply, only
markup that the template itself writes is parsed (reasoning, Hermes tool calls); everything else stays
content, as sampled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from renderers import ParsedResponse, ParsedToolCall, ToolCallParseStatus
from renderers.parsers import Qwen3ToolParser
from renderers.parsing import parse_qwen3
from renderers.reasoning import scan_reasoning

from areal_agents.errors import ConfigError
from areal_agents.model_folder import read_object
from areal_agents.rendering.templates.extension import Extension, Kind, Writer, proven_kinds
from areal_agents.rendering.templates.markup import Markup, find_markup
from areal_agents.rendering.templates.probes import Shape, shape_of
from areal_agents.rendering.templates.template import ChatTemplate
from areal_agents.rendering.tokenization.tokenizer import Tokenizer


class TemplateFormat:
    """One model's chat template as a chat format. Stateless after construction, so threads may share it.

    Attributes:
        option_names: the options that the template reads.
        markup: what the template writes around a reply.
        proven: the kinds of messages that can be appended.
        reads_only_last_turn: True, because the format reads only the last turn of a prompt.
        marker_texts: markup of replies that is not a single token.
    """

    reads_only_last_turn = True

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        eos_ids: Sequence[int] = (),
        marked: bool = False,
    ) -> None:
        """Probe the template, which takes about 100 ms. ConfigError if it cannot render a question.

        Args:
            eos_ids: end-of-text tokens besides the tokenizer's own.
            marked: whether the messages and tools are marked (see `SpecialText`).
        """
        own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.markup = find_markup(template, tokenizer, [*own, *eos_ids])
        found = [token for token in (self.markup.reply_end, self.markup.calls_end) if token is not None]
        self._stops = tuple(dict.fromkeys([*own, *eos_ids, *found]))
        self._encode = tokenizer.encode_rendered if marked else tokenizer.encode
        self._writer = Writer(template, self.markup)
        self._extension = Extension(self._writer, tokenizer, marked=marked)
        self._replies = TemplateReplies(tokenizer, self.markup, self._stops)
        self.marker_texts = self._replies.text_markers
        self.option_names = template.option_names
        self.proven = proven_kinds(self._writer, self._extension, tokenizer)

    @classmethod
    def from_folder(
        cls, path: str | Path, tokenizer: Tokenizer, options: Mapping[str, Any], *, marked: bool = False
    ) -> TemplateFormat:
        """Create the format of a model folder. ConfigError if its template is unusable or lacks an option."""
        template = ChatTemplate.from_folder(path, special_tokens=tokenizer.special_tokens, options=options)
        return cls(tokenizer, template, eos_ids=_eos_ids(Path(path), tokenizer.vocab_size), marked=marked)

    def render_ids(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """The whole conversation as ids. RenderingError if the template refuses it."""
        text = self._writer.text(messages, tools, add_generation_prompt=add_generation_prompt)
        return self._encode(text)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> list[int] | None:
        """Prompt + completion + what the new messages add, up to where the next reply begins.

        The closing token of the completion is added if it is missing. None if the kind of messages is not
        proven, if tokens follow the end of the completion, or if it was cut off inside its reasoning.
        """
        if not new_messages:
            return None
        ended = self._is_ended(previous_completion_ids)
        shape = shape_of(new_messages)
        if ended is None or not any(kind.shape == shape for kind in self.proven):
            return None
        called = False
        if self.markup.calls or (self.markup.reasoning and not ended):
            reply = self._replies.parse(previous_completion_ids, previous_prompt_ids)
            if not ended and reply.reasoning_complete is False:
                return None
            called = any(_is_call(call) for call in reply.tool_calls)
        close = self._extension.end_token(called=called)
        if close is None or Kind(shape, bool(tools), called) not in self.proven:
            return None
        text = self._extension.text(new_messages, tools, called=called)
        ids = None if text is None else self._extension.ids(text, called=called)
        if ids is None:
            return None
        return [*previous_prompt_ids, *previous_completion_ids, *([] if ended else [close]), *ids]

    def parse_response(
        self,
        token_ids: list[int],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        prompt_ids: list[int] | None = None,
    ) -> ParsedResponse:
        """The content, reasoning and tool calls of a completion; `tools` is ignored."""
        return self._replies.parse(token_ids, prompt_ids or ())

    def get_stop_token_ids(self) -> list[int]:
        """The folder's end-of-text tokens, and the tokens with which the template closes a reply."""
        return list(self._stops)

    def describe(self) -> str:
        """A line for the log that says what this template can do."""
        calls = "reads tool calls" if self.markup.calls else "reads no tool calls"
        reasoning = "reads reasoning" if self.markup.reasoning else "reads no reasoning"
        return f"the model's own chat template; {self._extends()}; {calls}; {reasoning}"

    def _extends(self) -> str:
        plain = _roles({kind.shape for kind in self.proven if not kind.tools})
        tools = _roles({kind.shape for kind in self.proven if kind.tools})
        if not plain and not tools:
            return "cannot extend: full render each turn"
        if plain == tools:
            return f"extends after: {plain}"
        return f"extends after: {plain or 'nothing'}; with tools: {tools or 'nothing'}"

    def _is_ended(self, completion: Sequence[int]) -> bool | None:
        """Whether the completion closes its turn; None if tokens follow the closing token."""
        at = next((i for i, token in enumerate(completion) if token in self._stops), None)
        if at is None:
            return False
        return True if at == len(completion) - 1 else None


def _is_call(call: Any) -> bool:
    return call.status == ToolCallParseStatus.OK and isinstance(call.arguments, dict)


def _roles(shapes: set[Shape]) -> str:
    """The single roles first, then the combinations: "tool, user, tool+user"."""
    names = {"+".join(role for role, _ in shape) for shape in shapes}
    return ", ".join(sorted(names, key=lambda name: (name.count("+"), name)))


def _eos_ids(folder: Path, vocab_size: int) -> list[int]:
    """The end-of-text tokens in generation_config.json, or if it names none, in config.json."""
    for file in ("generation_config.json", "config.json"):
        value = read_object(folder / file).get("eos_token_id")
        ids = [value] if isinstance(value, int) else value or []
        if not isinstance(ids, list) or not all(isinstance(i, int) and 0 <= i < vocab_size for i in ids):
            raise ConfigError(
                f"eos_token_id of {folder / file} must be token ids below {vocab_size}, got {value!r}"
            )
        if ids:
            return ids
    return []


_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_OPENED = re.compile(r"<think>\s*\Z")
_LOOK_BACK = 16  # tokens at the end of a prompt; a reasoning opener stands within the last three


class TemplateReplies:
    """Parses completions. Stateless.

    Attributes:
        text_markers: markup that is parsed but is not a single token, so that it may arrive in pieces.
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
        """Parse a completion. Calls have a token span if their markers are tokens."""
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
        """Whether the prompt itself opened the reasoning with which the reply continues."""
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
    """Parse one block; a malformed one keeps its delimiters, because it has no span to find them by."""
    inside = match.group(1).strip()
    if not match.group(2):
        return ParsedToolCall(match.group(0), status=ToolCallParseStatus.UNCLOSED_BLOCK)
    try:
        call = json.loads(inside)
    except ValueError:  # not JSON, or a number of more digits than Python reads
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
