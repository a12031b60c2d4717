"""Rewards for short factual answers.

Both the answer and the expected answer are passed through `normalise`, so differences in case, accents,
spacing and surrounding punctuation do not change a reward, and all other differences do.
"""

from __future__ import annotations

import unicodedata


def exact_match(answer: str | None, expected: str) -> float:
    """1.0 if `answer` equals `expected` after `normalise`, else 0.0.

    An `answer` of None (the agent gave none) scores 0. Raises ValueError if `expected` is empty after
    normalisation, because every empty answer would match it.
    """
    wanted = normalise(expected)
    if not wanted:
        raise ValueError(f"the expected answer must contain a letter, a digit or a symbol, got {expected!r}")
    return float(answer is not None and normalise(answer) == wanted)


def normalise(text: str) -> str:
    """Fold case, remove accents, collapse white space, and trim punctuation from both ends.

    Punctuation inside the text stays ("America/Sao_Paulo", "1.008"), and so do symbols such as "+" and "$".
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
