"""Rewards for answers to questions.

Both the answer and the expected answer are passed through `normalise`, so differences in case, accents,
spacing and surrounding punctuation do not change a reward.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable

# A sign or a decimal point that a number begins with, and not the last of several, such as "...5".
_BEGINS_A_NUMBER = re.compile(r"(?<![-.])(?:-\.?|\.)\d")


def exact_match(answer: str | None, expected: str) -> float:
    """Return 1.0 if `answer` equals `expected` after `normalise`, else 0.0.

    An `answer` of None (the agent gave none) scores 0. Raises ValueError if `expected` is empty after
    normalisation, because every empty answer would match it.
    """
    wanted = normalise(expected)
    if not wanted:
        raise ValueError(f"the expected answer must contain a letter, a digit or a symbol, got {expected!r}")
    return float(answer is not None and normalise(answer) == wanted)


def f1(answer: str | None, expected: str) -> float:
    """Return the harmonic mean of the precision and the recall of the words of `answer`, from 0 to 1.

    It is the F1 of SQuAD (Rajpurkar et al. 2016, section 6.1): a word counts as often as it occurs in both.
    An `answer` of None scores 0. Raises ValueError if `expected` has no word.
    """
    wanted = Counter(normalise(word) for word in expected.split()) - Counter([""])
    if not wanted:
        raise ValueError(f"the expected answer must contain a letter, a digit or a symbol, got {expected!r}")
    given = Counter(normalise(word) for word in (answer or "").split())
    del given[""]
    common = (wanted & given).total()
    return 2 * common / (wanted.total() + given.total())


def best_of(score: Callable[[str | None, str], float], answer: str | None, expected: Iterable[str]) -> float:
    """Return the best score of an answer against several expected ones, such as aliases of a name.

    Raises ValueError if `expected` is empty, or a single string, whose letters would all be right answers.
    """
    if isinstance(expected, str):
        raise ValueError(f"expected must be a list of answers, got the string {expected!r:.200}")
    scores = [score(answer, one) for one in expected]
    if not scores:
        raise ValueError("there must be at least one expected answer")
    return max(scores)


def normalise(text: str) -> str:
    """Fold case, remove accents, collapse white space, and trim punctuation from both ends.

    Punctuation inside the text stays ("America/Sao_Paulo", "1.008"), and so do symbols such as "+" and "$",
    and the sign or the decimal point of a number ("-5", ".5").
    """
    decomposed = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())
    plain = " ".join("".join(c for c in decomposed if not unicodedata.combining(c)).split())
    plain = plain.replace("\N{MINUS SIGN}", "-")
    start, end = 0, len(plain)
    while start < end and _trimmed(plain[start]) and not _BEGINS_A_NUMBER.match(plain, start):
        start += 1
    while end > start and _trimmed(plain[end - 1]):
        end -= 1
    return plain[start:end]


def _trimmed(character: str) -> bool:
    return character.isspace() or unicodedata.category(character).startswith("P")
