"""Decodes token ids to text, and finds the stop string that ends a completion."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from areal_agents.errors import ConfigError


class Detokenizer:
    """The tokenizer of a model folder. Without one, text is empty and stop strings are refused."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        self._tokenizer: Tokenizer | None = None
        if path.is_file():
            try:
                self._tokenizer = Tokenizer.from_file(str(path))
            except Exception as error:  # the library raises bare Exception
                raise ConfigError(f"model: {path} cannot be read: {error}") from error

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer itself."""
        return self._tokenizer

    @property
    def available(self) -> bool:
        """Whether there is a tokenizer."""
        return self._tokenizer is not None

    def text(self, ids: np.ndarray, *, skip_special_tokens: bool = True) -> str:
        """The text of `ids` [N]."""
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=skip_special_tokens)

    def find_stop(self, ids: np.ndarray, stops: tuple[str, ...]) -> str | None:
        """Return the stop string in the text of `ids`, or None. Call it after every token.

        A new match then ends in the last token, so only as many tokens are decoded as the longest string can
        have; up to four of them make one character.
        """
        tail = ids[-(4 * max(map(len, stops)) + 16) :]
        text = self.text(tail)
        found = [(text.find(stop), stop) for stop in stops if stop in text]
        return min(found)[1] if found else None


class TextStream:
    """Decodes a growing output piece by piece; an incomplete character is held back until it is complete."""

    def __init__(self, detokenizer: Detokenizer, *, skip_special_tokens: bool) -> None:
        self._detokenizer = detokenizer
        self._skip_special_tokens = skip_special_tokens
        self._start = 0  # first id that the next text may depend on
        self._shown = 0  # number of ids whose text was returned
        self.length = 0  # number of characters returned

    def feed(self, ids: np.ndarray) -> str:
        """Return the text of the output `ids` [N] that was not returned before."""
        before, now = self._text(ids[self._start : self._shown]), self._text(ids[self._start :])
        if now.endswith("\ufffd") or len(now) <= len(before):
            return ""
        self._start, self._shown = self._shown, len(ids)
        self.length += len(now) - len(before)
        return now[len(before) :]

    def _text(self, ids: np.ndarray) -> str:
        return self._detokenizer.text(ids, skip_special_tokens=self._skip_special_tokens)
