"""Encodes text with the `fastokens` library, where it returns the ids of the `tokenizers` library.

`fastokens` encodes several times as fast, and other threads run meanwhile. It is used only for byte-level
byte-pair encodings whose parts are known to be read alike by both libraries (`is_supported`), and only for
strings on which they agree: for any other string `encode` returns None, and `tokenizers` has to encode it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fastokens
import tokenizers

# The regular expression that splits text may consist of these alternatives; tests compare the libraries on
# each of them. An alternative comes before the shorter ones that it begins with.
_SHORT_FORMS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
ALTERNATIVES = (
    _SHORT_FORMS,
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT_FORMS}?",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT_FORMS}?",
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    r"\p{L}+",
    r"\p{N}{1,3}",
    r"\p{N}",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    r"[^\s\p{L}\p{N}]+",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
    r"\s",
    r"\n",
    " ",
)

SAMPLE = """\
def pairs(rows: list[int]) -> dict[str, float]:
\t\"\"\"It's what they've said; WE'LL see, I'd say 'S 'RE.\"\"\"
    return {f"{row:03d}": row / 1_000.25e-7 for row in rows if row != 12345678 and row >= 0x7F}


\t\t  #  runs   of    spaces      and \t tabs,\u00a0no-break\u2003em\u3000wide  \r\n\r\n   trailing   \n\n\n\n
{"name": "search", "arguments": {"query": "pre-1990 \\"papers\\"", "k": 10, "tags": [null, true, -1.5e3]}}
<tool_response>\nHTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n</tool_response><|im_end|>
Größe, naïve, Ærøskøbing, İstanbul, ſtraße, ΑΒΓ άλφα, Привет мир, שלום, مرحبا ١٢٣, नमस्ते दुनिया, ไทย, ½ ² Ⅷ ㊿
日本語のテキスト、漢字かな交じり文。한국어 문장입니다 中文字符，标点符号！ ＡＢＣ１２３
cafe\u0301 e\u0323\u0301 \u1100\u1161 \u212b \u2126 'ſ 'K ﬁ ﬀ
\u200b\u200d\ufeff\u2028\u2029\u0085\u180e\x00\x1f\x7f
👩‍👩‍👧‍👦 🇩🇪 ❤️ 🤷🏽‍♀️ 😀😀😀 \U0002a6d6
𝔘𝔫𝔦 𐐷
$$$ *** ==== //// ---- !!?! ... (((([[[{{{<<<>>>}}}]]])))) &&||^^%%@@~~`` a1b2c3
camelCaseWords SCREAMING_SNAKE
"""

# The libraries' regular expressions disagree on whether U+180E is a space. Surrogates are not characters.
_DISAGREED = re.compile("[\u180e\ud800-\udfff]")


class FastEncoding:
    """Strings to ids and back. Safe to share between threads."""

    def __init__(self, library: fastokens.Tokenizer, added: Mapping[str, int]) -> None:
        """Wrap a tokenizer of the library.

        Args:
            added: the ids of the added tokens, by the strings that become one id wherever they occur.
        """
        self._library = library
        self._added = dict(added)
        longest_first = sorted(self._added, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if added else None

    def encode(self, text: str, *, mark: str = "") -> list[int] | None:
        """The ids of `text`, or None if the `tokenizers` library has to encode it.

        Args:
            mark: a string that hides the added tokens in which it occurs, and is removed before encoding.
        """
        if not text.isascii() and _DISAGREED.search(text) is not None:
            return None
        if not mark:
            return self._library.encode(text, add_special_tokens=False).ids
        parts = [text] if self._split is None else self._split.split(text)  # every second is an added token
        ids: list[int] = []
        for at, part in enumerate(parts):
            if at % 2:
                ids.append(self._added[part])
            elif part:
                ids += self._library.encode_ordinary(part.replace(mark, "")).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str | None:
        """The string of `token_ids`; None if one of them is no token."""
        try:
            return self._library.decode(token_ids, skip_special_tokens=False)
        except (ValueError, OverflowError, TypeError):
            return None


def is_supported(settings: Mapping[str, Any]) -> bool:
    """Whether both libraries are known to read all parts of a `tokenizer.json` alike."""
    return _is_byte_level_bpe(settings) and _are_plain(settings.get("added_tokens") or [])


def fast_encoding(file: Path, backend: tokenizers.Tokenizer) -> FastEncoding | None:
    """The fast equal of a tokenizer; None if the library lacks a part of it or encodes the sample otherwise.

    Args:
        file: a `tokenizer.json` that `is_supported`.
        backend: what the `tokenizers` library read from it.
    """
    try:
        library = fastokens.Tokenizer.from_file(str(file))
    except ValueError:
        return None
    added = {token.content: token_id for token_id, token in backend.get_added_tokens_decoder().items()}
    fast = FastEncoding(library, added)
    return fast if _agree(fast, backend) else None


def _is_byte_level_bpe(settings: Mapping[str, Any]) -> bool:
    """Whether all parts of a tokenizer are those of byte-level byte-pair encoding, with a known pattern."""
    model = settings.get("model") or {}
    options = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    return (
        model.get("type") == "BPE"
        and not any(model.get(option) for option in options)
        and (settings.get("normalizer") or {}).get("type") in (None, "NFC")
        and (settings.get("decoder") or {}).get("type") == "ByteLevel"
        and _splits_as_known(settings.get("pre_tokenizer"))
    )


def _splits_as_known(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    """Whether text is split by GPT-2's own pattern or by one of known alternatives, and mapped to bytes."""
    if pre_tokenizer is None:
        return False
    if pre_tokenizer["type"] == "ByteLevel":
        return _maps_bytes(pre_tokenizer, use_regex=True)
    parts = pre_tokenizer.get("pretokenizers")
    if pre_tokenizer["type"] != "Sequence" or parts is None or len(parts) != 2:
        return False
    split, byte_level = parts
    if split["type"] != "Split" or split.get("behavior") != "Isolated" or split.get("invert"):
        return False
    pattern = split["pattern"].get("Regex")
    return _maps_bytes(byte_level, use_regex=False) and pattern is not None and _is_known(pattern)


