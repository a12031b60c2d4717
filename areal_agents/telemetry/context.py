"""Span contexts, which identify spans, and the header traceparent that has one (W3C Trace Context).

The context of an episode's span is derived from the episode's id, so the processes that export its model
calls agree on it without communication, also after a restart.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# The header, and the key of an episode's metadata with the header of the request that opened the episode.
TRACEPARENT = "traceparent"
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class SpanContext:
    """The ids of a span and of its trace.

    Attributes:
        trace_id: an integer of 128 bits that is not 0.
        span_id: an integer of 64 bits that is not 0.
        sampled: whether the trace is exported; None: the sampler of this process decides.
    """

    trace_id: int
    span_id: int
    sampled: bool | None = None


def parse_traceparent(header: str) -> SpanContext | None:
    """Return the span context in the header; None if the header is empty or invalid."""
    found = _TRACEPARENT.fullmatch(header.strip())
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5] is not None):
        return None
    trace_id, span_id = int(found[2], 16), int(found[3], 16)
    return SpanContext(trace_id, span_id, bool(int(found[4], 16) & 1)) if trace_id and span_id else None


def opener_of(metadata: Mapping[str, Any]) -> SpanContext | None:
    """Return the context of the span that opened an episode, from the episode's metadata; None if absent."""
    header = metadata.get(TRACEPARENT)
    return parse_traceparent(header) if isinstance(header, str) else None


def episode_context(episode_id: str, opener: SpanContext | None) -> SpanContext:
    """Return the context of an episode's span: in the trace of `opener`, for None in a trace of its own."""
    digest = hashlib.sha256(f"areal-agents episode {episode_id}".encode()).digest()
    span_id = int.from_bytes(digest[:8], "big") or 1
    if opener is not None:
        return SpanContext(opener.trace_id, span_id, opener.sampled)
    return SpanContext(int.from_bytes(digest[8:24], "big") or 1, span_id)
