"""Decides whether a process exports spans, and starts and ends the export."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from areal_agents.errors import ConfigError
from areal_agents.extras import install_command, require
from areal_agents.telemetry.config import TelemetryConfig

if TYPE_CHECKING:
    from areal_agents.telemetry.spans import Spans

_EXPORTER = "opentelemetry.exporter.otlp.proto.http"
_logger = logging.getLogger(__name__)


def check(config: TelemetryConfig) -> None:
    """Raise ConfigError if the configuration names a collector and OpenTelemetry is not installed."""
    if config.endpoint is not None:
        require(_EXPORTER, "telemetry.endpoint")


@contextmanager
def exporting(
    config: TelemetryConfig, process: str, *, run: str = "", environ: Mapping[str, str] = os.environ
) -> Iterator[Spans | None]:
    """Yield an object that exports the spans of this process; None if no export is requested.

    Args:
        process: the role of this process, such as "proxy".
        run: the name of the run, "" without one.

    Raises:
        ConfigError: the configuration names a collector and OpenTelemetry is not installed, or a variable of
            OpenTelemetry in the environment is invalid.
    """
    check(config)
    if not _is_requested(config, environ):
        yield None
        return
    if (reason := _obstacle(config, environ)) is not None:
        # The variables may be meant for other programs, so this is no error.
        _logger.warning("no spans are exported: %s", reason)
        yield None
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    from areal_agents.telemetry.spans import Spans

    endpoint = None if config.endpoint is None else f"{config.endpoint.rstrip('/')}/v1/traces"
    resource = {"areal_agents.process": process, **({"areal_agents.run": run} if run else {})}
    try:
        spans = Spans(OTLPSpanExporter(endpoint=endpoint), resource)
    except ValueError as error:
        raise ConfigError(f"the variables of OpenTelemetry (OTEL_…) cannot be used: {error}") from error
    try:
        yield spans
    finally:
        spans.close()


def _is_requested(config: TelemetryConfig, environ: Mapping[str, str]) -> bool:
    """Whether a collector is named and the environment does not switch the export off."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if "otlp" not in (environ.get("OTEL_TRACES_EXPORTER") or "otlp").split(","):
        return False
    named = (environ.get(f"OTEL_EXPORTER_OTLP_{signal}ENDPOINT") for signal in ("TRACES_", ""))
    return config.endpoint is not None or any(named)


def _obstacle(config: TelemetryConfig, environ: Mapping[str, str]) -> str | None:
    """Say why spans cannot be sent to the collector that the environment names; None if they can."""
    if not _is_installed():
        return f"OpenTelemetry is not installed: {install_command(_EXPORTER)}"
    known = [environ.get(f"OTEL_EXPORTER_OTLP_{signal}PROTOCOL") for signal in ("TRACES_", "")]
    protocol = next((one for one in known if one), "http/protobuf")
    if config.endpoint is None and protocol != "http/protobuf":
        return (
            f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol}, and only http/protobuf is supported; name an HTTP "
            "address of the collector in telemetry.endpoint"
        )
    return None


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec(_EXPORTER) is not None
    except ModuleNotFoundError:
        return False
