"""Decides which regular expressions constrained decoding enforces.

xgrammar reads ECMA-262 patterns, but it ignores lookaheads and anchors, reads an unknown escape as the letter
itself, and matches the raw text of a JSON string, in which quotes, backslashes and control characters are
escaped. A pattern that it would get wrong is refused. All other patterns are matched against the whole
string, which is stricter than the search that JSON Schema describes.
"""

from __future__ import annotations

import re

_MAX_REPETITION_IN_JSON = 128  # xgrammar refuses a larger count in a pattern of a JSON string
_MAX_EXPANDED_LENGTH = 2_000  # characters with repetitions written out; far above, xgrammar admits quotes
_MAX_GROUP_DEPTH = 32
_QUANTIFIER = re.compile(r"(?:[*+?]|\{(\d+)(?:,(\d*))?\})")
_GROUP = re.compile(r"\?(?::|P?<[A-Za-z_]\w*>)")
_GROUPS = {
    "?=": "a lookahead",
    "?!": "a lookahead",
    "?<=": "a lookbehind",
    "?<!": "a lookbehind",
}
_CLASSES = "dDwWs"
_CONTROLS = "nrtfv"
_CODES = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")


def unenforced_pattern(pattern: str, *, in_json: bool = True) -> str | None:
    """Describes the first construct of a pattern that would not be enforced; None if all of it is.

    Args:
        pattern: a regular expression.
        in_json: whether it describes a JSON string rather than the output itself.
    """
    reader = _PatternReader(pattern, in_json=in_json)
    try:
        reader.read()
    except _Unenforced as found:
        return f"{found} in the pattern {_shown(pattern)} is not supported"
    return None


class _Unenforced(Exception):
    """A construct that would not be enforced; the message names it."""


class _PatternReader:
    """Reads a pattern from left to right."""

    def __init__(self, pattern: str, *, in_json: bool) -> None:
        self._text = pattern
        self._in_json = in_json
        self._at = 0
        self._depth = 0
        self._sizes = [0]  # characters of the pattern and of each open group, with repetitions written out

    def read(self) -> None:
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == "^":
                self._anchor(self._text[: self._at], "|")
            elif char == "$":
                self._anchor(self._text[self._at + 1 :][::-1], "|")
            elif char == "(":
                self._group()
            elif char == ")":
                self._depth -= 1
                self._at += 1
                self._quantifier(self._sizes.pop() if len(self._sizes) > 1 else 0)
            elif char == "|":
                self._at += 1
            elif char == "[":
                self._class()
                self._quantifier()
            elif char in "*+?{}":
                raise _Unenforced(f"{char!r} at {self._at}")
            else:
                self._character(in_class=False, negated=False)
                self._quantifier()

    def _anchor(self, before: str, between: str) -> None:
        """Read an anchor, which is redundant at either end of the pattern or of a top-level alternative."""
        if self._depth or (before and not before.endswith(between)):
            raise _Unenforced(f"the anchor {self._text[self._at]!r} at {self._at}")
        self._at += 1

    def _group(self) -> None:
        self._depth += 1
        self._sizes.append(0)
        if self._depth > _MAX_GROUP_DEPTH:
            raise _Unenforced(f"a depth of more than {_MAX_GROUP_DEPTH} groups")
        self._at += 1
        if self._text[self._at : self._at + 1] != "?":
            return
        named = _GROUP.match(self._text, self._at)
        if named is None:
            rest = self._text[self._at :]
            kind = next(
                (name for start, name in _GROUPS.items() if rest.startswith(start)), "a group of the kind"
            )
            raise _Unenforced(f"{kind} '({rest[:3]}' at {self._at - 1}")
        self._at = named.end()

    def _class(self) -> None:
        self._at += 1
        negated = self._text[self._at : self._at + 1] == "^"
        self._at += negated
        if self._text[self._at : self._at + 1] == "]":
            raise _Unenforced(f"an empty class at {self._at}")
        while self._at < len(self._text) and self._text[self._at] != "]":
            self._character(in_class=True, negated=negated)
        self._at += 1

    def _character(self, *, in_class: bool, negated: bool) -> None:
        """Read a literal or an escape. In classes, xgrammar excludes what a JSON string escapes."""
        start = self._at
        char = self._text[start]
        self._at += 1
        if char == "\\":
            char = self._escape(start, negated=negated)
        if self._in_json and not in_class and char and (char in '"\\' or ord(char) < 32):
            raise _Unenforced(f"{char!r} at {start}, which a JSON string escapes,")

    def _escape(self, start: int, *, negated: bool) -> str:
        """The character that an escape represents; "" for a character class."""
        char = self._text[self._at : self._at + 1]
        self._at += 1
        if char == "S" or (char == "s" and negated):
            raise _Unenforced(f"'\\S' or a negated '\\s' at {start}, which would admit Unicode white space,")
        if char in _CLASSES and char:
            return ""
        if char in _CONTROLS and char:
            return "\n"
        code = _CODES.match(self._text, start + 1)
        if code is not None:
            self._at = code.end()
            number = int(next(digits for digits in code.groups() if digits), 16)
            if number > 0x10FFFF or 0xD800 <= number < 0xE000:
                raise _Unenforced(f"a code that is not a character at {start}")
            return chr(number)
        if not char or char.isalnum() or ord(char) > 127:
            raise _Unenforced(f"the escape '\\{char}' at {start}")
        return char

    def _quantifier(self, size: int = 1) -> None:
        """Read the quantifier, if any, after an item of `size` characters."""
        found = _QUANTIFIER.match(self._text, self._at)
        counts = [int(count[:6]) for count in found.groups() if count] if found is not None else []
        self._sizes[-1] += size * max([*counts, 1])
        if self._in_json and self._sizes[-1] > _MAX_EXPANDED_LENGTH:
            raise _Unenforced(f"a length of more than {_MAX_EXPANDED_LENGTH} characters")
        if found is None:
            return
        if self._in_json and any(count > _MAX_REPETITION_IN_JSON for count in counts):
            raise _Unenforced(f"a count above {_MAX_REPETITION_IN_JSON} at {self._at}")
        self._at = found.end()
        if self._text[self._at : self._at + 1] == "?":  # lazy: matches the same strings
            self._at += 1
        if _QUANTIFIER.match(self._text, self._at):
            raise _Unenforced(f"a quantifier of a quantifier at {self._at}")


def _shown(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 100 else pattern[:99] + "…")
