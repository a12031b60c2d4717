"""Server-sent events out of a byte stream, however the reads cut it: inside a line, or many events at once.

Invariant: what is held back is at most one unfinished event, of bounded size.
"""

from __future__ import annotations

from areal_agents.errors import EngineError

MAX_EVENT_BYTES = 64 * 1024 * 1024  # twice a cumulative chunk of 32k tokens with 20 top logprobs


class EventReader:
    """Collects the `data:` of each event; comments and other fields are skipped."""

    def __init__(self, limit: int = MAX_EVENT_BYTES) -> None:
        self._limit = limit
        self._rest = bytearray()  # the line that has not ended
        self._scanned = 0  # bytes of it that are known to hold no line end
        self._data: list[bytes] = []  # the event that has not ended
        self._held = 0  # its bytes

    def feed(self, received: bytes) -> list[bytes]:
        """The data of the events that `received` completes; EngineError for one larger than the limit."""
        self._rest += received
        events: list[bytes] = []
        start = 0
        while (end := self._rest.find(b"\n", max(start, self._scanned))) >= 0:
            with memoryview(self._rest) as view:
                line = bytes(view[start:end])
            start = end + 1
            self._take(line.removesuffix(b"\r"), events)
        del self._rest[:start]
        self._scanned = len(self._rest)
        if self._held + len(self._rest) > self._limit:
            raise EngineError(f"the engine streamed an event of more than {self._limit} bytes")
        return events

    def _take(self, line: bytes, events: list[bytes]) -> None:
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
            self._held += len(line)
        elif not line and self._data:
            events.append(b"\n".join(self._data))
            self._data, self._held = [], 0
