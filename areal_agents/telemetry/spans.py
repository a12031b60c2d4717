"""Writes spans with OpenTelemetry's SDK. A span is written when what it describes has ended.

This module is imported only if spans are exported.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Literal

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

from areal_agents.telemetry.places import SpanPlace

Value = str | bool | int | float | Sequence[str]

_CLOSE_S = 5.0  # longest wait for the last batch when a process ends
_logger = logging.getLogger(__name__)


class Spans:
    """Writes spans to an exporter. Thread-safe.

    Spans are sent in batches by a thread of the SDK, so nobody waits for a collector. If it does not answer,
    the SDK logs that, and spans are lost.
    """

    def __init__(
        self, exporter: SpanExporter, resource: Mapping[str, str] | None = None, *, at_once: bool = False
    ) -> None:
        """Write spans to an exporter; with `at_once` each when it has ended, for tests.

        Args:
            resource: attributes of this process. The service is areal-agents unless the environment names it.
        """
        own = dict(resource or {})
        if str(Resource.create().attributes["service.name"]).startswith("unknown_service"):
            own["service.name"] = "areal-agents"
        self._ids = _Ids()
        self._provider = TracerProvider(
            resource=Resource.create(own), id_generator=self._ids, shutdown_on_exit=False
        )
        self._provider.add_span_processor((SimpleSpanProcessor if at_once else BatchSpanProcessor)(exporter))
        self._tracer = self._provider.get_tracer("areal_agents", version("areal-agents"))
        self._lock = threading.Lock()

    def add(
        self,
        name: str,
        *,
        start_s: float,
        end_s: float,
        attributes: Mapping[str, Value | None],
        kind: Literal["client", "internal"] = "internal",
        place: SpanPlace | None = None,
        parent: SpanPlace | None = None,
        links: Sequence[SpanPlace] = (),
        error: str | None = None,
    ) -> SpanPlace:
        """Write a span that has ended; return its place, for its children.

        Args:
            start_s, end_s: seconds since the epoch.
            attributes: those that are None are left out.
            place: the ids of the span; None: new ones.
            error: a description, if what the span describes failed.
        """
        context = None
        if parent is not None:
            context = trace.set_span_in_context(trace.NonRecordingSpan(self._context(parent)))
        with self._lock:  # the ids are those of one span at a time
            self._ids.place = place
            span = self._tracer.start_span(
                name,
                context=context,
                kind=trace.SpanKind[kind.upper()],
                attributes={key: value for key, value in attributes.items() if value is not None},
                links=[trace.Link(self._context(link)) for link in links],
                start_time=_nanoseconds(start_s),
            )
            self._ids.place = None
        if error is not None:
            span.set_status(trace.Status(trace.StatusCode.ERROR, error))
        span.end(_nanoseconds(max(start_s, end_s)))
        made = span.get_span_context()
        return SpanPlace(made.trace_id, made.span_id, made.trace_flags.sampled)

    def close(self) -> None:
        """Send what is left, for a few seconds at most."""
        closing = threading.Thread(target=self._provider.shutdown, name="otel-shutdown", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)
        if closing.is_alive():
            _logger.warning("the collector did not take the last spans within %g s", _CLOSE_S)

    def _context(self, place: SpanPlace) -> trace.SpanContext:
        """Return a place as the SDK knows it; an undecided one is sampled as a root would be."""
        sampled = place.sampled
        if sampled is None:
            found = self._provider.sampler.should_sample(None, place.trace_id, "")
            sampled = found.decision.is_sampled()
        flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if sampled else trace.TraceFlags.DEFAULT)
        return trace.SpanContext(place.trace_id, place.span_id, is_remote=True, trace_flags=flags)


class _Ids(RandomIdGenerator):
    """Gives a span the ids of `place`, if that is set."""

    place: SpanPlace | None = None

    def generate_span_id(self) -> int:
        return super().generate_span_id() if self.place is None else self.place.span_id

    def generate_trace_id(self) -> int:
        return super().generate_trace_id() if self.place is None else self.place.trace_id


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
