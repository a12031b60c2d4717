"""The spans of episodes and model calls in OpenTelemetry's SDK, and their export to a collector."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import StatusCode

from areal_agents.errors import ConfigError
from areal_agents.proxy.traces import Traces
from areal_agents.rendering import ChatRenderer
from areal_agents.telemetry import SpanContext, TelemetryConfig, exporting, parse_traceparent
from areal_agents.telemetry.spans import Spans

sys.path.insert(0, str(Path(__file__).parents[1] / "proxy"))

from proxy_support import MODEL, RunningProxy, running_proxy  # noqa: E402
from scripted_sampler import ScriptedSampler  # noqa: E402

MESSAGES: list[Any] = [{"role": "user", "content": "Where is Lyon?"}]
TRACE, PARENT = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
HEADERS = {"traceparent": f"00-{TRACE:032x}-{PARENT:016x}-01"}


@dataclass
class Traced:
    """A proxy that writes spans to memory."""

    proxy: RunningProxy
    exporter: InMemorySpanExporter

    def spans(self) -> list[ReadableSpan]:
        """The spans since the last call of this method."""
        found = list(self.exporter.get_finished_spans())
        self.exporter.clear()
        return found

    def ask(self, episode: dict[str, Any] | None, **more: Any) -> Any:
        client = self.proxy.openai(episode)
        return client.chat.completions.create(model="my-model", messages=MESSAGES, **more)

    def finish(self, episode: dict[str, Any]) -> None:
        response = self.proxy.http.post(f"/episodes/{episode['id']}/finish", json={})
        assert response.status_code == 200, response.text


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    exporter = InMemorySpanExporter()
    engine = ScriptedSampler(ChatRenderer.from_folder(MODEL), version=3)
    traces = Traces(Spans(exporter, at_once=True), "my_agent")
    path = tmp_path_factory.mktemp("traced") / "store.db"
    with running_proxy(path, engine, traces=traces, implicit_split="train") as proxy:
        yield Traced(proxy, exporter)


def test_the_spans_of_calls_are_below_that_of_their_episode(traced: Traced) -> None:
    episode = traced.proxy.open_episode(task={"id": "t1", "input": {}}, split="eval")
    answers = [traced.ask(episode), traced.ask(episode, temperature=0.5, max_tokens=1)]
    traced.finish(episode)
    traced.finish(episode)  # the episode has already ended
    first, second, whole = traced.spans()
    assert [span.name for span in (first, second, whole)] == ["chat my-model"] * 2 + ["invoke_agent my_agent"]
    for span in (first, second, whole):
        assert span.context.trace_id == whole.context.trace_id
        assert span.attributes["gen_ai.conversation.id"] == episode["id"]
        assert span.attributes["areal_agents.task.id"] == "t1"
        assert span.start_time <= span.end_time <= whole.end_time
        known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
        assert {name for name in span.attributes if name.startswith("gen_ai.")} <= known
    assert whole.parent is None and whole.start_time <= first.start_time
    assert whole.attributes["areal_agents.episode.status"] == "finished"
    for span, answer in zip((first, second), answers, strict=True):
        assert span.parent.span_id == whole.context.span_id and not span.links
        assert span.attributes["gen_ai.response.id"] == answer.id
        assert span.attributes["gen_ai.usage.input_tokens"] == answer.usage.prompt_tokens
        assert span.attributes["gen_ai.usage.output_tokens"] == answer.usage.completion_tokens
        assert span.attributes["areal_agents.policy_version"] == 3
    assert first.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert second.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert second.attributes["gen_ai.request.temperature"] == 0.5
    assert not any(
        "Lyon" in str(value) for span in (first, second, whole) for value in span.attributes.values()
    )


def test_the_trace_of_a_caller_is_continued(traced: Traced) -> None:
    episode = traced.proxy.open_episode()
    traced.ask(episode, extra_headers=HEADERS)
    traced.ask(episode, extra_headers={"traceparent": "00-nonsense"})
    unsampled = HEADERS["traceparent"].removesuffix("01") + "00"
    traced.ask(episode, extra_headers={"traceparent": unsampled})  # its trace is not exported
    traced.finish(episode)
    called, own, whole = traced.spans()
    assert (called.context.trace_id, called.parent.span_id) == (TRACE, PARENT)
    assert [link.context.span_id for link in called.links] == [whole.context.span_id]
    assert own.parent.span_id == whole.context.span_id and own.context.trace_id != TRACE


def test_an_episode_is_below_the_span_that_opened_it(traced: Traced) -> None:
    response = traced.proxy.http.post("/episodes", json={"metadata": {"a": 1}}, headers=HEADERS)
    episode = response.json()
    traced.ask(episode)
    traced.finish(episode)
    call, whole = traced.spans()
    assert (whole.context.trace_id, whole.parent.span_id) == (TRACE, PARENT)
    assert (call.context.trace_id, call.parent.span_id) == (TRACE, whole.context.span_id)
    shown = traced.proxy.http.get(f"/episodes/{episode['id']}").json()
    assert shown["metadata"] == {"a": 1, **HEADERS}


def test_spans_show_failures_and_count_the_tokens_of_a_retry_once(traced: Traced) -> None:
    episode = traced.proxy.open_episode()
    with pytest.raises(APIStatusError):
        traced.ask(episode, temperature="hot")
    key = {"Idempotency-Key": "once"}
    for _ in range(2):
        traced.ask(episode, extra_headers=key)
    traced.proxy.http.post(f"/episodes/{episode['id']}/fail", json={"error": "no disk"})
    refused, first, repeated, whole = traced.spans()
    assert refused.status.status_code is StatusCode.ERROR and "temperature" in refused.status.description
    assert refused.attributes["error.type"] == "invalid_value"
    assert "gen_ai.usage.input_tokens" in first.attributes
    assert repeated.attributes["areal_agents.repeated"] is True
    assert "gen_ai.usage.input_tokens" not in repeated.attributes, "tokens count once"
    assert (whole.status.status_code, whole.status.description) == (StatusCode.ERROR, "no disk")


def test_calls_without_an_episode_key_have_spans_of_an_implicit_episode(traced: Traced) -> None:
    traced.proxy.openai(None).completions.create(model="my-model", prompt="Lyon is")
    (span,) = traced.spans()
    assert span.name == "text_completion my-model"
    assert span.attributes["gen_ai.conversation.id"].startswith("implicit-")


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (HEADERS["traceparent"], SpanContext(TRACE, PARENT, True)),
        (HEADERS["traceparent"].removesuffix("1") + "0", SpanContext(TRACE, PARENT, False)),
        ("cc" + HEADERS["traceparent"][2:] + "-more", SpanContext(TRACE, PARENT, True)),
        (HEADERS["traceparent"] + "-more", None),
        ("ff" + HEADERS["traceparent"][2:], None),
        (f"00-{0:032x}-{PARENT:016x}-01", None),
        (f"00-{TRACE:032x}-{0:016x}-01", None),
        (HEADERS["traceparent"].upper(), None),
        ("", None),
    ],
)
def test_a_traceparent_header_is_parsed(header: str, expected: SpanContext | None) -> None:
    assert parse_traceparent(header) == expected


def test_an_undecided_trace_follows_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    exporter = InMemorySpanExporter()
    spans = Spans(exporter, at_once=True)
    for low in (1, 2**63):  # the ratio decides by the lower 64 bits of the trace's id
        context = SpanContext(2**100 + low, 7)
        spans.add("whole", start_s=1, end_s=2, attributes={}, context=context)
        spans.add("part", start_s=1, end_s=2, attributes={}, parent=context)
    assert [(s.name, s.context.trace_id) for s in exporter.get_finished_spans()] == [
        ("whole", 2**100 + 1), ("part", 2**100 + 1),
    ]  # fmt: skip


@pytest.fixture
def collector() -> Iterator[tuple[str, list[tuple[str, ExportTraceServiceRequest]]]]:
    """The URL of an OTLP receiver, and the path and the message of each request that it received."""
    got: list[tuple[str, ExportTraceServiceRequest]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", got
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("named_by", ["configuration", "environment"])
def test_spans_reach_a_collector(collector: Any, named_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url, got = collector
    config = TelemetryConfig(endpoint=url if named_by == "configuration" else None)
    if named_by == "environment":
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    with exporting(config, "proxy", run="r1") as spans:
        assert spans is not None
        spans.add("one", start_s=1.5, end_s=2.5, attributes={"a": 1, "b": None}, error="bad")
    ((path, request),) = got
    assert path == "/v1/traces"
    (of_process,) = request.resource_spans
    resource = {pair.key: pair.value.string_value for pair in of_process.resource.attributes}
    assert resource["service.name"] == ("mine" if named_by == "environment" else "areal-agents")
    assert (resource["areal_agents.process"], resource["areal_agents.run"]) == ("proxy", "r1")
    ((span,),) = [scope.spans for scope in of_process.scope_spans]
    assert (span.name, span.start_time_unix_nano, span.end_time_unix_nano) == ("one", 15 * 10**8, 25 * 10**8)
    assert [pair.key for pair in span.attributes] == ["a"] and span.status.message == "bad"


OFF = [
    ({}, ""),
    ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"}, ""),
    ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_TRACES_EXPORTER": "none"}, ""),
    (
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
        "OTEL_EXPORTER_OTLP_PROTOCOL is grpc, and only http/protobuf is supported",
    ),
]


@pytest.mark.parametrize(("environ", "warning"), OFF)
def test_there_are_no_spans_if_no_endpoint_is_set_or_it_cannot_be_used(
    environ: dict[str, str], warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), exporting(TelemetryConfig(), "proxy", environ=environ) as spans:
        assert spans is None
    assert warning in caplog.text and bool(warning) == bool(caplog.text)


def test_without_opentelemetry_only_a_configured_endpoint_is_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An endpoint in the environment is no error, because it may be meant for other programs."""
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [])
    expected = r"telemetry.endpoint needs .*pip install 'areal-agents\[otel\]'"
    named = TelemetryConfig(endpoint="http://x")
    with pytest.raises(ConfigError, match=expected), exporting(named, "proxy", environ={}):
        pass
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}
    with caplog.at_level(logging.WARNING), exporting(TelemetryConfig(), "proxy", environ=environ) as spans:
        assert spans is None
    assert "no spans are exported: OpenTelemetry is not installed: pip install" in caplog.text


def test_opentelemetry_is_not_imported_without_an_endpoint() -> None:
    code = (
        "import sys, areal_agents.proxy.traces, areal_agents.telemetry as t\n"
        "with t.exporting(t.TelemetryConfig(), 'proxy', environ={}) as spans: assert spans is None\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
