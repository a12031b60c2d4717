"""The tokenizer of a model folder, read directly from its `tokenizer.json`.

It has the interface that the `renderers` library expects of a tokenizer, so a process that only renders needs
neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from areal_agents.errors import ConfigError, PromptTooLong, RenderingError
from areal_agents.model_folder import read_object
from areal_agents.rendering.special_text import ESCAPED_MARK, MARK
from areal_agents.rendering.tokenization.fast_encoding import FastEncoding, fast_encoding, is_supported
from areal_agents.rendering.tokenization.marked_library import MarkedLibrary
from areal_agents.rendering.tokenization.token_bounds import TokenBound

_LONG = 20_000  # characters; longer strings are encoded without the interpreter's lock
_ALWAYS_COUNTED = 50_000  # characters; prompts up to this length are always encoded and counted


class Tokenizer:
    """A byte-exact wrapper of `tokenizers.Tokenizer`. Safe to share between threads.

    Attributes:
        name_or_path: the folder it was read from.
        eos_token_id, pad_token_id, unk_token_id: None if the folder names no such token.
        vocab_size: one more than the largest token id, including added tokens.
        added_token_ids: tokens that no merge crosses: the text before and after one is encoded separately.
        special_token_ids: the added tokens that are marked special: ends of turns, headers, padding.
        special_tokens: the special tokens in the folder's settings, by role: `{"eos_token": "</s>", …}`.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        name_or_path: str,
        eos_token: str | None = None,
        pad_token: str | None = None,
        unk_token: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        fast: FastEncoding | None = None,
        bound: TokenBound | None = None,
    ) -> None:
        """Wrap the library's tokenizer.

        Args:
            special_tokens: see the attribute.
            tables: the tables of a faster encoding, which is used if it is proven to be equal.
            bound: a lower bound on the number of tokens of a string; None if the tokenizer has none.
        """
        self._backend = backend
        # A folder's truncation or padding settings would silently cut or pad prompts.
        backend.no_truncation()
        backend.no_padding()
        self._fast = fast
        self._marked: MarkedLibrary | None = None
        self._bound = bound
        self._limit = threading.local()
        self.name_or_path = name_or_path
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        added = backend.get_added_tokens_decoder()
        self.added_token_ids = frozenset(added)
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        # If True, the normalizer may turn other text, which has no marks, into a special token.
        self._finds_normalized = backend.normalizer is not None and any(
            token.special and token.normalized for token in added.values()
        )
        self.special_tokens = dict(special_tokens or {})
        self.eos_token_id = self._id(eos_token)
        self.pad_token_id = self._id(pad_token)
        self.unk_token_id = self._id(unk_token)

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Read a model folder. ConfigError if it has no readable `tokenizer.json`."""
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"{folder} is not a model folder: it has no tokenizer.json")
        try:
            settings = json.loads(file.read_text(encoding="utf-8"))
            backend = tokenizers.Tokenizer.from_file(str(file))
            bound = TokenBound.of(settings, backend)
            has_fast = is_supported(settings)
            del settings  # large: freed before the next library takes its memory
            fast = fast_encoding(file, backend) if has_fast else None
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{file} cannot be read as a tokenizer: {error}") from error
        names = _special_tokens(folder)
        known = {key: names.get(key) for key in ("eos_token", "pad_token", "unk_token")}
        return cls(
            backend,
            name_or_path=str(folder),
            special_tokens=names,
            fast=fast,
            bound=bound,
            **known,
        )

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The token ids of `text`; special tokens spelled out in it become their single ids.

        Raises:
            PromptTooLong: within `limited`, the texts encoded so far cannot fit the limit together.
            RenderingError: the library failed on the text.
        """
        self._refuse_too_long(text)
        if self._fast is not None and not add_special_tokens:
            ids = self._fast.encode(text)
            if ids is not None:
                return ids
        if len(text) < _LONG:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        encoding = _encoded(
            # Unlike `encode`, this releases the interpreter's lock, and it omits the offsets.
            lambda: self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        )
        self._refuse_too_many(len(encoding))
        return encoding.ids

    def encode_rendered(self, text: str) -> list[int]:
        """The token ids of a rendered text: as `encode`, but special tokens that contain a mark stay text.

        The content must have been marked by `SpecialText`. Raises the same errors as `encode`.
        """
        if MARK not in text and ESCAPED_MARK not in text and not self._finds_normalized:
            return self.encode(text)
        text = text.replace(ESCAPED_MARK, MARK)
        self._refuse_too_long(text)
        if self._fast is not None and not self._finds_normalized:
            ids = self._fast.encode(text, mark=MARK)
            if ids is not None:
                return ids
        library = self._marked_library()
        encoding = _encoded(lambda: library.encode(text))
        self._refuse_too_many(len(encoding))
        return library.ids_of(encoding)

    def check_marks(self) -> None:
        """ConfigError unless this tokenizer can encode its special tokens as text."""
        self._marked_library()

    @contextlib.contextmanager
    def limited(self, tokens: int) -> Iterator[None]:
        """Within the with-block, refuse texts of this thread that together cannot fit in `tokens` tokens.

        If the tokenizer has no `TokenBound`, or the strings are short, they are encoded and the caller counts
        their tokens.
        """
        # A limit per thread, because the formats of the `renderers` library pass only a string to `encode`.
        self._limit.tokens, self._limit.at_least = tokens, 0
        self._limit.characters, self._limit.short = 0, []
        try:
            yield
        finally:
            self._limit.tokens = None
            self._limit.short = []

    def _marked_library(self) -> MarkedLibrary:
        if self._marked is None:
            self._marked = MarkedLibrary(self._backend)
        return self._marked

    def _refuse_too_long(self, text: str) -> None:
        limit = self._limit
        tokens = getattr(limit, "tokens", None)
        if tokens is None or self._bound is None:
            return
        limit.characters += len(text)
        limit.short.append(text)
        if limit.characters <= _ALWAYS_COUNTED:
            return
        for part in limit.short:
            limit.at_least += self._bound.at_least(part, enough=tokens - limit.at_least)
            if limit.at_least > tokens:
                raise PromptTooLong(limit.at_least)
        limit.short = []

    def _refuse_too_many(self, count: int) -> None:
        tokens = getattr(self._limit, "tokens", None)
        if tokens is not None and count > max(tokens, _ALWAYS_COUNTED):
            raise PromptTooLong(count)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, **_: Any) -> str:
        """The exact text of `token_ids`, without clean-up of spaces."""
        if self._fast is not None and not skip_special_tokens:
            text = self._fast.decode(token_ids)
            if text is not None:
                return text
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The id of a token, or a list of ids; `unk_token_id` for a token that does not exist."""
        if isinstance(tokens, str):
            token_id = self._backend.token_to_id(tokens)
            return self.unk_token_id if token_id is None else token_id
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def added_token_id(self, text: str) -> int | None:
        """The id of an added token; None if `text` is not one and may be encoded as several tokens."""
        token_id = self._backend.token_to_id(text)
        return token_id if token_id in self.added_token_ids else None

    def token_text(self, token_id: int) -> str:
        """The text of an added token. ValueError if there is no such token."""
        text = self._backend.id_to_token(token_id)
        if text is None:
            raise ValueError(f"a token id must be from 0 to {self.vocab_size - 1}, got {token_id}")
        return text

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)


def _encoded(encode: Callable[[], tokenizers.Encoding]) -> tokenizers.Encoding:
    """The result of `encode`. RenderingError if the library panics, as it does on some long strings."""
    try:
        return encode()
    except BaseException as error:
        # The type cannot be imported, and it is not an Exception.
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise RenderingError(f"the tokenizer failed on a string: {error}") from None


def _special_tokens(folder: Path) -> dict[str, str]:
    """The special tokens by role. Older folders name them in special_tokens_map.json."""
    settings = {
        **read_object(folder / "special_tokens_map.json"),
        **read_object(folder / "tokenizer_config.json"),
    }
    texts = {key: _token_text(value) for key, value in settings.items() if key.endswith("_token")}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _token_text(value: Any) -> Any:
    """The text of a special token, which settings give as a string or as an object with a `content`."""
    return value.get("content") if isinstance(value, dict) else value
