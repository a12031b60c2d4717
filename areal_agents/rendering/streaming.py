"""Reads a reply while it is sampled: takes tokens and emits deltas of reasoning, content and whole calls.

An emitted delta is never retracted: the joined deltas are a prefix of what reading all tokens at once gives,
and after `finish` they are all of it. In plain text only new tokens are decoded. At a marker the tokens so
far are read as if the reply ended here, and again as if it continued in each way that the format knows; only
the text and calls that all these readings share are emitted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from areal_agents.core.messages import Message, ToolCall
from areal_agents.errors import RenderingError
from areal_agents.rendering.replies import CUT, ParsedReply, ReplyReader, mint_call
from areal_agents.rendering.templates.markers import PLAIN

Channel = Literal["reasoning", "content"]
CHANNELS: tuple[Channel, Channel] = ("reasoning", "content")

# The number of tokens read at markers, summed over all readings. Once it is spent, the rest of the reply is
# held back until the end, so that the cost of a reply of nothing but markers is not quadratic.
_READING_BUDGET = 1_000_000


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a reply: `text` of "reasoning" or "content", or one whole `call`."""

    kind: Literal["reasoning", "content", "call"]
    text: str = ""
    call: ToolCall | None = None


class ReplyStream:
    """Reads one reply. Not thread-safe."""

    def __init__(self, reader: ReplyReader, prompt_tail: list[int], tools: Sequence[dict[str, Any]]) -> None:
        self._reader = reader
        self._markers = reader.markers
        self._prompt_tail = prompt_tail
        self._tools = list(tools)
        self._ids: list[int] = []
        self._out: dict[Channel, str] = {"reasoning": "", "content": ""}  # what was emitted
        self._calls: list[ToolCall] = []
        self._channel: Channel | None = None  # the channel of plain text; None if that is not certain
        self._held = ""  # text of the channel that may still be stripped, or become a marker
        self._undecoded = 0  # tokens at the end of `_ids` whose text is not in `_held` or `_out`
        self._unread = True  # whether the next tokens need a reading of all tokens
        self._ended = False
        self._header = self._markers.headers(prompt_tail)
        self._budget = _READING_BUDGET
        self._message: Message | None = None

    @property
    def message(self) -> Message:
        """The whole reply; its calls are the streamed ones. RenderingError before `finish`."""
        if self._message is None:
            raise RenderingError("a reply has no message before its stream is finished; call finish first")
        return self._message

    def feed(self, token_ids: Sequence[int]) -> list[Delta]:
        """Add the next sampled tokens, [N], and return the deltas that they make certain."""
        if self._message is not None:
            raise RenderingError("a reply takes no more tokens after finish")
        ids = [int(token) for token in token_ids]
        self._ids += ids
        if not self._reader.stop_token_ids.isdisjoint(ids):  # `finish` reads the rest
            self._ended = True
        if self._ended or not ids:
            return []
        self._undecoded += len(ids)
        if not self._unread and self._markers.ids.isdisjoint(ids):
            return self._plain_text()
        return self._settle()

    def finish(self) -> list[Delta]:
        """Read all tokens once and return the remaining deltas.

        Raises:
            RenderingError: the reply cannot be read, or the emitted deltas are not a prefix of it.
        """
        reply = self._reader.read(self._prompt_tail, self._ids, self._tools)
        made = tuple((call.name, call.arguments) for call in self._calls)
        whole: dict[Channel, str] = {"reasoning": reply.reasoning, "content": reply.content}
        if reply.calls[: len(made)] != made or any(not whole[c].startswith(self._out[c]) for c in CHANNELS):
            raise RenderingError(
                f"family {self._reader.family}: the streamed deltas are not a prefix of the whole reply: "
                f"streamed {self._out} and calls {made}, but the reply is {reply}"
            )
        deltas = [delta for c in CHANNELS for delta in self._emit(c, whole[c])]
        deltas += self._emit_calls(reply.calls)
        self._message = reply.message(self._calls)
        return deltas

    def _plain_text(self) -> list[Delta]:
        """The deltas after new tokens, none of which is a marker token."""
        text = self._new_text()
        whole = self._held + text
        if self._markers.found_in(whole):
            return self._settle()
        if self._channel is None:
            self._held = whole[-self._markers.longest_text :] if self._markers.longest_text else ""
            return []
        certain = self._markers.certain_part(whole).rstrip()
        if len(certain) <= len(self._held):  # no new word: the held text may still become part of a marker
            self._held = whole
            return []
        if not self._out[self._channel]:
            if self._channel == "content" and self._markers.may_become_a_call(certain):
                self._channel, self._held = None, ""
                return []
            whole, certain = whole.lstrip(), certain.lstrip()
        self._held = whole[len(certain) :]
        return list(self._emit(self._channel, self._out[self._channel] + certain))

    def _new_text(self) -> str:
        """The text of the tokens not decoded yet, without an unfinished character at its end.

        They are decoded together with the token before them, because some decoders treat the first token
        differently.
        """
        start = len(self._ids) - self._undecoded
        decode = self._reader.tokenizer.decode
        before = decode(self._ids[start - 1 : start]) if start else ""
        text = decode(self._ids[max(start - 1, 0) :])
        if not text.endswith(CUT):
            self._undecoded = 0
            return text[len(before) :]
        return self._text_before_a_cut(start)

    def _text_before_a_cut(self, start: int) -> str:
        """The certain part of text that ends in the middle of a character; its last four tokens may wait."""
        decode = self._reader.tokenizer.decode
        if self._undecoded <= 4:
            return ""
        first = max(start - 1, 0)
        before, head, tail = decode(self._ids[first:start]), self._ids[first:-4], self._ids[-4:]
        if decode(head) + decode(tail) != decode(head + tail) or decode(head).endswith(CUT):
            return ""
        self._undecoded = 4
        return decode(head)[len(before) :]

    def _settle(self) -> list[Delta]:
        """Read all tokens so far, as a complete reply and as the beginning of longer ones."""
        self._channel, self._held, self._unread = None, "", False
        self._undecoded = 0
        if self._budget <= 0 or self._ids[0] in self._header:  # a repeated header may be dropped
            return []
        now, plain = self._read([]), self._read(self._markers.plain)
        news = now.calls[len(self._calls) :] or _texts(now) != self._out or _texts(plain) != _texts(now)
        if not news:
            self._held = self._tail_text()
            return []
        longer = [self._read([*self._markers.plain, *more]) for more in self._reader.continuations]
        if now.calls[len(self._calls) :] or _texts(now) != self._out:  # something may be emitted now
            longer += [self._read(more) for more in self._reader.continuations]
        readings = [now, plain, *longer]
        deltas: list[Delta] = []
        for channel in CHANNELS:
            certain = os.path.commonprefix([_texts(reply)[channel] for reply in readings])
            certain = self._markers.certain_part(certain.removesuffix(CUT)).rstrip()
            if channel == "reasoning" or not self._markers.may_become_a_call(certain):
                deltas += self._emit(channel, certain)
        calls = os.path.commonprefix([list(reply.calls) for reply in readings])
        deltas += self._emit_calls(calls)
        self._find_channel(now, plain, longer)
        return deltas

    def _find_channel(self, now: ParsedReply, plain: ParsedReply, longer: list[ParsedReply]) -> None:
        """Set the channel of the plain text that follows, if it is certain, and the held text before it."""
        grown = [c for c in CHANNELS if _texts(plain)[c] != _texts(now)[c]]
        if len(grown) != 1:
            self._held = self._tail_text()
            return
        channel = grown[0]
        text = _texts(plain)[channel]
        certain = text.endswith(PLAIN) and text.startswith(self._out[channel])
        after_plain = longer[: len(self._reader.continuations)]
        if not certain or not all(_texts(reply)[channel].startswith(text) for reply in after_plain):
            self._held = self._tail_text()
            return
        held = text[len(self._out[channel]) : -len(PLAIN)]
        if held.endswith(CUT):  # the next token may complete a character that began before it
            self._unread = True
            return
        if channel == "content" and self._markers.may_become_a_call(self._out[channel] + held):
            return
        self._channel, self._held = channel, held

    def _tail_text(self) -> str:
        """The end of the text so far, in which a marker of plain text may have begun."""
        length = self._markers.longest_text
        if not length:
            return ""
        return self._markers.after_last(self._reader.tokenizer.decode(self._ids[-length:]))[-length:]

    def _read(self, more: list[int]) -> ParsedReply:
        self._budget -= len(self._ids)
        return self._reader.read(self._prompt_tail, [*self._ids, *more], self._tools)

    def _emit(self, channel: Channel, whole: str) -> Iterator[Delta]:
        """Emit the part of the channel's certain text that was not emitted yet."""
        new = whole[len(self._out[channel]) :]
        if new and whole.startswith(self._out[channel]):
            self._out[channel] = whole
            yield Delta(channel, new)

    def _emit_calls(self, certain: Sequence[tuple[str, str]]) -> Iterator[Delta]:
        for name, arguments in certain[len(self._calls) :]:
            call = mint_call(name, arguments)
            self._calls.append(call)
            yield Delta("call", call=call)


def _texts(reply: ParsedReply) -> dict[Channel, str]:
    """The text of each channel, without malformed calls, which join the content only when the reply ends."""
    return {"reasoning": reply.reasoning, "content": reply.spoken}
