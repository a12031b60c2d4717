"""Reads a sampled reply: reasoning, content, and tool calls with their arguments as sampled.

Only this module decides which calls are usable. Streamed replies and complete replies are both read here, so
they cannot differ. Arguments keep the sampled JSON text, because serialising them again would change
whitespace, number forms and escapes, and with them the tokens of any later full rendering.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import orjson

from areal_agents.core.messages import Message, ToolCall
from areal_agents.errors import RenderingError
from areal_agents.rendering.formats import ChatFormat
from areal_agents.rendering.templates.markers import Markers
from areal_agents.rendering.tokenization.tokenizer import Tokenizer

CUT = "\ufffd"  # the bytes of an unfinished character decode to this
_WORD = "qj"  # occurs in no marker
_CallBlock = tuple[tuple[int, int] | None, str]  # [start, end) in the sampled ids, if known, and the text


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """A reply without the ids of its calls.

    Attributes:
        spoken: the content without malformed calls.
        broken: the malformed calls, as sampled.
        calls: (name, arguments as a JSON string) of each usable call.
    """

    reasoning: str
    spoken: str
    broken: tuple[str, ...] = ()
    calls: tuple[tuple[str, str], ...] = field(default=())

    @property
    def content(self) -> str:
        """All content: `spoken`, and then the malformed calls."""
        return "\n".join(text for text in (self.spoken, *self.broken) if text)

    def message(self, minted: Sequence[ToolCall] = ()) -> Message:
        """The assistant message. The first calls are `minted`, with their ids; the others get new ids."""
        fresh = [mint_call(name, arguments) for name, arguments in self.calls[len(minted) :]]
        return Message("assistant", self.content, self.reasoning, (*minted, *fresh))


def mint_call(name: str, arguments: str) -> ToolCall:
    """Create a call with a unique id."""
    return ToolCall(f"call_{secrets.token_hex(12)}", name, arguments)


class ReplyReader:
    """Reads completions in one chat format. Stateless."""

    def __init__(self, tokenizer: Tokenizer, chat_format: ChatFormat, *, family: str) -> None:
        self.tokenizer = tokenizer
        self.format = chat_format
        self.family = family
        self.markers = Markers(tokenizer, chat_format, family=family)
        self.stop_token_ids = frozenset(chat_format.get_stop_token_ids())
        header = ("<|start_header_id|>", "<|end_header_id|>") if family == "llama-3" else ()
        self._header_ids = [tokenizer.convert_tokens_to_ids(text) for text in header]
        self.continuations = self._continuations()

    def read(
        self, prompt_tail: list[int], ids: list[int], tools: Sequence[dict[str, Any]] = ()
    ) -> ParsedReply:
        """Parse the sampled `ids`.

        Without `tools` nothing can be called, so what has the form of a call stays in the content, as
        sampled: some agents describe their tools in the text of the prompt, and read the calls themselves.

        Raises:
            RenderingError: the format cannot read the ids.
        """
        reply, blocks = self.read_calls(prompt_tail, ids, tools)
        if tools or not blocks:
            return reply
        return self._with_calls_as_text(prompt_tail, ids, reply, blocks)

    def read_calls(
        self, prompt_tail: list[int], ids: list[int], tools: Sequence[dict[str, Any]] = ()
    ) -> tuple[ParsedReply, list[_CallBlock]]:
        """Parse the sampled `ids` with their calls, offered or not.

        Returns the reply, and the block of each call, usable or not.
        """
        if self._header_ids:
            ids = self._without_headers(ids)
        try:
            parsed = self.format.parse_response(ids, tools=list(tools) or None, prompt_ids=prompt_tail)
        except RecursionError:
            return self._nested_too_deep(prompt_tail, ids, tools), []
        except Exception as error:  # an episode must not fail without an explanation
            raise RenderingError(f"family {self.family} cannot read this completion: {error}") from error
        if self.family == "llama-3" and not _names_one(parsed.tool_calls, tools):
            # Calls of this family have no marker, so JSON that names no offered tool is an answer.
            return ParsedReply("", self._text_before_the_end(ids).strip()), []
        if not parsed.tool_calls:
            return ParsedReply((parsed.reasoning_content or "").strip(), parsed.content.strip()), []
        calls = [call for call in parsed.tool_calls if _is_usable(call)]
        broken = [self._sampled_text(ids, call) for call in parsed.tool_calls if not _is_usable(call)]
        reply = ParsedReply(
            reasoning=(parsed.reasoning_content or "").strip(),
            spoken=parsed.content.strip(),
            broken=tuple(broken),
            calls=tuple((call.name, arguments_text(call.raw, call.arguments)) for call in calls),
        )
        return reply, [(call.token_span, self._sampled_text(ids, call)) for call in parsed.tool_calls]

    def _with_calls_as_text(
        self, prompt_tail: list[int], ids: list[int], reply: ParsedReply, blocks: list[_CallBlock]
    ) -> ParsedReply:
        """Return `reply` with its calls as text, each in its place if the format knows the place of all.

        The ids are read once more, with a word in the place of each call, and the words are then replaced.
        """
        whole = self.tokenizer.decode(ids)
        texts: dict[str, str] = {}
        marked: list[int] = []
        end = 0
        for span, text in blocks:
            if span is None or span[0] < end:
                return ParsedReply(reply.reasoning, reply.spoken, tuple(text for _, text in blocks))
            start, stop = self._whole_characters(ids, span, at_least=end)
            word = next(w for w in (f"{_WORD}{n}{_WORD}" for n in count(len(texts))) if w not in whole)
            texts[word] = self.tokenizer.decode(ids[start:stop])
            marked += [*ids[end:start], *self.tokenizer.encode(word)]
            end = stop
        found = self.read(prompt_tail, [*marked, *ids[end:]])
        reasoning, content = found.reasoning, found.content
        for word, text in texts.items():
            reasoning, content = reasoning.replace(word, text), content.replace(word, text)
        return ParsedReply(reasoning, content)

    def _whole_characters(self, ids: list[int], span: tuple[int, int], *, at_least: int) -> tuple[int, int]:
        """Extend a span of `ids` so that it begins and ends between characters; a token may be a byte."""
        start, stop = span
        while start > at_least and self.tokenizer.decode(ids[at_least:start]).endswith(CUT):
            start -= 1
        while stop < len(ids) and self.tokenizer.decode(ids[start:stop]).endswith(CUT):
            stop += 1
        return start, stop

    def _continuations(self) -> list[list[int]]:
        """The markers that may change the meaning of earlier tokens, each as ids.

        A marker that is read like an ordinary word after every other marker changes nothing, and neither does
        the end of the turn, after which nothing is read.
        """
        plain, word = self.markers.plain, self.tokenizer.encode(_WORD)
        named = [ids for ids in self.markers.named if self.stop_token_ids.isdisjoint(ids)]
        beginnings = [[], plain, *([*ids, *plain] for ids in named)]

        def reads_like_a_word(ids: list[int]) -> bool:
            text = self.tokenizer.decode(ids)
            return all(
                self.read_calls([], [*before, *ids, *plain])[0]
                == _with_text(self.read_calls([], [*before, *word, *plain])[0], text)
                for before in beginnings
            )

        return [ids for ids in named if not reads_like_a_word(ids)]

    def _without_headers(self, ids: list[int]) -> list[int]:
        """Remove misplaced header tokens, because the library would drop all text before them."""
        start, end = self._header_ids
        body = ids.index(end) + 1 if ids[:1] == [start] and end in ids else 0
        return ids[:body] + [token for token in ids[body:] if token not in (start, end)]

    def _nested_too_deep(
        self, prompt_tail: list[int], ids: list[int], tools: Sequence[dict[str, Any]]
    ) -> ParsedReply:
        """Read a reply with too deeply nested brackets: the call stays text, what precedes it is parsed."""
        end = next((i for i, token in enumerate(ids) if token in self.stop_token_ids), len(ids))
        cut = next((i for i in range(end - 1, -1, -1) if ids[i] in self.markers.ids), 0)
        before = self.read(prompt_tail, ids[:cut], tools)
        rest = self.tokenizer.decode(ids[cut:end])
        if not before.broken:
            return ParsedReply(
                before.reasoning, "\n".join(t for t in (before.spoken, rest) if t), (), before.calls
            )
        last = before.broken[-1] + rest
        return ParsedReply(before.reasoning, before.spoken, (*before.broken[:-1], last), before.calls)

    def _text_before_the_end(self, ids: list[int]) -> str:
        end = next((i for i, token in enumerate(ids) if token in self.stop_token_ids), len(ids))
        start = ids.index(self._header_ids[1]) + 1 if self._header_ids[1] in ids[:end] else 0
        return self.tokenizer.decode(ids[start:end])

    def _sampled_text(self, ids: list[int], call: Any) -> str:
        """A call's block, with its delimiters if the library knows its token span, otherwise without."""
        if call.token_span is None:
            return call.raw
        start, end = call.token_span
        return self.tokenizer.decode(ids[start:end])


