"""Encodes marked text with the `tokenizers` library: only the template's special tokens become single ids.

The library finds either every special token of a string or none. Here each is renamed to a secret name, which
no content can spell out, and the unmarked special tokens of a marked text are replaced by these names. What
the content spells out is then ordinary text to the library, with the same neighbors, normalizer and merges.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator

import tokenizers

from areal_agents.errors import ConfigError
from areal_agents.rendering.special_text import MARK

_PART = 65_536  # characters searched at a time: a search holds the interpreter's lock


class MarkedLibrary:
    """Encodes marked strings. Stateless after construction, so threads may share it."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Copy a tokenizer with renamed special tokens; the two share the vocabulary.

        Raises:
            ConfigError: the copy encodes the template's special tokens differently, or its model turns
                ordinary text into a special token.
        """
        self._backend = tokenizers.Tokenizer(backend.model)
        if backend.normalizer is not None:
            self._backend.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            self._backend.pre_tokenizer = backend.pre_tokenizer
        added = sorted(backend.get_added_tokens_decoder().items())
        secret = secrets.token_hex(16)  # unknown to the author of any content
        self._names = {
            token.content: f"{secret}i{token_id}e" if token.special else token.content
            for token_id, token in added
        }
        for _, token in added:
            renamed = tokenizers.AddedToken(
                self._names[token.content],
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
            )
            self._backend.add_tokens([renamed])
        self._ids = {
            self._backend.token_to_id(self._names[token.content]): token_id for token_id, token in added
        }
        longest_first = sorted(self._names, key=len, reverse=True)
        self._longest = len(longest_first[0]) if longest_first else 0
        self._added = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._check(backend, {token_id: token.content for token_id, token in added if token.special})

    def encode(self, text: str) -> tokenizers.Encoding:
        """The encoding of a marked text without its marks, in the ids of `ids_of`."""
        named = "".join(self._pieces(text)).replace(MARK, "")
        return self._backend.encode_batch_fast([named], add_special_tokens=False)[0]

    def ids_of(self, encoding: tokenizers.Encoding) -> list[int]:
        """[N] the token ids of an encoding."""
        known = self._ids
        return [known.get(token_id, token_id) for token_id in encoding.ids]

    def _pieces(self, text: str) -> Iterator[str]:
        """The pieces of the text, with the names of its special tokens in their place."""
        start = 0
        while start < len(text):
            end = start + _PART
            found = self._added.search(text, start, end + self._longest)
            if found is None or found.start() >= end:
                yield text[start:end]
                start = end
            else:
                yield text[start : found.start()]
                yield self._names[found[0]]
                start = found.end()

    def _check(self, backend: tokenizers.Tokenizer, special: dict[int, str]) -> None:
        for token in special.values():
            for before, after in (("", ""), ("a", "b"), (" ", "\n")):
                plain = before + token + after
                written = self.ids_of(self.encode(plain))
                spelled = self.ids_of(self.encode(before + token[0] + MARK + token[1:] + after))
                same = written == backend.encode(plain, add_special_tokens=False).ids
                if not same or not special.keys().isdisjoint(spelled):
                    raise ConfigError(
                        f"this tokenizer cannot write its special token {token!r} as plain text; set "
                        "proxy.special_tokens_in_content: parse"
                    )
