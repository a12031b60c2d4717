"""A lower bound on the number of tokens of a string, found without encoding the string.

A tokenizer that loses nothing puts each byte of the normalized string into exactly one token. If no token
holds more than m bytes of some class (ASCII letters, say, or the first bytes of four-byte characters), a
string with n bytes of that class has at least n / m tokens. The bound is the largest of these quotients.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers

_UNICODE_FORMS = {"NFC", "NFD", "NFKC", "NFKD"}
_PRE_TOKENIZERS = {"ByteLevel", "Metaspace", "Digits"}
_ALL_BYTES = 256
_SLICE = 65_536  # characters examined in one step; other threads run between two steps
_MOST_PATTERN = 16  # longest string, in characters, that a supported normalizer replaces or inserts
# A normalizer that is given slices instead of the whole string can differ in the characters around a cut. A
# composition joins at most four code points (Unicode's FAQ on normalization: no canonical decomposition is
# longer than that of U+1F82), and a replacement concerns at most `_MOST_PATTERN` characters of four bytes.
_UNSURE_BYTES = 4 * _MOST_PATTERN
# The same holds on both sides of an added token, where only a composition can differ.
_UNSURE_BYTES_AT_ADDED = 32


def _byte_classes() -> np.ndarray:
    """[256] the class of each byte in UTF-8."""
    classes = np.zeros(_ALL_BYTES, np.int64)
    for byte in range(_ALL_BYTES):
        letter = chr(byte)
        if byte < 0x80:
            classes[byte] = 0 if letter.isalpha() else 1 if letter.isdigit() else 2 if letter.isspace() else 3
        else:  # continuation bytes, then the first bytes of characters of two, three and four bytes
            classes[byte] = 4 if byte < 0xC0 else 5 if byte < 0xE0 else 6 if byte < 0xF0 else 7
    return classes


_CLASSES = _byte_classes()
_CLASS_COUNT = int(_CLASSES.max()) + 1


@dataclass(frozen=True)
class TokenBound:
    """Bounds the number of tokens of strings from below. Safe to share between threads.

    Attributes:
        most: [classes] the most bytes of each class in one token.
        normalizer: the tokenizer's normalizer; None if it has none.
        keeps_ascii: whether the normalizer leaves ASCII unchanged.
        space: what the pre-tokenizer writes in place of a space.
        added: matches the added tokens, which the tokenizer extracts before it normalizes; None if they need
            not be counted.
        unsure_bytes: by how many bytes of one class the normalized slices of a string can differ, per slice,
            from the same parts of the normalized string.
    """

    most: np.ndarray
    normalizer: Any
    keeps_ascii: bool
    space: str
    added: re.Pattern[str] | None
    unsure_bytes: int

    @classmethod
    def of(cls, settings: Mapping[str, Any], backend: tokenizers.Tokenizer) -> TokenBound | None:
        """The bound of a tokenizer; None for a tokenizer that may drop or join any number of bytes.

        Args:
            settings: the content of its `tokenizer.json`.
            backend: the tokenizer that was read from that file.
        """
        model, added = settings["model"], settings.get("added_tokens") or []
        normalizers = list(_parts(settings.get("normalizer"), "normalizers"))
        pre_tokenizers = list(_parts(settings.get("pre_tokenizer"), "pretokenizers"))
        is_byte_level = any(part["type"] == "ByteLevel" for part in pre_tokenizers)
        if (
            model.get("type") != "BPE"
            or is_byte_level == bool(model.get("byte_fallback"))
            or not _knows_all_bytes(model["vocab"], is_byte_level)
            or not all(map(_keeps_all_bytes, normalizers))
            or not all(map(_keeps_all_pieces, pre_tokenizers))
            or any(token.get("lstrip") or token.get("rstrip") for token in added)
            or any(model.get(option) for option in ("continuing_subword_prefix", "end_of_word_suffix"))
        ):
            return None
        spaces = [part["replacement"] for part in pre_tokenizers if part["type"] == "Metaspace"]
        contents = [token["content"] for token in added if token["content"]]
        normalizer = backend.normalizer
        if normalizer is not None:
            contents += [normalizer.normalize_str(content) for content in contents]
        tokens = [
            *(_bytes_of(token, is_byte_level) for token in model["vocab"]),
            *(content.encode() for content in contents),
        ]
        return cls(
            most=_most_of_each_class(tokens),
            normalizer=normalizer,
            keeps_ascii=all(part["type"] in _UNICODE_FORMS for part in normalizers),
            space=spaces[0] if spaces else " ",
            added=re.compile("|".join(map(re.escape, contents))) if contents and normalizers else None,
            unsure_bytes=_UNSURE_BYTES * len(normalizers),
        )

    def at_least(self, string: str, *, enough: int) -> int:
        """A lower bound on the number of tokens of `string`. Lone surrogates are not counted.

        Args:
            enough: once the bound exceeds this number, the rest of the string is not examined.
        """
        counts = np.zeros(_CLASS_COUNT, np.int64)
        bound = 0
        for start in range(0, len(string), _SLICE):
            counts += self._sure_bytes(string[start : start + _SLICE])
            bound = int((-(-counts // self.most)).max())
            if bound > enough:
                break
        return bound

    def _sure_bytes(self, part: str) -> np.ndarray:
        """[classes] the fewest bytes of each class that a slice of a string can have after normalization."""
        unsure = 0
        if self.normalizer is not None and not (self.keeps_ascii and part.isascii()):
            found = self.added.findall(part) if self.added is not None else ()
            unsure = self.unsure_bytes + _UNSURE_BYTES_AT_ADDED * len(found)
            part = self.normalizer.normalize_str(part.encode(errors="ignore").decode())
        data = part.replace(" ", self.space).encode(errors="ignore")
        counts = np.bincount(_CLASSES[np.frombuffer(data, np.uint8)], minlength=_CLASS_COUNT)
        return np.maximum(counts - unsure, 0)


def _parts(settings: Mapping[str, Any] | None, name: str) -> Iterable[Mapping[str, Any]]:
    """The members of a sequence of normalizers or pre-tokenizers, in order."""
    if settings is None:
        return
    if settings["type"] != "Sequence":
        yield settings
        return
    for part in settings[name]:
        yield from _parts(part, name)


def _keeps_all_bytes(normalizer: Mapping[str, Any]) -> bool:
    """Whether a normalizer drops nothing and can be applied to the slices of a string one by one."""
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"].get("String")
        return pattern is not None and max(len(pattern), len(normalizer["content"])) <= _MOST_PATTERN
    if normalizer["type"] == "Prepend":
        return len(normalizer["prepend"]) <= _MOST_PATTERN
    return normalizer["type"] in _UNICODE_FORMS


def _keeps_all_pieces(pre_tokenizer: Mapping[str, Any]) -> bool:
    if pre_tokenizer["type"] in ("Split", "Punctuation"):
        return pre_tokenizer.get("behavior") != "Removed"
    return pre_tokenizer["type"] in _PRE_TOKENIZERS


def _knows_all_bytes(vocab: Mapping[str, int], is_byte_level: bool) -> bool:
    """Whether no string needs an unknown token: there is a token for each byte."""
    if is_byte_level:
        return all(letter in vocab for letter in _BYTE_LETTERS)
    return all(f"<0x{byte:02X}>" in vocab for byte in range(_ALL_BYTES))


def _byte_letters() -> list[str]:
    """The letter of each byte in byte-level vocabularies: itself if printable, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(rest)) for byte in range(256)]


_BYTE_LETTERS = _byte_letters()
_LETTER_BYTES = str.maketrans({letter: chr(byte) for byte, letter in enumerate(_BYTE_LETTERS)})
_LETTER_SET = frozenset(_BYTE_LETTERS)
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


def _bytes_of(token: str, is_byte_level: bool) -> bytes:
    """The bytes of the normalized string that a token of the vocabulary represents."""
    if is_byte_level:
        return (
            token.translate(_LETTER_BYTES).encode("latin-1") if set(token) <= _LETTER_SET else token.encode()
        )
    byte = _BYTE_TOKEN.fullmatch(token)
    return token.encode() if byte is None else bytes([int(byte[1], 16)])


def _most_of_each_class(tokens: list[bytes]) -> np.ndarray:
    """[classes] the most bytes of each class in one token."""
    owners = np.repeat(np.arange(len(tokens)), [len(token) for token in tokens])
    classes = _CLASSES[np.frombuffer(b"".join(tokens), np.uint8)]
    counts = np.bincount(owners * _CLASS_COUNT + classes, minlength=len(tokens) * _CLASS_COUNT)
    return counts.reshape(-1, _CLASS_COUNT).max(axis=0)
