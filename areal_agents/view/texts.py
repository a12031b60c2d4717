"""The text of each token of a sequence, so that the texts joined are what the model read and wrote."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from areal_agents.errors import ArealAgentsError
from areal_agents.rendering import Tokenizer

_CUT = "\ufffd"  # the bytes of a part of a character decode to this


class TokenTexts:
    """Turns ids into texts with the tokenizer of a model folder, which is read at the first use. Thread-safe.

    Attributes:
        problem: why there are no texts; None if there are, or before the first use.
    """

    def __init__(self, model: Path | None) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._tokenizer: Tokenizer | None = None
        self._known: dict[int, str] = {}
        self.problem: str | None = None

    def of(self, ids: Sequence[int]) -> list[str] | None:
        """Return the text of each token, or None if the tokenizer cannot be read.

        Tokens that only together are a character have their text at the first of them; the others have "".
        """
        with self._lock:
            tokenizer = self._opened()
        if tokenizer is None:
            return None
        texts = [self._single(tokenizer, token_id) for token_id in ids]
        start = 0
        while start < len(ids):
            if _CUT not in texts[start]:
                start += 1
                continue
            end = start + 1
            while end < len(ids) and _CUT in texts[end] and _CUT in tokenizer.decode(ids[start:end]):
                end += 1
            texts[start:end] = [tokenizer.decode(ids[start:end]), *[""] * (end - start - 1)]
            start = end
        return texts

    def _single(self, tokenizer: Tokenizer, token_id: int) -> str:
        text = self._known.get(token_id)
        if text is None:
            # Some decoders drop the space before the first token, so each is decoded behind another one.
            before = tokenizer.decode([token_id])
            both = tokenizer.decode([token_id, token_id])
            text = both[len(before) :] if both.startswith(before) else before
            self._known[token_id] = text
        return text

    def _opened(self) -> Tokenizer | None:
        if self._tokenizer is None and self.problem is None:
            if self._model is None:
                self.problem = "the store does not name its model; give it with --model"
            else:
                try:
                    self._tokenizer = Tokenizer.from_folder(self._model)
                except (ArealAgentsError, OSError, ValueError) as error:
                    self.problem = f"the tokenizer cannot be read: {error}; give the model with --model"
        return self._tokenizer
