"""The place of a span in a trace, and how callers name theirs in the header traceparent (W3C Trace Context).

The place of an episode's span follows from its id, so that the processes that export its model calls agree on
it without telling one another, also after a restart.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TRACEPARENT = "traceparent"  # the header; in the metadata of an episode that of the request that opened it
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class SpanPlace:
    """The ids of a span.

    Attributes:
        trace_id: of 128 bits; span_id: of 64 bits; neither is 0.
        sampled: whether the trace is exported; None: not decided yet.
    """

    trace_id: int
    span_id: int
    sampled: bool | None = None


def parse_traceparent(header: str) -> SpanPlace | None:
    """Return the place that a caller names in the header; None if it is absent or invalid."""
    found = _TRACEPARENT.fullmatch(header.strip())
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5] is not None):
        return None
    trace_id, span_id = int(found[2], 16), int(found[3], 16)
    return SpanPlace(trace_id, span_id, bool(int(found[4], 16) & 1)) if trace_id and span_id else None


def opener_of(metadata: Mapping[str, Any]) -> SpanPlace | None:
    """Return the place of the span that opened an episode, from the episode's metadata; None without one."""
    header = metadata.get(TRACEPARENT)
    return parse_traceparent(header) if isinstance(header, str) else None


def episode_place(episode_id: str, opener: SpanPlace | None) -> SpanPlace:
    """Return the place of an episode's span, below `opener` or, for None, in a trace of its own."""
    digest = hashlib.sha256(f"areal-agents episode {episode_id}".encode()).digest()
    span_id = int.from_bytes(digest[:8], "big") or 1
    if opener is not None:
        return SpanPlace(opener.trace_id, span_id, opener.sampled)
    return SpanPlace(int.from_bytes(digest[8:24], "big") or 1, span_id)
