"""Limits the number of JSON values in a request body, before it is parsed.

The time to parse a document grows with the number of its values.
"""

from __future__ import annotations

import re

from areal_agents.errors import RequestError

_PART = 262_144  # bytes searched at a time, because a search holds the interpreter's lock
_COUNTED = (b",", b":", b"[", b"{")
_TO_QUOTE = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)  # the rest of a string, without its quote


def refuse_many_values(body: bytes | bytearray, most: int) -> None:
    """Raise RequestError 413 if a JSON document has more than `most` values and names.

    Every value but the first follows a comma, a colon or an opening bracket, and every name precedes a colon.
    The function therefore counts these characters outside of strings.
    """
    if len(body) < most:
        return
    parts = range(0, len(body), _PART)
    if sum(body.count(mark, start, start + _PART) for start in parts for mark in _COUNTED) < most:
        return
    count, start = 1, 0
    while start < len(body) and count <= most:
        part = min(start + _PART, len(body))
        quote = body.find(b'"', start, part)
        end = part if quote < 0 else quote
        count += sum(body.count(mark, start, end) for mark in _COUNTED)
        start = end if quote < 0 else _end_of_string(body, end + 1)
    if count > most:
        raise RequestError(
            f"the body has more than {most} JSON values; max_json_values of the proxy sets this limit",
            status=413,
            code="request_too_large",
        )


def _end_of_string(body: bytes | bytearray, start: int) -> int:
    """Return the index after the closing quote of the string whose content begins at `start`."""
    while start < len(body):
        found = _TO_QUOTE.match(body, start, start + _PART)
        assert found is not None
        if found.end() < len(body) and body[found.end()] == ord('"'):
            return found.end() + 1
        if found.end() == start:  # a backslash that nothing follows
            return len(body)
        start = found.end()
    return start
