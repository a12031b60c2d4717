"""Handles prompts without a chat template, given as strings or token ids, and the replies to them.

Recorded turns that a prompt begins with are compared with it, and only the rest is encoded. The cost of a
call therefore depends on the length of its prompt and reply, not on the number of recorded turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from areal_agents.core.completion import TokenIds, as_token_ids
from areal_agents.core.forest import Forest
from areal_agents.core.messages import Message
from areal_agents.core.trajectory import Turn
from areal_agents.errors import PromptTooLong
from areal_agents.lru import LruCache
from areal_agents.proxy.calls.request import RAW_TOOLS_ID
from areal_agents.rendering import ChatRenderer, Delta

_TEXTS_KEPT = 1_000  # number of replies whose text is remembered
_CUT = "\ufffd"  # the character that the bytes of an incomplete character decode to
_ALWAYS_DECODED = 50_000  # prompts of up to this many tokens are decoded, whatever the limit
_LONGEST_CHARACTER = 4  # bytes, each of which may be a token


class RawPrompts:
    """Finds recorded turns in raw prompts, for one model. Shared by all episodes; not thread-safe."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._texts: LruCache[str, str] = LruCache(_TEXTS_KEPT)

    def parent(self, forest: Forest, raw: str | tuple[int, ...]) -> tuple[Turn, int] | None:
        """Return the turn with the longest text or ids that a prompt begins with, and their length.

        A string does not contain the token that ended a reply, so a plain server would not show that token to
        the model either. A prompt given as a string therefore does not continue a reply that ended with such
        a token.
        """
        best: tuple[Turn, int] | None = None
        for turn, _, end in self._matching_turns(forest, raw):
            if end is not None and len(raw) > end > (best[1] if best else 0):
                best = (turn, end)
        return best

    def answers(self, forest: Forest, raw: str | tuple[int, ...]) -> tuple[Turn, ...]:
        """Return the turns that answer exactly this prompt, in the order of recording."""
        matching = self._matching_turns(forest, raw)
        return tuple(turn for turn, prompt_end, _ in matching if prompt_end == len(raw))

    def encode(self, raw: str | tuple[int, ...], *, most_tokens: int) -> tuple[TokenIds, Message]:
        """Return the ids [N] of a prompt or of its end, and the message that represents it.

        Raise PromptTooLong for a prompt of more than `most_tokens`, possibly before it is encoded; a short
        prompt is always encoded.
        """
        tokenizer = self._renderer.tokenizer
        if isinstance(raw, str):
            with tokenizer.limited(most_tokens):
                return as_token_ids(tokenizer.encode(raw)), Message("user", raw)
        if len(raw) > max(most_tokens, _ALWAYS_DECODED):
            raise PromptTooLong(len(raw))
        return as_token_ids(raw), Message("user", tokenizer.decode(raw))

    def text_of(self, completion_ids: Sequence[int]) -> str:
        """Return the text of a completion without the token that ended it."""
        end = len(completion_ids) - self.ends_in_stop(completion_ids)
        return self._renderer.tokenizer.decode(completion_ids[:end])

    def ends_in_stop(self, completion_ids: Sequence[int]) -> bool:
        """Whether the last token is one that ends the model's turn."""
        return bool(completion_ids) and completion_ids[-1] in self._renderer.stop_token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        return self._renderer.tokenizer.decode(token_ids)

    def _matching_turns(
        self, forest: Forest, raw: str | tuple[int, ...]
    ) -> Iterator[tuple[Turn, int, int | None]]:
        """Yield (turn, end of its prompt, end of its reply) for the turns with whose prompt `raw` begins.

        The ends are indices into `raw`. The end of the reply is None if `raw` does not contain the reply.
        """
        prompt = raw if isinstance(raw, str) else as_token_ids(raw)
        ends: dict[str, int] = {}
        for turn in forest.turns:  # a parent comes before its children
            start = 0 if turn.parent is None else ends.get(turn.parent)
            if turn.tools_id != RAW_TOOLS_ID or start is None:
                continue
            prompt_end = _end_of_prompt(prompt, start, turn)
            if prompt_end is None:
                continue
            end = self._end_of_reply(prompt, prompt_end, turn)
            if end is not None:
                ends[turn.id] = end
            yield turn, prompt_end, end

    def _end_of_reply(self, prompt: str | TokenIds, start: int, turn: Turn) -> int | None:
        if not isinstance(prompt, str):
            return _end_of_ids(prompt, start, turn.completion.token_ids)
        if not prompt.startswith(turn.reply.content, start) or self.ends_in_stop(
            turn.completion.token_ids[-1:].tolist()
        ):
            return None
        text = self._text_of_reply(turn)
        return start + len(text) if prompt.startswith(text, start) else None

    def _text_of_reply(self, turn: Turn) -> str:
        """Return the text of all tokens of a reply; the client received it up to a stop string only."""
        if not turn.sampling.stop:
            return turn.reply.content
        text = self._texts.get(turn.id)
        return (
            self._texts.put(turn.id, self.text_of(turn.completion.token_ids.tolist()))
            if text is None
            else text
        )


class PlainStream:
    """Decodes a completion without a template as it arrives; see `ReplyStream`.

    Only the tokens since the last complete character are decoded, together with the tokens just before them,
    because some decoders treat the first token differently.
    """

    def __init__(self, raw: RawPrompts) -> None:
        self._raw = raw
        self._ids: list[int] = []
        self._context = 0  # index of the first token that is decoded together with the next ones
        self._read = 0  # number of tokens that were passed on as text
        self._sent = 0  # number of characters that were passed on
        self._message: Message | None = None

    def feed(self, token_ids: Sequence[int]) -> list[Delta]:
        """Return the text that the next tokens add; an incomplete character is held back."""
        self._ids.extend(token_ids)
        end = len(self._ids) - self._raw.ends_in_stop(self._ids)
        for upto in range(end, max(self._read, end - _LONGEST_CHARACTER), -1):
            # The last tokens show whether a character ends here; only then are all new tokens decoded.
            last = self._ids[max(self._read, upto - 2 * _LONGEST_CHARACTER) : upto]
            if not self._raw.decode(last).endswith(_CUT):
                before = self._raw.decode(self._ids[self._context : self._read])
                text = self._raw.decode(self._ids[self._context : upto])
                self._context, self._read = self._read, upto
                return self._piece(text[len(before) :])
        return []

    def finish(self) -> list[Delta]:
        """Return the rest of the text; no more tokens follow."""
        return self._piece(self.message.content[self._sent :])

    @property
    def message(self) -> Message:
        """The whole reply; no more tokens follow."""
        if self._message is None:
            self._message = Message("assistant", self._raw.text_of(self._ids))
        return self._message

    def _piece(self, text: str) -> list[Delta]:
        self._sent += len(text)
        return [Delta("content", text)] if text else []


def _end_of_prompt(prompt: str | TokenIds, start: int, turn: Turn) -> int | None:
    """Return the index in `prompt` after the prompt tokens that a turn added, None if they are not there."""
    if not isinstance(prompt, str):
        return _end_of_ids(prompt, start, turn.new_prompt_ids)
    for message in turn.new_messages:
        if not prompt.startswith(message.content, start):
            return None
        start += len(message.content)
    return start


def _end_of_ids(prompt: TokenIds, start: int, part: TokenIds) -> int | None:
    end = start + len(part)
    return end if np.array_equal(prompt[start:end], part) else None
