"""Writes spans with OpenTelemetry's SDK. A span is written as a whole, when it has ended.

This module is imported only if spans are exported.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Literal

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

from areal_agents.telemetry.context import SpanContext
from areal_agents.version import __version__

Value = str | bool | int | float | Sequence[str]

_CLOSE_S = 5.0  # longest wait for the last batch when a process ends
_logger = logging.getLogger(__name__)


class Spans:
    """Writes spans to an exporter. Thread-safe.

    A thread of the SDK sends spans in batches, so callers never wait for the collector. If the collector does
    not answer, the SDK logs this, and spans are lost.
    """

    def __init__(
        self, exporter: SpanExporter, resource: Mapping[str, str] | None = None, *, at_once: bool = False
    ) -> None:
        """Write spans to an exporter.

        Args:
            resource: attributes of this process. The service is areal-agents unless the environment names it.
            at_once: whether each span is exported at once by the thread that adds it, and not in batches.
        """
        own = dict(resource or {})
        if str(Resource.create().attributes["service.name"]).startswith("unknown_service"):
            own["service.name"] = "areal-agents"
        self._ids = _Ids()
        self._provider = TracerProvider(
            resource=Resource.create(own), id_generator=self._ids, shutdown_on_exit=False
        )
        self._provider.add_span_processor((SimpleSpanProcessor if at_once else BatchSpanProcessor)(exporter))
        self._tracer = self._provider.get_tracer("areal_agents", __version__)
        self._lock = threading.Lock()

    def add(
        self,
        name: str,
        *,
        start_s: float,
        end_s: float,
        attributes: Mapping[str, Value | None],
        kind: Literal["client", "internal"] = "internal",
        context: SpanContext | None = None,
        parent: SpanContext | None = None,
        links: Sequence[SpanContext] = (),
        error: str | None = None,
    ) -> SpanContext:
        """Write a span that has ended; return its context, for its children.

        Args:
            start_s, end_s: seconds since the epoch.
            attributes: those that are None are left out.
            context: gives the span its ids; None: new ids.
            parent: the context of the parent; None: the span is the root of its trace.
            links: the contexts of further spans that this one refers to.
            error: the description of the error with which the operation failed; None: it succeeded.
        """
        parent_context = None
        if parent is not None:
            parent_context = trace.set_span_in_context(trace.NonRecordingSpan(self._of_sdk(parent)))
        with self._lock:  # the generator of ids serves one span at a time
            self._ids.given = context
            span = self._tracer.start_span(
                name,
                context=parent_context,
                kind=trace.SpanKind[kind.upper()],
                attributes={key: value for key, value in attributes.items() if value is not None},
                links=[trace.Link(self._of_sdk(link)) for link in links],
                start_time=_nanoseconds(start_s),
            )
            self._ids.given = None
        if error is not None:
            span.set_status(trace.Status(trace.StatusCode.ERROR, error))
        span.end(_nanoseconds(max(start_s, end_s)))
        made = span.get_span_context()
        return SpanContext(made.trace_id, made.span_id, made.trace_flags.sampled)

    def close(self) -> None:
        """Send the remaining spans; wait a few seconds at most."""
        closing = threading.Thread(target=self._provider.shutdown, name="otel-shutdown", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)
        if closing.is_alive():
            _logger.warning("the collector did not take the last spans within %g s", _CLOSE_S)

    def _of_sdk(self, context: SpanContext) -> trace.SpanContext:
        """Return a context in the SDK's type; the sampler decides an undecided one as it decides a root."""
        sampled = context.sampled
        if sampled is None:
            found = self._provider.sampler.should_sample(None, context.trace_id, "")
            sampled = found.decision.is_sampled()
        flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if sampled else trace.TraceFlags.DEFAULT)
        return trace.SpanContext(context.trace_id, context.span_id, is_remote=True, trace_flags=flags)


class _Ids(RandomIdGenerator):
    """Gives a span the ids of `given` if it is set, else random ones."""

    given: SpanContext | None = None

    def generate_span_id(self) -> int:
        return super().generate_span_id() if self.given is None else self.given.span_id

    def generate_trace_id(self) -> int:
        return super().generate_trace_id() if self.given is None else self.given.trace_id


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
