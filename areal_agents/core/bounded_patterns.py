"""Regular expressions that take a bounded time on any text, for text that comes from outside.

A pattern begins with literal characters, which are searched for in linear time. From each place where they
are, at most `LONGEST` characters are matched, and a pattern that could match those in very many ways is
refused, because its backtracking could take for ever.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from re import _constants as ops  # type: ignore[attr-defined]  # the parser of `re` is not public
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from areal_agents.errors import shown

LONGEST = 512  # characters of a match after the literal ones
FEWEST_LITERALS = 4  # characters with which a pattern must begin
_MOST_WAYS = 10_000  # ways in which a pattern may match one string
_MOST_MATCHES = 64  # in one text; further ones are not found
_SINGLE = (ops.LITERAL, ops.NOT_LITERAL, ops.ANY, ops.IN, ops.AT)
_REPEATS = (ops.MAX_REPEAT, ops.MIN_REPEAT, ops.POSSESSIVE_REPEAT)


class BoundedPattern:
    """A pattern whose matches are searched for in a bounded time.

    Raises:
        ValueError: the pattern is invalid, does not begin with enough literal characters, or could take long.
    """

    def __init__(self, pattern: str) -> None:
        try:
            self._pattern = re.compile(pattern)
            parsed = parser.parse(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"{shown(pattern)} is not a regular expression: {error}") from None
        if parsed.state.flags & ~re.UNICODE:
            raise ValueError(f"{shown(pattern)} has flags such as (?i), which are not supported")
        self._literal = _literal_start(parsed)
        if len(self._literal) < FEWEST_LITERALS:
            raise ValueError(
                f"{shown(pattern)} must begin with at least {FEWEST_LITERALS} literal characters, such as "
                f"the words before the text that changes; it begins with {self._literal!r}"
            )
        if _ways(parsed) > _MOST_WAYS:
            raise ValueError(
                f"{shown(pattern)} can match in too many ways, so that it could take very long: give "
                "repetitions a small maximum ([0-9a-f]{1,40}), make them possessive ([^;]*+), and do not "
                "repeat a repetition"
            )

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Iterate over the matches, as (start, end), without the literal characters that they begin with."""
        at = 0
        for _ in range(_MOST_MATCHES):
            start = text.find(self._literal, at)
            if start < 0:
                return
            at = after_literal = start + len(self._literal)
            if found := self._pattern.match(text, start, after_literal + LONGEST):
                at = found.end()
                yield after_literal, at


def _literal_start(parsed: Any) -> str:
    """Return the literal characters that a parsed pattern begins with."""
    characters = []
    for kind, value in parsed:
        if kind is not ops.LITERAL:
            break
        characters.append(chr(value))
    return "".join(characters)


def _ways(items: Any) -> int:
    """Return a bound on the ways in which a sequence can match, which bounds the work of backtracking."""
    ways = 1
    for kind, value in items:
        ways = min(ways * _ways_of(kind, value), _MOST_WAYS + 1)
    return ways


def _ways_of(kind: Any, value: Any) -> int:
    if kind in _SINGLE:
        return 1
    if kind is ops.BRANCH:
        return sum(_ways(alternative) for alternative in value[1])
    if kind is ops.SUBPATTERN and not (value[1] or value[2]):  # without flags
        return _ways(value[3])
    if kind is ops.ATOMIC_GROUP:
        return _once(_ways(value))
    if kind in _REPEATS:
        least, most, items = value
        ways = _ways_repeated(_ways(items), int(least), min(int(most), max(LONGEST, int(least))))
        return _once(ways) if kind is ops.POSSESSIVE_REPEAT else ways
    raise ValueError(
        "a pattern may have characters, classes, groups, alternatives and repetitions, but no "
        f"{str(kind).lower().replace('_', ' ')}: back references, lookarounds and flags are not supported"
    )


def _ways_repeated(ways: int, least: int, most: int) -> int:
    """Return the ways of `least` to `most` repetitions of what can match in `ways` ways."""
    if ways == 1:
        return most - least + 1
    total, each = 0, ways ** min(least, _MOST_WAYS.bit_length())
    for _ in range(least, most + 1):
        total += each
        if total > _MOST_WAYS:
            break
        each *= ways
    return min(total, _MOST_WAYS + 1)


def _once(ways: int) -> int:
    """Return the ways of what is never tried again once it has matched; what is too much stays too much."""
    return 1 if ways <= _MOST_WAYS else ways
