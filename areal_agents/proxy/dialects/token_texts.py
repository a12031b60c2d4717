"""The tokens of an answer with their logprobs: each distinct token is decoded once.

With 20 alternatives per token a long reply lists tens of thousands of tokens, most of them again and again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from areal_agents.core.completion import Completion
from areal_agents.rendering import Tokenizer


class TokenTexts:
    """The texts of single tokens, for one answer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}

    def text(self, token_id: int) -> str:
        """A token's text; that of a part of a character is a replacement character."""
        return self._of(token_id)[0]

    def entries(self, completion: Completion) -> list[dict[str, Any]]:
        """[C] an entry per sampled token: `token`, `logprob`, `bytes`, and `top_logprobs`, which has an
        entry for each alternative where they were asked for."""
        best = completion.top_logprobs or ((),) * len(completion)
        ids, values = completion.token_ids.tolist(), completion.logprobs.tolist()
        for token_id in {*ids, *(token_id for pairs in best for token_id, _ in pairs)}:
            self._of(token_id)
        return [
            self._entries([(token_id, logprob)])[0] | {"top_logprobs": self._entries(pairs)}
            for token_id, logprob, pairs in zip(ids, values, best, strict=True)
        ]

    def _entries(self, pairs: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
        known = self._known
        return [
            {"token": (token := known[token_id])[0], "logprob": logprob, "bytes": token[1]}
            for token_id, logprob in pairs
        ]

    def _of(self, token_id: int) -> tuple[str, list[int]]:
        known = self._known.get(token_id)
        if known is None:
            text = self._tokenizer.decode([token_id])
            known = self._known[token_id] = (text, list(text.encode()))
        return known
