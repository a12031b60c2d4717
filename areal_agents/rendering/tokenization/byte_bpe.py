"""Byte-level byte-pair encoding by `tiktoken`: the ids of the `tokenizers` library, several times as fast.

It is used only for a vocabulary on which the two provably agree (`proven_byte_bpe`), and only for texts on
which they agree: for any other text `encode` returns None, and the library has to encode it.

Why they agree: both merge the leftmost of the neighbouring pairs with the lowest rank first. The library
merges the pairs that are listed; tiktoken merges any pair whose joined bytes are a token, and takes a whole
piece that is a token without merging. Bytes that become one token merge in the same order whatever surrounds
them, so a token is always made of the same pair. The two are therefore equal if ids rise along the list of
merges and one of two conditions holds: merging the bytes of every token gives that token, so that its pair is
listed; or the library lists every split of every token and also takes a whole piece that is a token.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tiktoken
import tokenizers

from areal_agents.rendering.tokenization.byte_bpe_patterns import SAMPLE, samples_of_classes, split_pattern

_MAX_CHARACTERS = 500_000  # longer texts go to the library: the regex of tiktoken has limits of its own
_SURROGATE = re.compile("[\ud800-\udfff]")
_ALL_NORMAL = "\u0300"  # below it every character is in normal form C, whatever its neighbours


def _byte_letters() -> list[str]:
    """The letter that represents each byte: printable Latin-1 is itself, the rest starts at letter 256."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(rest)) for byte in range(256)]


BYTE_LETTERS = _byte_letters()  # by byte
_BYTES = {letter: byte for byte, letter in enumerate(BYTE_LETTERS)}


