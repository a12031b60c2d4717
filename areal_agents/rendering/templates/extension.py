"""Computes the text that a chat template adds after a reply, and proves when it may be appended.

The text is rendered in a short conversation, the stand-in, in place of the real one, so the cost does not
depend on the length of the history. It is used only for kinds of new messages for which `proven_kinds` has
shown, on the conversations of `probes`, whose histories, replies, tool names and clock differ from those of
the stand-in:
  - the prompt of the reply is an unchanged prefix of the longer conversation;
  - the reply that follows it is complete (content, reasoning, calls);
  - the token that closes the reply is followed by the same text and the same tokens as in the stand-in.
The reply itself stays as it was sampled, even if the template would write its markup differently. A kind is
the roles of the new messages and the lengths of their runs, with or without tools, after a reply with or
without calls. The probes cannot show that a template does the same for all content: a template that rewrites
earlier text only for a certain word, or only after more turns than were probed, is not detected.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from areal_agents.errors import RenderingError
from areal_agents.rendering.templates.markup import MARK, Markup
from areal_agents.rendering.templates.probes import (
    Messages,
    ProbeReply,
    Shape,
    extensions,
    histories,
    probe_tools,
    replies,
    shape_of,
    stand_in,
)
from areal_agents.rendering.templates.template import ChatTemplate, Clock
from areal_agents.rendering.tokenization.tokenizer import Tokenizer

_PROBE_TIME = datetime(2021, 3, 4, 5, 6, 7)
_OTHER_TIME = _PROBE_TIME + timedelta(days=400, hours=7, minutes=8, seconds=9)


class Kind(NamedTuple):
    """A kind of extension: the new messages' shape, whether there are tools, whether the reply called one."""

    shape: Shape
    tools: bool
    called: bool


class Writer:
    """Renders a template, with tool arguments in the form that it writes unquoted. Stateless."""

    def __init__(self, template: ChatTemplate, markup: Markup) -> None:
        self.template = template
        self.markup = markup

    def text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool = True,
        now: Clock = datetime.now,
    ) -> str:
        """The conversation as text. RenderingError if the template refuses it."""
        if not self.markup.raw_arguments:
            messages = [_with_objects(message) for message in messages]
        return self.template.render(messages, tools, add_generation_prompt=add_generation_prompt, now=now)


class Extension:
    """Computes what new messages add after a reply. Stateless."""

    def __init__(self, writer: Writer, tokenizer: Tokenizer, *, marked: bool = False) -> None:
        self._writer = writer
        self._encode = tokenizer.encode_rendered if marked else tokenizer.encode
        self._ends = {
            called: None if token is None else (token, tokenizer.token_text(token))
            for called, token in ((False, writer.markup.reply_end), (True, writer.markup.calls_end))
        }

    def end_token(self, *, called: bool) -> int | None:
        """The token that closes a reply with or without calls; None if there is none."""
        end = self._ends[called]
        return None if end is None else end[0]

    def text(
        self,
        new_messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        *,
        called: bool,
        now: Clock = datetime.now,
    ) -> str | None:
        """Render what the template writes between the end of a reply and the beginning of the next.

        None if the template refuses the stand-in or closes replies with no token, or if a message contains
        the mark by which the reply is found.
        """
        messages = [*stand_in(self._writer.markup.head, new_messages, called=called), *new_messages]
        try:
            whole = self._writer.text(messages, tools, now=now)
        except RenderingError:
            return None  # the template may still accept the real conversation
        parts = self.split(whole, called=called)
        return None if parts is None else parts[1]

    def split(self, text: str, *, called: bool) -> tuple[str, str] | None:
        """The text through the token that closes the marked reply, and the rest; None without the mark."""
        end = self._ends[called]
        if end is None or text.count(MARK) != 1:
            return None
        close = text.find(end[1], text.index(MARK) + len(MARK))
        if close < 0:
            return None
        close += len(end[1])
        return text[:close], text[close:]

    def ids(self, text: str, *, called: bool) -> list[int] | None:
        """The tokens of a text that follows the token that ends a reply.

        The text is encoded together with that token, because some tokenizers treat the start of a string, or
        what follows certain tokens, differently.
        """
        end = self._ends[called]
        if end is None:
            return None
        ids = self._encode(end[1] + text)
        return ids[1:] if ids[:1] == [end[0]] else None


def proven_kinds(writer: Writer, extension: Extension, tokenizer: Tokenizer) -> frozenset[Kind]:
    """The kinds of extensions for which the probes find no difference. Takes about 100 ms."""
    proven = set()
    for tools in (None, probe_tools()):
        prompts = list(_prompts(writer, tools))
        for called in (False, True):
            if extension.end_token(called=called) is None or (called and not writer.markup.calls):
                continue
            for new in extensions():
                probe = _Probe(writer, extension, tokenizer, tools, called)
                if probe.holds(prompts, new):
                    proven.add(Kind(shape_of(new), tools is not None, called))
    return frozenset(proven)


class _Probe:
    """One kind of extension under test."""

    def __init__(
        self,
        writer: Writer,
        extension: Extension,
        tokenizer: Tokenizer,
        tools: Messages | None,
        called: bool,
    ) -> None:
        self._writer = writer
        self._extension = extension
        self._tokenizer = tokenizer
        self._tools = tools
        self._called = called

    def holds(self, prompts: Sequence[tuple[Messages, str]], new: Messages) -> bool:
        """Whether every probe agrees with the stand-in; False if there are fewer than two prompts."""
        suffix = self._extension.text(new, self._tools, called=self._called, now=lambda: _OTHER_TIME)
        ids = None if suffix is None else self._extension.ids(suffix, called=self._called)
        if suffix is None or ids is None or len(prompts) < 2:
            return False
        return all(
            self._agrees(history, prompt, reply, new, suffix, ids if compare_ids else None)
            for history, prompt, reply, compare_ids in self._pairs(prompts, new)
        )

    def _pairs(
        self, prompts: Sequence[tuple[Messages, str]], new: Messages
    ) -> Iterator[tuple[Messages, str, ProbeReply, bool]]:
        """Every reply after the two shortest histories, and one reply after each of the others."""
        calls = max(sum(message["role"] == "tool" for message in new), 1) if self._called else 0
        made = replies(calls=calls, reasoning=self._writer.markup.reasoning)
        for index, (history, prompt) in enumerate(prompts):
            for reply in made if index < 2 else [made[index % len(made)]]:
                yield history, prompt, reply, index == 0

    def _agrees(
        self,
        history: Messages,
        prompt: str,
        reply: ProbeReply,
        new: Messages,
        suffix: str,
        ids: list[int] | None,
    ) -> bool:
        try:
            whole = self._writer.text([*history, reply.message, *new], self._tools, now=lambda: _PROBE_TIME)
        except RenderingError:
            return False
        if not whole.startswith(prompt):
            return False
        parts = self._extension.split(whole[len(prompt) :], called=self._called)
        if parts is None or parts[1] != suffix or not all(said in parts[0] for said in reply.said):
            return False
        return ids is None or self._tokenizer.encode(whole)[-len(ids) - 1 :] == [
            self._extension.end_token(called=self._called),
            *ids,
        ]


def _prompts(writer: Writer, tools: Messages | None) -> Iterator[tuple[Messages, str]]:
    """Each history that the template accepts, with its text. A history that it refuses cannot occur."""
    for history in histories():
        try:
            yield history, writer.text(history, tools, now=lambda: _PROBE_TIME)
        except RenderingError:
            continue


def _with_objects(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace arguments that are a JSON string by their value; other strings stay unchanged."""
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}


def _with_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    if not isinstance(function["arguments"], str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}
