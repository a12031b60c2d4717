"""Settings of the export of spans."""

from __future__ import annotations

from pydantic import Field

from areal_agents.core.settings import Settings


class TelemetryConfig(Settings):
    """Where spans of episodes, model calls and training steps are sent (OpenTelemetry; extra otel)."""

    endpoint: str | None = Field(
        default=None,
        pattern=r"^https?://",
        description="URL of a collector that takes OTLP over HTTP, such as http://127.0.0.1:4318; spans go "
        "to /v1/traces below it. Absent: as OTEL_EXPORTER_OTLP_ENDPOINT says, and without that no spans.",
    )
