"""Exports spans to an OpenTelemetry collector; without one, nothing of OpenTelemetry is imported."""

from areal_agents.telemetry.config import TelemetryConfig
from areal_agents.telemetry.context import (
    TRACEPARENT,
    SpanContext,
    episode_context,
    opener_of,
    parse_traceparent,
)
from areal_agents.telemetry.starting import check, exporting

__all__ = [
    "TRACEPARENT",
    "SpanContext",
    "TelemetryConfig",
    "check",
    "episode_context",
    "exporting",
    "opener_of",
    "parse_traceparent",
]
