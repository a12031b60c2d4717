"""What GET /metrics says of the engines: each replica as it is now, and what the pool did about losses."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from areal_agents.inference.pool import EnginePool

_COUNTERS = (
    ("failovers", "Calls that went on after their engine was lost or gave invalid answers."),
    ("continued", "Calls that went on after their engine had aborted them."),
    ("resubmitted_tokens", "Sampled tokens that were sent to an engine again, for the rest."),
    ("catch_ups", "Engines that were brought to the current version."),
)


class PoolMetrics(Collector):
    """Reads a pool whenever the metrics are asked for."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        """The families, in Prometheus' form."""
        gauges = [
            _gauge("running", "Calls of this process in the engine."),
            _gauge("healthy", "1 if it answered the last look."),
            _gauge("serving", "1 if it gets calls."),
            _gauge("version", "Policy version that it was last seen to serve, -1 before the first look."),
        ]
        for replica in self._pool.replicas:
            values = (replica.running, replica.is_healthy, replica.is_serving, replica.version)
            for gauge, value in zip(gauges, values, strict=True):
                gauge.add_metric([replica.name], float(value))
        yield from gauges
        for name, text in _COUNTERS:
            counter = CounterMetricFamily(f"areal_agents_engine_{name}", text)
            counter.add_metric([], float(getattr(self._pool.counts, name)))
            yield counter


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"areal_agents_engine_{name}", text, labels=["engine"])
