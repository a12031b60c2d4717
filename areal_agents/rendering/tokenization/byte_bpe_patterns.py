"""The regular expressions that cut a text before byte-pair encoding and on which two engines agree.

`tokenizers` and `tiktoken` use different regular expression engines. A pattern is accepted only if it
consists of the alternatives below, which tests compare on every character.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# An alternative comes before the shorter ones that it begins with.
ALTERNATIVES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    r"\p{L}+",
    r"\p{N}{1,3}",
    r"\p{N}",
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


# All spaces, each of which a pattern may name, and one character of every class that patterns name.
_SPACES = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
_CLASSES = "aAʰǅ字\u0301\u0903\u20dd1Ⅷ½$+^©_-(«!\x00\u200b\ue000\U0001f600\u0378"


def samples_of_classes() -> list[str]:
    """Every kind of character alone and before others; a pattern that matches all these matches any text."""
    return [one + then for one in _SPACES + _CLASSES for then in ("", "a", " ", "\n", "$")]


def split_pattern(pre_tokenizer: Mapping[str, Any] | None) -> str | None:
    """The pattern by which a `tokenizer.json` cuts texts into pieces; None if it is not a known one."""
    if pre_tokenizer is None:
        return None
    if pre_tokenizer["type"] == "ByteLevel":
        return _GPT2 if _maps_bytes(pre_tokenizer, use_regex=True) else None
    parts = pre_tokenizer.get("pretokenizers")
    if pre_tokenizer["type"] != "Sequence" or parts is None or len(parts) != 2:
        return None
    split, byte_level = parts
    if split["type"] != "Split" or split.get("behavior") != "Isolated" or split.get("invert"):
        return None
    if not _maps_bytes(byte_level, use_regex=False):
        return None
    pattern = split["pattern"].get("Regex")
    return pattern if pattern is not None and _is_known(pattern) else None


def _maps_bytes(part: Mapping[str, Any], *, use_regex: bool) -> bool:
    """Whether a part only writes bytes as letters. Older files do not set `use_regex`."""
    plain = part["type"] == "ByteLevel" and part.get("add_prefix_space") is False
    return plain and part.get("use_regex", True) is use_regex


def _is_known(pattern: str) -> bool:
    """Whether a pattern consists of known alternatives."""
    while pattern:
        known = [one for one in ALTERNATIVES if pattern == one or pattern.startswith(one + "|")]
        if not known:
            return False
        pattern = pattern[len(known[0]) + 1 :]
    return True
