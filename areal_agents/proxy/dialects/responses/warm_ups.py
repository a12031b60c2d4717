"""Responses that generate nothing (`generate: false`): input that a client sends ahead of its next response.

A warm-up is kept by its connection and is no turn: nothing is computed or recorded. A later request that
names it in previous_response_id is read as one that has its input before the request's own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from areal_agents.errors import RequestError, shown
from areal_agents.proxy.dialects import reading
from areal_agents.proxy.dialects.responses.answers import response
from areal_agents.proxy.dialects.responses.dialect import checked_fields
from areal_agents.proxy.dialects.turn_ids import new_turn_id

_NO_USAGE = {
    "input_tokens": 0,
    "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
    "output_tokens": 0,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 0,
}


@dataclass(frozen=True, slots=True)
class _Kept:
    """A warm-up with the input of those that it continues.

    Attributes:
        previous: the id of the response that they continue, which is never that of a warm-up; None: none.
        items: their input.
        size: the bytes of their requests together.
    """

    previous: Any
    items: Sequence[Any]
    size: int


class WarmUps:
    """The warm-ups of one connection; the oldest are forgotten when together they exceed `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: dict[str, _Kept] = {}
        self._size = 0  # of all of them

    def expanded(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return a request with the input of the warm-up that it continues, if it continues one."""
        continued = self._continued(body)
        if continued is None:
            return dict(body)
        items = [*continued.items, *_items(body.get("input"))]
        return {**body, "input": items, "previous_response_id": continued.previous}

    def add(self, body: Mapping[str, Any], size: int) -> list[bytes]:
        """Keep a warm-up of `size` bytes; return the events of its response, as JSON.

        Raises:
            RequestError: a field cannot be served, or the warm-up and those that it continues exceed
                `max_bytes`. The items of the input are checked later, with the request that continues it.
        """
        items = _items(body.get("input"))
        reading.within_depth(lambda: checked_fields(body))
        kept = _Kept(body.get("previous_response_id"), items, size)
        if (continued := self._continued(body)) is not None:
            kept = _Kept(continued.previous, [*continued.items, *items], continued.size + size)
        if kept.size > self._max_bytes:
            raise RequestError(
                f"input sent ahead must have at most {self._max_bytes} bytes together, got {kept.size}",
                status=413,
                code="request_too_large",
                param="input",
            )
        turn_id, now = new_turn_id(), time.time()
        begun = response(body, turn_id, now, "in_progress")
        ended = response(body, turn_id, now, "completed", usage=_NO_USAGE, completed_at=int(now))
        self._kept[begun["id"]] = kept
        self._size += kept.size
        while self._size > self._max_bytes:
            self._size -= self._kept.pop(next(iter(self._kept))).size
        events = (("created", begun), ("in_progress", begun), ("completed", ended))
        return [
            orjson.dumps({"type": f"response.{name}", "sequence_number": number, "response": content})
            for number, (name, content) in enumerate(events)
        ]

    def _continued(self, body: Mapping[str, Any]) -> _Kept | None:
        previous = body.get("previous_response_id")
        return self._kept.get(previous) if isinstance(previous, str) else None


def _items(given: Any) -> list[Any]:
    """Return the items of an input. Raises RequestError if it is neither a string nor a list."""
    if given is None:
        return []
    if not isinstance(given, str | list):
        raise RequestError(
            f"input must be a string or a list of items, got {shown(given)}",
            code="invalid_value",
            param="input",
        )
    return [{"role": "user", "content": given}] if isinstance(given, str) else given
