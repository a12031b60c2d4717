"""Distinguishes special tokens that content spells out from those that a template writes.

A prompt is rendered as text, or in pieces of text, before it is encoded, and the tokenizer cannot tell
`<|im_start|>` in a web page from `<|im_start|>` in the template. So content is marked before rendering: a
`MARK` is inserted into every special token that the content spells out, and at an end of the content where
the template's text could complete one. The tokenizer does not recognise a special token with a mark in it,
and removes the marks: see `Tokenizer.encode_rendered`. Invariant: removing the marks restores the text.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from areal_agents.errors import ConfigError, RenderingError

# A lone surrogate: no tokenizer encodes one, so no text that can be rendered contains it.
MARK = "\udc7f"
ESCAPED_MARK = "\\udc7f"  # the mark in JSON with only ASCII characters

# The size of each search and join, because both hold the interpreter's lock.
_PART = 65_536  # characters searched for tokens
_WINDOW = 1_048_576  # characters searched for the beginnings of tokens and for `ESCAPED_MARK`
_OVERLAP = len(ESCAPED_MARK) - 1  # characters after a window that are searched with it
_PIECES = 65_536  # strings joined
_TO_QUOTE = re.compile(r'(?:[^"\\]++|\\.)*+')  # within a string of JSON, up to where it ends
_ESCAPE = re.compile(r"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u....|\\.")  # of one character in it


class SpecialText:
    """Marks and counts the special tokens that content spells out. Immutable, so threads may share it."""

    def __init__(self, tokens: Iterable[str]) -> None:
        """`tokens` are the strings of the special tokens. ConfigError if one is a single character."""
        longest_first = sorted(set(tokens), key=lambda token: (-len(token), token))
        if longest_first and len(longest_first[-1]) < 2:
            raise ConfigError(
                f"the special token {longest_first[-1]!r} is a single character, which content may also "
                "contain; set proxy.special_tokens_in_content: parse"
            )
        self._longest = len(longest_first[0]) if longest_first else 0
        written = "|".join(map(re.escape, longest_first)) or r"(?!)"
        self._token = re.compile(written)
        self._any_token = re.compile(f"(?={written})")  # also those that overlap
        self._openings = tuple(sorted({token[:2] for token in longest_first}))
        self._first = frozenset(token[0] for token in longest_first)
        self._last = frozenset(token[-1] for token in longest_first)
        self._beginnings = frozenset(token[:i] for token in longest_first for i in range(1, len(token)))
        self._ends = frozenset(token[i:] for token in longest_first for i in range(1, len(token)))
        self._framed = frozenset(token[1:-1] for token in longest_first)

    def count(self, text: str) -> int:
        """The number of special tokens that a string spells out."""
        if not self._may_have_tokens(text):
            return 0
        count = end = 0
        for start in self._starts(text):
            if start >= end:
                found = self._token.match(text, start)
                assert found is not None
                count, end = count + 1, found.end()
        return count

    def count_json(self, text: str) -> int:
        """Do the same as `count` for the strings in a JSON document; a string that is not JSON is counted as
        a whole."""
        if not self._may_have_tokens(text) and "\\u" not in text:
            return 0
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return self.count(text)
        return sum(map(self.count, strings_in(value)))

    def mark(self, text: str) -> str:
        """The text with marks. RenderingError for a lone surrogate, which no tokenizer encodes."""
        if MARK in text:
            raise RenderingError("the text has a lone surrogate, which no tokenizer encodes")
        text = self._mark_tokens(text)
        if _has_any((ESCAPED_MARK,), text):
            text = text.replace(ESCAPED_MARK, ESCAPED_MARK[0] + MARK + ESCAPED_MARK[1:])
        return self._mark_ends(text)

    def mark_json(self, text: str) -> str:
        """Mark the strings in a JSON document.

        Parsing the result gives the marked value, and removing its marks restores the text. Text that is not
        JSON is marked as a whole.
        """
        try:
            json.loads(text)
        except (ValueError, RecursionError):  # not JSON, or nested too deeply to be parsed
            return self.mark(text)
        return self._mark_tokens(_joined(self._marked_literals(text)))

    def mark_value(self, value: Any) -> Any:
        """A JSON value with all its strings and names marked; the same object if no mark is needed."""
        if isinstance(value, str):
            return self.mark(value)
        if isinstance(value, list | tuple):
            items = [self.mark_value(item) for item in value]
            return value if all(map(_is, items, value)) else items
        if isinstance(value, Mapping):
            pairs = [(self.mark(name), self.mark_value(item)) for name, item in value.items()]
            same = all(n is m and i is j for (n, i), (m, j) in zip(pairs, value.items(), strict=True))
            return value if same else dict(pairs)
        return value

    def _mark_tokens(self, text: str) -> str:
        """Insert a mark after the first character of every special token in the text."""
        if not self._may_have_tokens(text):
            return text
        return _with_marks(text, (start + 1 for start in self._starts(text)))

    def _mark_ends(self, text: str) -> str:
        """Insert marks where the text before or after the content could complete a special token.

        Templates strip content, so the ends are those of the stripped content. A word inside a special token
        is marked only if a single character surrounds it on each side: templates write `<{{ key }}>`, but
        they also look for `name` and `object`, which must not contain a mark.
        """
        start, end = _without_space(text)
        if start == end or not self._longest:
            return text
        head = text[start : min(end, start + self._longest - 1)]
        tail = text[max(start, end - self._longest + 1) : end]
        inside = end - start < self._longest and text[start:end] in self._framed
        if inside or self._ends_open(tail):
            text = text[:end] + MARK + text[end:]
        if inside or self._begins_closed(head):
            text = text[:start] + MARK + text[start:]
        return text

    def _ends_open(self, tail: str) -> bool:
        """Whether any suffix of the text is the beginning of a special token."""
        if self._first.isdisjoint(tail):
            return False
        return any(tail[i:] in self._beginnings for i in range(len(tail)))

    def _begins_closed(self, head: str) -> bool:
        """Whether any prefix of the text is the end of a special token."""
        if self._last.isdisjoint(head):
            return False
        return any(head[:i] in self._ends for i in range(1, len(head) + 1))

    def _marked_literals(self, text: str) -> Iterator[str]:
        """The parts of a JSON document in order: its strings, marked, and the text between them."""
        end = 0
        while (start := text.find('"', end)) >= 0:
            yield text[end:start]
            end = _literal_end(text, start)
            yield self._mark_literal(text[start:end])
        yield text[end:]

    def _mark_literal(self, literal: str) -> str:
        value = json.loads(literal, strict=False)
        marked = self.mark(value)
        if len(marked) == len(value):
            return literal
        if "\\" not in literal:
            return f'"{marked}"'
        return _with_marks(literal, _places_in_literal(literal, marked))

    def _may_have_tokens(self, text: str) -> bool:
        return _has_any(self._openings, text)

    def _starts(self, text: str) -> Iterator[int]:
        """The start positions of all special tokens in a text, overlapping ones too."""
        for part in range(0, len(text), _PART):
            end = part + _PART
            for found in self._any_token.finditer(text, part, end + self._longest - 1):
                if found.start() < end:
                    yield found.start()


def strings_in(value: Any) -> Iterator[str]:
    """Every string in a JSON value, including names, in no particular order."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            waiting += item
            waiting += item.values()
        elif isinstance(item, list | tuple):
            waiting += item


