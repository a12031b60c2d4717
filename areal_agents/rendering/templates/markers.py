"""A format's markers: the tokens and strings that may change the meaning of text that was already sampled."""

from __future__ import annotations

from areal_agents.rendering.formats import ChatFormat
from areal_agents.rendering.tokenization.tokenizer import Tokenizer

PLAIN = "x"  # no format reads this as markup

_COMMON = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_TEXTS = {
    "deepseek-v4": (
        "<｜DSML｜tool_calls>",
        "<｜DSML｜toolcalls>",
        "<｜DSML｜tool>",
        "</｜DSML｜tool_calls>",
        "<｜DSML｜invoke",
        "</｜DSML｜invoke>",
    ),
}
_HEADER = 8  # the last tokens of a prompt, which contain the header of the reply
_JSON_IS_A_CALL = frozenset({"llama-3"})


class Markers:
    """The markers of one chat format.

    Attributes:
        ids: every added token of the vocabulary.
        named: the markers that the format knows by name, each as ids.
        plain: the ids of `PLAIN`.
    """

    def __init__(self, tokenizer: Tokenizer, chat_format: ChatFormat, *, family: str) -> None:
        self.ids = tokenizer.added_token_ids
        named = {value for value in vars(chat_format).values() if type(value) is int} & self.ids
        named |= set(getattr(chat_format, "marker_token_ids", ()))
        texts = [*_TEXTS.get(family, ()), *getattr(chat_format, "marker_texts", ())]
        common = {text: tokenizer.convert_tokens_to_ids(text) for text in _COMMON}
        texts += [text for text, token in common.items() if token not in self.ids]
        self._common = frozenset(token for token in common.values() if token in self.ids)
        named |= self._common
        self._texts = tuple(dict.fromkeys(texts))
        self.named = [[token] for token in sorted(named)]
        self.named += [tokenizer.encode(text) for text in self._texts]
        plain = tokenizer.convert_tokens_to_ids(PLAIN)
        exists = plain is not None and plain != tokenizer.unk_token_id
        self.plain: list[int] = [plain] if exists else tokenizer.encode(PLAIN)
        self._starts = frozenset(text[0] for text in self._texts)
        self._json_is_a_call = family in _JSON_IS_A_CALL

    def headers(self, prompt_tail: list[int]) -> frozenset[int]:
        """The marker tokens with which the prompt opens the reply, for example <|im_start|>."""
        return (frozenset(prompt_tail[-_HEADER:]) & self.ids) - self._common

    @property
    def longest_text(self) -> int:
        """The length in characters of the longest marker that is plain text; 0 if there is none."""
        return max(map(len, self._texts), default=0)

    def found_in(self, text: str) -> bool:
        """Whether the text contains a whole marker."""
        return any(marker in text for marker in self._texts)

    def after_last(self, text: str) -> str:
        """The text after the last whole marker in it."""
        return text[max((text.rfind(m) + len(m) for m in self._texts if m in text), default=0) :]

    def certain_part(self, text: str) -> str:
        """`text` without a suffix that may become a marker."""
        window = max(len(text) - self.longest_text, 0)
        for start in range(window, len(text)):
            if text[start] in self._starts and any(m.startswith(text[start:]) for m in self._texts):
                return text[:start]
        return text

    def may_become_a_call(self, content: str) -> bool:
        """Whether content that begins with `content` may turn out to be a call without any marker."""
        return self._json_is_a_call and content.lstrip().startswith("{")