class ByteBpe:
    """Converts texts to ids and back. Stateless after construction, so threads may share it."""

    def __init__(self, encoding: tiktoken.Encoding, added: Mapping[str, int], *, composed: bool) -> None:
        """Wrap an encoding whose special tokens are `added`.

        Args:
            added: strings that become one id wherever they occur, the longest first.
            composed: whether the library normalizes texts to form C.
        """
        self._encoding = encoding
        self._added = dict(added)
        longest_first = sorted(self._added, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if added else None
        self._unsure = _unsure_characters() if composed else None
        # Characters that a pattern leaves unmatched are dropped here, but not by the library.
        self._drops_some = not all(self._gives_back(text) for text in samples_of_classes())

    def encode(self, text: str, *, mark: str = "") -> list[int] | None:
        """The ids of `text`, or None if the library has to encode it.

        Args:
            mark: a string that hides the added tokens in which it stands, and is removed before encoding.
        """
        plain = text.replace(mark, "") if mark else text
        if len(plain) > _MAX_CHARACTERS or not self._is_normal(plain):
            return None
        if not plain.isascii() and _SURROGATE.search(plain) is not None:
            return None
        parts = [text] if self._split is None else self._split.split(text)  # every second is an added token
        if mark:
            parts[::2] = [part.replace(mark, "") for part in parts[::2]]
        ids = self._encoding.encode_ordinary(parts[0])
        for token, part in zip(parts[1::2], parts[2::2], strict=True):
            ids.append(self._added[token])
            ids += self._encoding.encode_ordinary(part)
        return None if self._drops_some and self._encoding.decode_bytes(ids) != plain.encode() else ids

    def decode(self, token_ids: Sequence[int]) -> str | None:
        """The text of `token_ids`; None if one of them is not a token."""
        try:
            return self._encoding.decode_bytes(token_ids).decode("utf-8", errors="replace")
        except (KeyError, OverflowError):
            return None

    def _gives_back(self, text: str) -> bool:
        return self._encoding.decode_bytes(self._encoding.encode_ordinary(text)) == text.encode()

    def _is_normal(self, text: str) -> bool:
        """Whether normalization to form C leaves `text` unchanged in every version of Unicode."""
        if self._unsure is None or text.isascii() or max(text) < _ALL_NORMAL:
            return True
        return self._unsure.search(text) is None and unicodedata.is_normalized("NFC", text)


class Tables(NamedTuple):
    """The tables of an encoding.

    Attributes:
        pattern: the regular expression that cuts texts into pieces.
        composed: whether texts are normalized to form C first.
        takes_whole: whether a whole piece that is a token is taken without merging.
        added: the ids of added tokens by text.
        ranks: the ids of all other tokens by their bytes.
    """

    pattern: str
    composed: bool
    takes_whole: bool
    added: dict[str, int]
    ranks: dict[bytes, int]


def tables_of(data: Mapping[str, Any]) -> Tables | None:
    """The tables in the content of a `tokenizer.json`; None if it uses a feature that tiktoken lacks.

    Call it before the library reads the same file, because both need much memory for a moment.
    """
    pattern = split_pattern(data.get("pre_tokenizer"))
    normalizer = (data.get("normalizer") or {}).get("type")
    added = _added_tokens(data.get("added_tokens") or [])
    decodes_bytes = (data.get("decoder") or {}).get("type") == "ByteLevel"
    if pattern is None or normalizer not in (None, "NFC") or added is None or not decodes_bytes:
        return None
    ranks = _ranks(data["model"], added)
    takes_whole = bool(data["model"].get("ignore_merges"))
    return None if ranks is None else Tables(pattern, normalizer == "NFC", takes_whole, added, ranks)


def proven_byte_bpe(backend: tokenizers.Tokenizer, tables: Tables) -> ByteBpe | None:
    """The fast encoder that equals a tokenizer; None if it is not proven to be equal. Takes about a second.

    Args:
        backend: the library's tokenizer.
        tables: the tables of the same file. Their ranks are cleared.
    """
    model = backend.model
    tokens = ("".join(BYTE_LETTERS[byte] for byte in raw) for raw in tables.ranks)
    if not tables.takes_whole and any(len(model.tokenize(token)) != 1 for token in tokens):
        return None
    encoding = tiktoken.Encoding(
        "byte_bpe", pat_str=tables.pattern, mergeable_ranks=tables.ranks, special_tokens=tables.added
    )
    tables.ranks.clear()  # frees memory: the encoding has its own copy
    fast = ByteBpe(encoding, tables.added, composed=tables.composed)
    return fast if _agree(fast, backend) else None


def _added_tokens(tokens: Sequence[Mapping[str, Any]]) -> dict[str, int] | None:
    """The ids of added tokens by text; None if some are not plain strings found in a single search."""
    if any(token.get(option) for token in tokens for option in ("lstrip", "rstrip", "single_word")):
        return None
    if len({token.get("normalized") for token in tokens}) > 1:
        return None
    added = {token["content"]: token["id"] for token in tokens}
    # The library's decoder reads a string made only of the letters of bytes as those bytes.
    plain = all(text.isascii() or _raw(text) is None for text in added)
    normal = all(unicodedata.is_normalized("NFC", text) for text in added)
    unique = len(set(added.values())) == len(tokens)
    return added if plain and normal and unique and "" not in added else None


def _ranks(model: Mapping[str, Any], added: Mapping[str, int]) -> dict[bytes, int] | None:
    """The id of each token's bytes; None if merging by id could differ from the library's merging."""
    options = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    if model.get("type") != "BPE" or any(model.get(option) for option in options):
        return None
    ranks: dict[bytes, int] = {}
    for token, token_id in model["vocab"].items():
        if token in added:
            if added[token] != token_id:
                return None
            continue
        raw = _raw(token)
        if not raw:
            return None
        ranks[raw] = token_id
    if not all(bytes([byte]) in ranks for byte in range(256)):
        return None
    if set(ranks.values()) & set(added.values()):
        return None
    pairs = _pairs(model["merges"])
    if not _rises(pairs, ranks) or (model.get("ignore_merges") and not _is_every_split(pairs, ranks)):
        return None
    return ranks


def _pairs(merges: Sequence[Any]) -> list[tuple[str, str]]:
    """The merges as pairs; older files write each as one string with a space."""
    return [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in merges]  # type: ignore[misc]


def _rises(pairs: Sequence[tuple[str, str]], ranks: Mapping[bytes, int]) -> bool:
    """Whether all merges join tokens into tokens, and the ids of the results never fall along the list."""
    last = -1
    for pair in pairs:
        raws = [_raw(text) for text in (*pair, "".join(pair))]
        if any(raw not in ranks for raw in raws):
            return False
        rank = ranks[raws[-1]]  # type: ignore[index]
        if rank < last:
            return False
        last = rank
    return True


def _is_every_split(pairs: Sequence[tuple[str, str]], ranks: Mapping[bytes, int]) -> bool:
    """Whether the merges are all splits of all tokens into two tokens; `_rises` checks that each is one."""
    splits = sum(raw[:i] in ranks and raw[i:] in ranks for raw in ranks for i in range(1, len(raw)))
    return splits == len(set(pairs)) == len(pairs)


def _agree(fast: ByteBpe, backend: tokenizers.Tokenizer) -> bool:
    """Whether both encode and decode the sample equally, as a whole and in pieces."""
    for text in (SAMPLE, *SAMPLE.split("\n"), *SAMPLE.split(" ")):
        ids = backend.encode(text, add_special_tokens=False).ids
        if fast.encode(text) not in (None, ids):
            return False
        cut = ids[1:]  # may begin in the middle of a character
        if fast.decode(cut) != backend.decode(cut, skip_special_tokens=False):
            return False
    return True


def _raw(token: str) -> bytes | None:
    """The bytes that a token's letters represent; None if a letter represents none."""
    try:
        return bytes([_BYTES[letter] for letter in token])
    except KeyError:
        return None


def _unsure_characters() -> re.Pattern[str]:
    """Matches characters that a Unicode version after Python's may compose or reorder: the unassigned ones.

    Beyond the first plane, all characters match except emoji and Chinese characters, which nothing composes.
    """
    unassigned = [chr(c) for c in range(0x300, 0x10000) if unicodedata.category(chr(c)) == "Cn"]
    others = "\U00010000-\U0001efff\U0001fb00-\U0001ffff\U0002a6e0-\U0010ffff"
    return re.compile(f"[{re.escape(''.join(unassigned))}{others}]")
