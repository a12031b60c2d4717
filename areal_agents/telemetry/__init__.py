"""Exports spans to an OpenTelemetry collector; without one, nothing of OpenTelemetry is imported."""

from areal_agents.telemetry.config import TelemetryConfig
from areal_agents.telemetry.places import (
    TRACEPARENT,
    SpanPlace,
    episode_place,
    opener_of,
    parse_traceparent,
)
from areal_agents.telemetry.starting import check, exporting

__all__ = [
    "TRACEPARENT",
    "SpanPlace",
    "TelemetryConfig",
    "check",
    "episode_place",
    "exporting",
    "opener_of",
    "parse_traceparent",
]
