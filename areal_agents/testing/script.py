"""The script of an engine: a function from a call to a reply, and functions that make scripts.

A script sees the prompt exactly as the engine received it, and nothing else of the conversation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from tokenizers import Tokenizer

from areal_agents.core.completion import TokenIds
from areal_agents.testing.invalid_answers import LIES

ReplyEnd = Literal["stop", "length", "abort"]
_FILLER_TEXT = " The harbour opens at six, and the ferry leaves for the island when the tide is high enough."


@dataclass(frozen=True, slots=True)
class ScriptedReply:
    """A reply of the scripted engine: its tokens, and how they arrive.

    Attributes:
        text: the text of the reply; special tokens that it spells out become their ids.
        token_ids: the exact ids, instead of `text`.
        finish: "stop" ends with the engine's stop token, which is appended if it is missing; "length" and
            "abort" mark the reply as cut off. `SGLangEngine` refuses a "length" that is shorter than the
            request's limit. The request's own limits still apply.
        delay_s: seconds before the first token.
        chunk_delay_s: seconds before each further chunk.
        chunk_tokens: number of tokens that arrive together.
        error: if not "", the call is refused with this message.
        error_status: HTTP status of the refusal.
        lie: a key of `invalid_answers.LIES` that falsifies the answer; "" leaves the answer unchanged.
    """

    text: str = ""
    token_ids: tuple[int, ...] | None = None
    finish: ReplyEnd = "stop"
    delay_s: float = 0.0
    chunk_delay_s: float = 0.0
    chunk_tokens: int = 1
    error: str = ""
    error_status: int = 500
    lie: str = ""

    def __post_init__(self) -> None:
        if self.finish not in get_args(ReplyEnd):
            raise ValueError(f"finish must be one of {get_args(ReplyEnd)}, got {self.finish!r}")
        if self.text and self.token_ids is not None:
            raise ValueError("a reply has text or token_ids, not both")
        if self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be at least 1, got {self.chunk_tokens}")
        if min(self.delay_s, self.chunk_delay_s) < 0:
            raise ValueError(f"delays must not be negative, got {self.delay_s} and {self.chunk_delay_s}")
        if self.lie and self.lie not in LIES:
            raise ValueError(f"lie must be one of {sorted(LIES)}, got {self.lie!r}")
        if not 400 <= self.error_status <= 599:
            raise ValueError(f"error_status must be in [400, 599], got {self.error_status}")


class ScriptedCall:
    """One generation as it was requested.

    Attributes:
        input_ids: [P] the prompt.
        body: the JSON of the request.
        index: number of earlier calls.
    """

    def __init__(
        self,
        input_ids: TokenIds,
        body: Mapping[str, Any],
        index: int,
        *,
        decode: Callable[[Sequence[int]], str],
        stop_token_id: int,
    ) -> None:
        self.input_ids = input_ids
        self.body = body
        self.index = index
        self._decode = decode
        self._stop_token_id = stop_token_id

    @cached_property
    def prompt_text(self) -> str:
        """The text of the whole prompt with its special tokens; decoded on first use."""
        return self._decode(self.input_ids.tolist())

    @cached_property
    def last_text(self) -> str:
        """The text of the prompt's last message, with the beginning of the reply.

        It is the text after the last but one stop token. If the template does not end each message with the
        stop token, it is the whole prompt.
        """
        ends = (self.input_ids == self._stop_token_id).nonzero()[0]
        start = int(ends[-2]) + 1 if len(ends) > 1 else 0
        return self._decode(self.input_ids[start:].tolist())


Script = Callable[[ScriptedCall], ScriptedReply | str]


def repeat(replies: Sequence[ScriptedReply | str]) -> Script:
    """Return a script that gives the replies one after the other, in an endless cycle."""
    if not replies:
        raise ValueError("replies must have at least one reply")
    rounds = itertools.cycle(replies)
    return lambda call: next(rounds)


def by_prompt(rules: Sequence[tuple[str, ScriptedReply | str]]) -> Script:
    """Return a script that gives the reply of the first rule whose text occurs in the prompt's last message.

    A prompt that matches no rule is refused with status 400; the error shows the last message. A rule with
    the text "" matches every prompt.
    """

    def answer(call: ScriptedCall) -> ScriptedReply | str:
        for text, reply in rules:
            if text in call.last_text:
                return reply
        return ScriptedReply(
            error=f"no rule of the script matches the last message {call.last_text[-500:]!r}",
            error_status=400,
        )

    return answer


def filler(n_tokens: int, tokenizer: Tokenizer, *, stop_token_id: int, **arrival: Any) -> Script:
    """Return a script that answers every call with `n_tokens` tokens of prose, including the stop token.

    The text is tokenised only once. `arrival` has fields of ScriptedReply that define how the tokens arrive.
    """
    if n_tokens < 1:
        raise ValueError(f"n_tokens must be at least 1, got {n_tokens}")
    sentence = tokenizer.encode(_FILLER_TEXT, add_special_tokens=False).ids
    body = tuple(itertools.islice(itertools.cycle(sentence), n_tokens - 1))
    reply = ScriptedReply(token_ids=(*body, stop_token_id), **arrival)
    return lambda call: reply
