"""Parses a request body that begins like an earlier one of its conversation: only what follows is parsed.

An agent sends its whole history with each call, and most clients write it with the same bytes each time. The
latest bodies are therefore kept up to the end of their messages. A later body with one of these beginnings is
parsed with one short string in place of the known messages. The result is the same as for the whole body.
"""

from __future__ import annotations

import itertools
import re
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from areal_agents.lru import LruCache
from areal_agents.proxy.dialects.replayed import BodyItems, History, MessageMemo

_FIELD = "messages"
_MOST_BYTES = 32 * 2**20  # of all beginnings that are kept
_LEAST_BYTES = 4096  # shorter bodies are parsed whole, in a few microseconds
_LONGEST = 4 * 2**20  # longer beginnings are not kept
_MOST_MARKS = 20_000  # strings and brackets that are searched for the end of the items
_MARK = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[\]{}]', re.DOTALL)
_NAME = b'"' + _FIELD.encode() + b'"'
_STAND_IN = secrets.token_hex(16)  # in place of the known items; no client can know it
_QUOTED = b'"' + _STAND_IN.encode() + b'"'
_QUOTE, _OPENING, _CLOSING_LIST = ord('"'), b"[{", ord("]")


@dataclass(frozen=True, slots=True)
class _Beginning:
    """A body up to the end of its last message.

    Attributes:
        data: the bytes. They grow in place, because replaced blocks of many sizes would scatter the memory.
        start: the index after the bracket that opens the list of messages.
    """

    data: bytearray
    start: int


class KnownBodies:
    """The beginnings of the latest bodies of all conversations, in at most 32 MiB.

    A `History` whose items were parsed from a body has the number of its beginning. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # long bodies are parsed in a thread
        self._beginnings: LruCache[int, _Beginning] = LruCache(_MOST_BYTES, lambda kept: len(kept.data))
        self._numbers = itertools.count()

    def parsed(self, body: bytes | bytearray, memo: MessageMemo) -> Any:
        """Return the JSON value in `body`.

        If it is an object with a list of messages, the list is a `BodyItems`, unless the body is short or
        the client writes its history with other bytes each time.

        Args:
            memo: the conversations with one of whose bodies this one may begin.

        Raises:
            orjson.JSONDecodeError: the body is not JSON.
        """
        if len(body) < _LEAST_BYTES:
            return orjson.loads(body)
        data = self._continued(body, memo)
        if data is not None:
            return data
        data = orjson.loads(body)
        items = data.get(_FIELD) if isinstance(data, dict) else None
        if isinstance(items, list) and items and memo.expects_known_bodies:
            start = _start_of_items(body)
            end = None if start is None else _end_of_items(body, start, items)
            number = None
            if start is not None and end is not None and end <= _LONGEST:
                # A later field of the same name replaces the list that was found.
                is_list = _shortened(body, start, end)[_FIELD] == [_STAND_IN]
                number = self._keep(_Beginning(bytearray(body[:end]), start)) if is_list else None
            data[_FIELD] = BodyItems(items, number)
        return data

    def _continued(self, body: bytes | bytearray, memo: MessageMemo) -> Any:
        """Return the JSON object in a body with a known beginning, None if it must be parsed whole."""
        taken = self._taken(body, memo)
        if taken is None:
            return None
        known, history = taken
        end = len(known.data)
        try:
            data = _shortened(body, known.start, end)
        except orjson.JSONDecodeError:  # which names a place in the short body
            return None
        items = data[_FIELD]
        # A later field of the same name would replace the list with the known items.
        if not isinstance(items, list) or not items or items[0] != _STAND_IN:
            return None
        new_end = _end_of_items(body, end, items[1:])
        items[:1] = history.raw_items()
        number = None
        if new_end is not None and new_end <= _LONGEST:
            known.data.extend(body[end:new_end])
            number = self._keep(known)
        data[_FIELD] = BodyItems(items, number, history)
        return data

    def _taken(self, body: bytes | bytearray, memo: MessageMemo) -> tuple[_Beginning, History] | None:
        """Remove the longest kept beginning of `body`, and return it with its history; None without one.

        It grows with this body, so that it no longer belongs to the history that it belonged to.
        """
        best: tuple[_Beginning, History] | None = None
        with self._lock:
            for history in memo.histories:
                known = None if history.body is None else self._beginnings.get(history.body)
                if known is None or len(known.data) >= len(body) or not body.startswith(known.data):
                    continue
                if best is None or len(known.data) > len(best[0].data):
                    best = known, history
            if best is not None:
                number = best[1].body
                assert number is not None
                self._beginnings.remove(number)
        return best

    def _keep(self, beginning: _Beginning) -> int:
        """Keep the beginning of a body, and return its number."""
        with self._lock:
            number = next(self._numbers)
            self._beginnings.put(number, beginning)
        return number


def _shortened(body: bytes | bytearray, start: int, end: int) -> Any:
    """Return the JSON value in a body with the stand-in in place of the items between two indices."""
    with memoryview(body) as view:
        return orjson.loads(b"".join((view[:start], _QUOTED, view[end:])))


def _start_of_items(body: bytes | bytearray) -> int | None:
    """Return the index after the bracket that opens the list of messages, None if it is not found."""
    depth, name_end = 0, None
    for count, mark in enumerate(_MARK.finditer(body)):
        if count > _MOST_MARKS:
            return None
        first = body[mark.start()]
        if first == _QUOTE:
            name_end = mark.end() if depth == 1 and mark[0] == _NAME else None
            continue
        if first in _OPENING:
            depth += 1
            if depth == 2 and name_end is not None and body[name_end : mark.start()].strip() == b":":
                return mark.end() if first == _OPENING[0] else None
        else:
            depth -= 1
        name_end = None
    return None


def _end_of_items(body: bytes | bytearray, start: int, items: Sequence[Any]) -> int | None:
    """Return the index after the last of the objects `items` of a list, None if it is not found.

    Args:
        start: the index of the first object, or of the comma before it.
    """
    at = start + body.startswith(b",", start)
    try:
        written = orjson.dumps(items)[1:-1]
    except orjson.JSONEncodeError:  # nested too deeply to be written
        return None
    if body.startswith(written, at) and body[at + len(written)] == _CLOSING_LIST:  # as most clients write it
        return at + len(written)
    depth, found, end = 0, 0, start
    for number, mark in enumerate(_MARK.finditer(body, start)):
        first = body[mark.start()]
        if first == _QUOTE:
            if depth == 0:  # an item that is a string
                return None
        elif first in _OPENING:
            if depth == 0 and first == _OPENING[0]:  # an item that is a list
                return None
            depth += 1
        elif depth == 0:
            return end if found == len(items) else None
        else:
            depth -= 1
            if depth == 0:
                found, end = found + 1, mark.end()
        if number > _MOST_MARKS:
            return None
    return None
