"""Prompts without a chat template, given as strings or token ids, and the replies to them.

What a call costs follows its own prompt and reply, not the turns that are recorded: those are compared with
the prompt where they occur in it, and only what is new is encoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from areal_agents.core.completion import TokenIds, as_token_ids
from areal_agents.core.forest import Forest
from areal_agents.core.messages import Message
from areal_agents.core.trajectory import Turn
from areal_agents.errors import PromptTooLong
from areal_agents.proxy.calls.request import RAW_TOOLS_ID
from areal_agents.proxy.lru import LruCache
from areal_agents.rendering import ChatRenderer, Delta

_TEXTS_KEPT = 1_000  # of replies, by turn
_CUT = "\ufffd"  # what the bytes of an unfinished character decode to
_DECODED_ANYHOW = 50_000  # tokens; prompts up to this length are decoded whatever the limit
_LONGEST_CHARACTER = 4  # bytes, each of which may be a token


class RawPrompts:
    """Finds recorded turns in raw prompts, for one model. Shared by all episodes; not thread-safe."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._texts: LruCache[str, str] = LruCache(_TEXTS_KEPT)

    def parent(self, forest: Forest, raw: str | tuple[int, ...]) -> tuple[Turn, int] | None:
        """The turn with the longest recorded text or ids that a prompt begins with, and their length in it.

        A text does not show the token that ended a reply, so a plain server would not show it to the model
        either: such a reply is not gone on from by its text.
        """
        best: tuple[Turn, int] | None = None
        for turn, _, end in self._followed(forest, raw):
            if end is not None and len(raw) > end > (best[1] if best else 0):
                best = (turn, end)
        return best

    def answers(self, forest: Forest, raw: str | tuple[int, ...]) -> tuple[Turn, ...]:
        """The turns that answered just this prompt, in the order of recording."""
        return tuple(turn for turn, asked, _ in self._followed(forest, raw) if asked == len(raw))

    def encode(self, raw: str | tuple[int, ...], *, most_tokens: int) -> tuple[TokenIds, Message]:
        """[N] the ids of a prompt or of its end, and the message that represents it.

        PromptTooLong for a prompt of more than `most_tokens`, possibly before it is encoded; never for a
        short one.
        """
        tokenizer = self._renderer.tokenizer
        if isinstance(raw, str):
            with tokenizer.limited(most_tokens):
                return as_token_ids(tokenizer.encode(raw)), Message("user", raw)
        if len(raw) > max(most_tokens, _DECODED_ANYHOW):
            raise PromptTooLong(len(raw))
        return as_token_ids(raw), Message("user", tokenizer.decode(raw))

    def text_of(self, completion_ids: Sequence[int]) -> str:
        """The text of a completion without a template: all but the token that ended it."""
        end = len(completion_ids) - self.ends_in_stop(completion_ids)
        return self._renderer.tokenizer.decode(completion_ids[:end])

    def ends_in_stop(self, completion_ids: Sequence[int]) -> bool:
        """Whether the last token is one that ends the model's turn."""
        return bool(completion_ids) and completion_ids[-1] in self._renderer.stop_token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of any tokens."""
        return self._renderer.tokenizer.decode(token_ids)

    def _followed(self, forest: Forest, raw: str | tuple[int, ...]) -> Iterator[tuple[Turn, int, int | None]]:
        """The turns whose whole prompt `raw` begins with; where that ends in it, and where the reply does.

        The latter is None where `raw` continues otherwise, or ends before.
        """
        said = raw if isinstance(raw, str) else as_token_ids(raw)
        ends: dict[str, int] = {}
        for turn in forest.turns:  # a parent comes before its children
            start = 0 if turn.parent is None else ends.get(turn.parent)
            if turn.tools_id != RAW_TOOLS_ID or start is None:
                continue
            asked = _end_of_prompt(said, start, turn)
            if asked is None:
                continue
            end = self._end_of_reply(said, asked, turn)
            if end is not None:
                ends[turn.id] = end
            yield turn, asked, end

    def _end_of_reply(self, said: str | TokenIds, start: int, turn: Turn) -> int | None:
        if not isinstance(said, str):
            return _end_of_ids(said, start, turn.completion.token_ids)
        if not said.startswith(turn.reply.content, start) or self.ends_in_stop(
            turn.completion.token_ids[-1:].tolist()
        ):
            return None
        text = self._text_of_reply(turn)
        return start + len(text) if said.startswith(text, start) else None

    def _text_of_reply(self, turn: Turn) -> str:
        """All text of a reply; what its client got ends before a stop string, the tokens after."""
        if not turn.sampling.stop:
            return turn.reply.content
        text = self._texts.get(turn.id)
        return (
            self._texts.put(turn.id, self.text_of(turn.completion.token_ids.tolist()))
            if text is None
            else text
        )


class PlainStream:
    """Reads a completion without a template as it comes; see `ReplyStream`.

    Only the tokens since the last whole character are decoded, behind those that came just before them:
    some decoders treat the first token apart.
    """

    def __init__(self, raw: RawPrompts) -> None:
        self._raw = raw
        self._ids: list[int] = []
        self._context = 0  # index of the first token after which the next ones are decoded
        self._read = 0  # how many tokens have been passed on as text
        self._sent = 0  # characters that were passed on
        self._message: Message | None = None

    def feed(self, token_ids: Sequence[int]) -> list[Delta]:
        """The text that the next tokens add; a character that is not whole yet is held back."""
        self._ids.extend(token_ids)
        end = len(self._ids) - self._raw.ends_in_stop(self._ids)
        for upto in range(end, max(self._read, end - _LONGEST_CHARACTER), -1):
            # Whether a character ends here shows in the last tokens; all that waits is decoded once.
            last = self._ids[max(self._read, upto - 2 * _LONGEST_CHARACTER) : upto]
            if not self._raw.decode(last).endswith(_CUT):
                before = self._raw.decode(self._ids[self._context : self._read])
                text = self._raw.decode(self._ids[self._context : upto])
                self._context, self._read = self._read, upto
                return self._piece(text[len(before) :])
        return []

    def finish(self) -> list[Delta]:
        """The rest of the text."""
        return self._piece(self.message.content[self._sent :])

    @property
    def message(self) -> Message:
        """The whole reply, once no token follows."""
        if self._message is None:
            self._message = Message("assistant", self._raw.text_of(self._ids))
        return self._message

    def _piece(self, text: str) -> list[Delta]:
        self._sent += len(text)
        return [Delta("content", text)] if text else []


def _end_of_prompt(said: str | TokenIds, start: int, turn: Turn) -> int | None:
    """Where the prompt tokens that a turn added end in a prompt, None where it continues otherwise."""
    if not isinstance(said, str):
        return _end_of_ids(said, start, turn.new_prompt_ids)
    for message in turn.new_messages:
        if not said.startswith(message.content, start):
            return None
        start += len(message.content)
    return start


def _end_of_ids(said: TokenIds, start: int, part: TokenIds) -> int | None:
    end = start + len(part)
    return end if np.array_equal(said[start:end], part) else None
