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
    """A warm-up. `previous` is the response that it continues, never another warm-up."""

    previous: Any
    items: Sequence[Any]
    size: int  # bytes


class WarmUps:
    """The warm-ups of one connection; the oldest are forgotten when together they exceed `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: dict[str, _Kept] = {}

    def expanded(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return a request with the input of the warm-up that it continues, if it continues one."""
        previous = body.get("previous_response_id")
        kept = self._kept.get(previous) if isinstance(previous, str) else None
        if kept is None:
            return dict(body)
        items = _items(body.get("input"))
        return {**body, "input": [*kept.items, *items], "previous_response_id": kept.previous}

    def add(self, body: Mapping[str, Any], size: int) -> list[bytes]:
        """Keep a warm-up of `size` bytes; return the events of its response, as JSON.

        Raises:
            RequestError: a field cannot be served. The items of the input are checked later, with the request
                that continues the warm-up.
        """
        items = _items(body.get("input"))
        reading.within_depth(lambda: checked_fields(body))
        whole = self.expanded({**body, "input": items})
        turn_id, now = new_turn_id(), time.time()
        begun = response(body, turn_id, now, "in_progress")
        ended = response(body, turn_id, now, "completed", usage=_NO_USAGE, completed_at=int(now))
        self._kept[begun["id"]] = _Kept(whole.get("previous_response_id"), whole["input"], size)
        while sum(kept.size for kept in self._kept.values()) > self._max_bytes:
            del self._kept[next(iter(self._kept))]
        events = (("created", begun), ("in_progress", begun), ("completed", ended))
        return [
            orjson.dumps({"type": f"response.{name}", "sequence_number": number, "response": content})
            for number, (name, content) in enumerate(events)
        ]


def _items(given: Any) -> list[Any]:
    if given is None:
        return []
    if not isinstance(given, str | list):
        raise RequestError(
            f"input must be a string or a list of items, got {shown(given)}",
            code="invalid_value",
            param="input",
        )
    return [{"role": "user", "content": given}] if isinstance(given, str) else given