def _maps_bytes(part: Mapping[str, Any], *, use_regex: bool) -> bool:
    """Whether a part only writes bytes as letters. Older files name no `use_regex`."""
    plain = part["type"] == "ByteLevel" and part.get("add_prefix_space") is False
    return plain and part.get("use_regex", True) is use_regex


def _is_known(pattern: str) -> bool:
    """Whether a pattern is a list of known alternatives."""
    while pattern:
        known = [one for one in ALTERNATIVES if pattern == one or pattern.startswith(one + "|")]
        if not known:
            return False
        pattern = pattern[len(known[0]) + 1 :]
    return True


def _are_plain(tokens: Sequence[Mapping[str, Any]]) -> bool:
    """Whether each added token matches its own string alone."""
    if any(token.get(option) for token in tokens for option in ("lstrip", "rstrip", "single_word")):
        return False
    if any(token.get("normalized") and not token["content"].isascii() for token in tokens):
        return False
    contents = {token["content"] for token in tokens}
    return len(contents) == len({token["id"] for token in tokens}) == len(tokens) and "" not in contents


def _agree(fast: FastEncoding, backend: tokenizers.Tokenizer) -> bool:
    """Whether both libraries encode and decode the sample alike, as a whole and in parts."""
    for text in (SAMPLE, *SAMPLE.split("\n"), *SAMPLE.split(" ")):
        ids = backend.encode(text, add_special_tokens=False).ids
        if fast.encode(text) not in (None, ids):
            return False
        cut = ids[1:]  # may begin in the middle of a character
        if fast.decode(cut) != backend.decode(cut, skip_special_tokens=False):
            return False
    return True