def _with_text(reply: ParsedReply, text: str) -> ParsedReply:
    """The reply with `text` in place of `_WORD`."""
    broken = tuple(one.replace(_WORD, text) for one in reply.broken)
    calls = tuple((n.replace(_WORD, text), a.replace(_WORD, text)) for n, a in reply.calls)
    spoken, reasoning = reply.spoken.replace(_WORD, text), reply.reasoning.replace(_WORD, text)
    return ParsedReply(reasoning, spoken, broken, calls)


def _names_one(calls: Sequence[Any], tools: Sequence[dict[str, Any]]) -> bool:
    return any(call.name == tool.get("function", tool).get("name") for call in calls for tool in tools)


def _is_usable(call: Any) -> bool:
    from renderers import ToolCallParseStatus

    ok = call.status == ToolCallParseStatus.OK
    ok = ok and bool(call.name) and isinstance(call.name, str) and isinstance(call.arguments, dict)
    return ok and _is_writable([call.name, call.arguments])


def _is_writable(value: Any) -> bool:
    """Whether a value can be sent to clients: it has no lone surrogates, and is not nested too deeply."""
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        if "64-bit" not in str(error):
            return False
        try:  # a large integer is not an error
            json.dumps(value, ensure_ascii=False).encode()
        except (UnicodeEncodeError, RecursionError):
            return False
    return True


