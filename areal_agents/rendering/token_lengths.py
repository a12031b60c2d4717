"""How much text one token of a tokenizer can stand for at most: what refuses a text before it is encoded.

The bound holds only for tokenizers that lose no character on the way from text to tokens, and is claimed for
no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Composition joins at most four code points to one: the full canonical decomposition of no character is
# longer (Unicode's FAQ on normalization: the greatest expansion in NFD is that of U+1F82).
_MOST_COMPOSED = 4
_COMPOSING = {"NFC", "NFKC"}
_KEEPING = {"NFD", "NFKD", "Prepend"}
_PRE_TOKENIZERS = {"ByteLevel", "Metaspace", "Digits"}
_ALL_BYTES = 256


def characters_per_token(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """The most characters of a text that one token stands for: of an ASCII text, and of any.

    None where there is no such bound: a normalizer, a pre-tokenizer, an added token or an unknown token may
    take up any number of characters.

    Args:
        settings: what a `tokenizer.json` holds.
    """
    model = settings["model"]
    composes = _composes(settings.get("normalizer"))
    added = settings.get("added_tokens") or []
    if (
        composes is None
        or not _keeps_all(settings.get("pre_tokenizer"))
        or model.get("type") != "BPE"
        or not _knows_all_bytes(model)
        or any(token.get("lstrip") or token.get("rstrip") for token in added)
        or any(model.get(option) for option in ("continuing_subword_prefix", "end_of_word_suffix"))
    ):
        return None
    longest = max(map(len, [*model["vocab"], *(token["content"] for token in added)]))
    return longest, longest * (_MOST_COMPOSED if composes else 1)


def _composes(normalizer: Mapping[str, Any] | None) -> bool | None:
    """Whether a normalizer joins characters; None if it may drop some."""
    if normalizer is None:
        return False
    kind = normalizer["type"]
    if kind == "Sequence":
        parts = [_composes(part) for part in normalizer["normalizers"]]
        return None if None in parts else any(parts)
    if kind == "Replace":
        pattern = normalizer["pattern"].get("String")
        return None if pattern is None or len(normalizer["content"]) < len(pattern) else False
    if kind in _COMPOSING:
        return True
    return False if kind in _KEEPING else None


def _keeps_all(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return True
    kind = pre_tokenizer["type"]
    if kind == "Sequence":
        return all(_keeps_all(part) for part in pre_tokenizer["pretokenizers"])
    if kind in ("Split", "Punctuation"):
        return pre_tokenizer.get("behavior") != "Removed"
    return kind in _PRE_TOKENIZERS


def _knows_all_bytes(model: Mapping[str, Any]) -> bool:
    """Whether no text needs an unknown token: a token for each byte, by its letter or by its number."""
    vocab = model["vocab"]
    if model.get("byte_fallback"):
        return all(f"<0x{byte:02X}>" in vocab for byte in range(_ALL_BYTES))
    letters = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = range(_ALL_BYTES, 2 * _ALL_BYTES - len(letters))
    return all(chr(letter) in vocab for letter in (*letters, *others))