def _has_any(pieces: Sequence[str], text: str) -> bool:
    """Whether the text contains any of the pieces, which have at most `_OVERLAP` + 1 characters."""
    return any(
        text.find(piece, start, start + _WINDOW + _OVERLAP) >= 0
        for start in range(0, len(text), _WINDOW)
        for piece in pieces
    )


def _with_marks(text: str, places: Iterable[int]) -> str:
    """The text with a mark before each of the characters at these ascending indices."""

    def pieces() -> Iterator[str]:
        end = 0
        for place in places:
            yield text[end:place]
            yield MARK
            end = place
        yield text[end:]

    return _joined(pieces())


def _joined(pieces: Iterator[str]) -> str:
    """Join all pieces in several steps, because a join holds the interpreter's lock."""
    parts = []
    while some := list(itertools.islice(pieces, _PIECES)):
        parts.append("".join(some))
    return "".join(parts)


def _without_space(text: str) -> tuple[int, int]:
    """The start and end of the text without surrounding whitespace; the text is not copied."""
    start, end = 0, len(text)
    while start < end and (part := text[start : start + _PART]).isspace():
        start += len(part)
    if start == end:
        return end, end
    start += len(part) - len(part.lstrip())
    while (part := text[max(start, end - _PART) : end]).isspace():
        end -= len(part)
    return start, end - len(part) + len(part.rstrip())


def _literal_end(text: str, start: int) -> int:
    """The index after the string literal that begins at `start` in a JSON document."""
    at = start + 1
    while True:
        found = _TO_QUOTE.match(text, at, at + _PART)
        assert found is not None
        at = found.end()
        if text[at] == '"':
            return at + 1


def _places_in_literal(literal: str, marked: str) -> Iterator[int]:
    """The positions in a JSON string literal that correspond to the marks in its marked value."""
    place, done = 1, 0
    while (mark := marked.find(MARK, done)) >= 0:
        characters = mark - done
        while (escape := literal.find("\\", place, place + characters)) >= 0:
            found = _ESCAPE.match(literal, escape)
            assert found is not None
            characters -= escape - place + 1
            place = found.end()
        place += characters
        yield place
        done = mark + 1


def _is(one: Any, other: Any) -> bool:
    return one is other