_DECODER = json.JSONDecoder()
_WHITESPACE = re.compile(r"[ \t\n\r]*")


def arguments_text(raw: str, arguments: Any) -> str:
    """The arguments of a call as a JSON string.

    Args:
        raw: the block as sampled; if it is a JSON object with a member "arguments" or
            "parameters" that equals `arguments`, the text of that member is returned.
        arguments: the parsed arguments; they are serialised if `raw` is in another format.
    """
    for name, text in _members(raw).items():
        if name in ("arguments", "parameters") and json.loads(text) == arguments:
            return text
    if isinstance(arguments, str):
        return arguments
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False)


def _members(raw: str) -> dict[str, str]:
    """The text of each top-level member of a JSON object; {} if `raw` is not a JSON object."""
    members: dict[str, str] = {}
    position = _skip(raw, 0)
    if raw[position : position + 1] != "{":
        return {}
    position = _skip(raw, position + 1)
    try:
        while raw[position : position + 1] == '"':
            name, position = _DECODER.raw_decode(raw, position)
            position = _skip(raw, position)
            if raw[position : position + 1] != ":":
                return {}
            start = _skip(raw, position + 1)
            _, end = _DECODER.raw_decode(raw, start)
            members[name] = raw[start:end]
            position = _skip(raw, end)
            if raw[position : position + 1] == ",":
                position = _skip(raw, position + 1)
    except (ValueError, RecursionError):  # not JSON, or nested too deeply
        return {}
    return members


def _skip(text: str, position: int) -> int:
    match = _WHITESPACE.match(text, position)
    assert match is not None  # the pattern matches the empty string
    return match.end()
