"""Rewards for short factual answers.

Both sides go through the same `normalise`, so a reward never depends on case, accents, spacing or the full
stop at the end, and never on anything else.
"""

from __future__ import annotations

import unicodedata


def exact_match(answer: str | None, expected: str) -> float:
    """1.0 if `answer` says exactly `expected` after `normalise`, else 0.0.

    `answer` may be None (the agent gave none), which scores 0. Raises ValueError if nothing of `expected`
    is left after normalisation: every empty answer would match it.
    """
    wanted = normalise(expected)
    if not wanted:
        raise ValueError(f"expected an answer with letters, digits or symbols, got {expected!r}")
    return float(answer is not None and normalise(answer) == wanted)


def normalise(text: str) -> str:
    """Case folded, accents removed, white space collapsed, punctuation trimmed from both ends.

    Punctuation inside stays ("America/Sao_Paulo", "1.008"), and so do symbols such as "+" and "$".
    """
    decomposed = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())
    plain = " ".join("".join(c for c in decomposed if not unicodedata.combining(c)).split())
    start, end = 0, len(plain)
    while start < end and _trimmed(plain[start]):
        start += 1
    while end > start and _trimmed(plain[end - 1]):
        end -= 1
    return plain[start:end]


def _trimmed(character: str) -> bool:
    return character.isspace() or unicodedata.category(character).startswith("P")
