"""The Prometheus metrics of the proxy: counts of model calls, and the state of each engine.

The values of a label come from a small fixed set (dialects, statuses, reasons, codes, configured models).
Episode ids, keys and texts are never labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from areal_agents.core.trajectory import Turn
from areal_agents.inference.pool import EnginePool
from areal_agents.proxy.calls.record import CallRecord

CONTENT_TYPE = CONTENT_TYPE_LATEST
_DURATIONS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_LATEST_KEPT = 4096
_FIRST_PIECES_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Counts the calls of one app. Its `observe` is an `Observer`."""

    def __init__(
        self,
        *,
        waiting: Callable[[], int],
        running: Callable[[], int],
        open_episodes: Callable[[], int],
        pool: EnginePool | None = None,
    ) -> None:
        """Register the metrics. The callables and `pool` are evaluated whenever the metrics are read.

        Args:
            waiting: returns the number of calls in the queue.
            running: returns the number of calls in the engine.
            open_episodes: returns the number of episodes in memory.
            pool: the engines whose state is reported.
        """
        self._registry = CollectorRegistry()
        calls = self._counter("calls", "Model calls.", "dialect", "streamed", "status", "split")
        refusals = self._counter("refusals", "Model calls that were answered with an error.", "code")
        repeated = self._counter("repeated_calls", "Retries answered with an earlier sample.", "dialect")
        passed = self._counter("passed_through_calls", "Calls that an upstream answered.", "model", "status")
        sampled = self._counter("sampled_tokens", "Tokens that the policy sampled, by their use.", "use")
        forks = self._counter("forks", "Turns whose prompt does not continue a recorded turn.", "reason")
        duration = self._histogram(
            "call_duration_seconds", "Time from the request to the end of the answer.", _DURATIONS_S
        )
        first = self._histogram(
            "first_piece_seconds", "Time from the request to the first piece of a stream.", _FIRST_PIECES_S
        )
        self._prompt = self._counter("prompt_tokens", "Tokens of all prompts, reused ones included.")
        self._reused = self._counter(
            "reused_prompt_tokens", "Prompt tokens that were reused from recorded turns."
        )
        self._turns = self._counter("turns", "Turns that were recorded.")
        self._as_text = self._counter(
            "special_tokens_as_text", "Special tokens in content that were encoded as text."
        )
        self._as_first_seen = self._counter(
            "volatile_as_first_seen", "Texts named by proxy.volatile that were shown as first recorded."
        )
        self._version = Gauge(
            "areal_agents_policy_version",
            "Latest policy version that an engine was seen to serve.",
            registry=self._registry,
        )
        self._gauge("calls_waiting", "Calls that wait in the queue.", waiting)
        self._gauge("calls_running", "Calls that the engine is answering.", running)
        self._gauge("open_episodes", "Open episodes in memory.", open_episodes)
        if pool is not None:
            self._registry.register(PoolMetrics(pool))
        self._latest: dict[str, None] = {}  # ids of the latest counted turns, the oldest first
        # Cached, because looking up a metric by its labels costs more than counting.
        self._calls, self._refusals = cache(calls.labels), cache(refusals.labels)
        self._repeated, self._passed = cache(repeated.labels), cache(passed.labels)
        self._sampled, self._forks = cache(sampled.labels), cache(forks.labels)
        self._duration, self._first = cache(duration.labels), cache(first.labels)

    def observe(self, record: CallRecord) -> None:
        """Count a call that has ended."""
        status = f"{record.status // 100}xx"
        if record.code:
            self._refusals(record.code).inc()
        if record.upstream:
            self._passed(record.upstream, status).inc()
            return
        self._calls(record.dialect, "yes" if record.streamed else "no", status, record.split or "none").inc()
        self._duration(record.dialect).observe(record.duration_s)
        if record.first_piece_s is not None:
            self._first(record.dialect).observe(record.first_piece_s)
        if record.repeated:
            self._repeated(record.dialect).inc()
        elif record.turns and not self._is_known(record.turns[0]):
            self._prompt.inc(record.prompt_tokens)
            self._reused.inc(record.reused_tokens)
            for turn in record.turns:
                self._count(turn, record.split)

    def served_version(self, version: int) -> None:
        """Record the policy version that the engine serves."""
        self._version.set(version)

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format, whose media type is `CONTENT_TYPE`."""
        return generate_latest(self._registry)

    def _is_known(self, turn: Turn) -> bool:
        """Whether a turn was counted already; a retry that joined a running call has the same turns."""
        if turn.id in self._latest:
            return True
        self._latest[turn.id] = None
        if len(self._latest) > _LATEST_KEPT:
            del self._latest[next(iter(self._latest))]
        return False

    def _count(self, turn: Turn, split: str) -> None:
        self._turns.inc()
        self._as_text.inc(turn.special_tokens_as_text)
        self._as_first_seen.inc(turn.volatile_as_first_seen)
        use = "evaluation" if split != "train" else "constrained" if turn.constrained else "training"
        self._sampled(use).inc(len(turn.completion))
        if turn.forked_from is not None:
            self._forks(turn.forked_from.reason).inc()
        if len(turn.completion):
            self.served_version(int(turn.completion.versions[-1]))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"areal_agents_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        full = f"areal_agents_{name}"
        return Histogram(full, text, ("dialect",), buckets=buckets, registry=self._registry)

    def _gauge(self, name: str, text: str, value: Callable[[], int]) -> None:
        Gauge(f"areal_agents_{name}", text, registry=self._registry).set_function(value)


# How the values of several processes become one. All processes see the same engines: a version is the newest
# that one of them saw, and an engine counts as healthy, or as serving, if it does for all of them. All other
# values are added up.
_MERGED_BY: dict[str, Callable[[Iterable[float]], float]] = {
    "areal_agents_policy_version": max,
    "areal_agents_engine_version": max,
    "areal_agents_engine_healthy": min,
    "areal_agents_engine_serving": min,
}


def merged(expositions: Sequence[bytes]) -> bytes:
    """Return the metrics of several processes of one proxy as those of one, in Prometheus' text format."""
    families: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], list[float]]] = {}
    for exposition in expositions:
        for family in text_string_to_metric_families(exposition.decode()):
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            found = values.setdefault(family.name, {})
            for sample in family.samples:
                found.setdefault((sample.name, tuple(sample.labels.items())), []).append(sample.value)
    for name, family in families.items():
        merge = min if name.endswith("_created") else _MERGED_BY.get(name, sum)
        family.samples = [
            Sample(sample, dict(labels), float(merge(each)))
            for (sample, labels), each in values[name].items()
        ]
    return generate_latest(_Families(families.values()))


class _Families(CollectorRegistry):
    """A registry of metrics that are collected already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


_COUNTERS = (
    ("failovers", "Calls that continued on another engine after a loss or an invalid answer."),
    ("continued", "Calls that continued after their engine had aborted them."),
    ("resubmitted_tokens", "Sampled tokens that were sent to an engine again to continue a call."),
    ("catch_ups", "Engines that were updated to the current version."),
)


class PoolMetrics(Collector):
    """Reads a pool whenever the metrics are requested."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families."""
        gauges = [
            _gauge("running", "Calls of this proxy that the engine is answering."),
            _gauge("healthy", "1 if the engine answered the last health check of every worker, else 0."),
            _gauge("serving", "1 if every worker sends calls to the engine, else 0."),
            _gauge("version", "Policy version that the last health check found, -1 before the first one."),
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
