"""The metrics and the log of a running proxy, and what neither of them ever contains."""

from __future__ import annotations

import io
import json
import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from proxy_support import SEARCH, RunningProxy, running_proxy, tool_call
from record_support import joined_replies, until
from scripted_sampler import ScriptedSampler

from areal_agents.errors import EngineUnavailable
from areal_agents.proxy.calls.record import CallRecord
from areal_agents.proxy.config import ProxyConfig
from areal_agents.proxy.logs import logging_as
from areal_agents.proxy.metrics import CONTENT_TYPE, Metrics, merged
from areal_agents.rendering import ChatRenderer

HELLO: Any = [{"role": "user", "content": "Hello, what is a secret word?"}]
ADMIN = {"Authorization": "Bearer admin-key-of-the-test"}


@pytest.fixture
def counted(renderer: ChatRenderer, tmp_path: Path) -> Iterator[RunningProxy]:
    with running_proxy(tmp_path / "store.db", ScriptedSampler(renderer, version=3)) as running:
        yield running


def read(proxy: RunningProxy) -> dict[str, float]:
    """Return every sample except the buckets, by name and labels."""
    response = proxy.http.get("/metrics")
    assert response.status_code == 200 and response.headers["content-type"] == CONTENT_TYPE
    return {
        " ".join((sample.name.removeprefix("areal_agents_"), *sample.labels.values())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_created"))
    }


def test_calls_and_tokens_are_counted(counted: RunningProxy) -> None:
    episode = counted.open_episode()
    client = counted.openai(episode)
    counted.engine.script = lambda call: tool_call(query="x") if len(counted.engine.calls) == 1 else "ok"
    first = client.chat.completions.create(model="m", messages=HELLO, tools=[SEARCH])
    message = first.choices[0].message
    assert message.tool_calls
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "found"}
    client.chat.completions.create(model="m", messages=[*HELLO, message, result], tools=[SEARCH])
    list(client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}], stream=True))

    metrics = read(counted)
    assert metrics["calls_total chat train 2xx no"] == 2
    assert metrics["calls_total chat train 2xx yes"] == 1
    assert metrics["call_duration_seconds_count chat"] == 3
    assert metrics["first_piece_seconds_count chat"] == 1
    assert metrics["turns_total"] == 3
    assert metrics["forks_total new conversation"] == 1
    assert first.usage is not None
    recorded = counted.tokens(episode)["turns"]
    assert metrics["prompt_tokens_total"] == sum(len(turn["prompt_ids"]) for turn in recorded)
    assert metrics["reused_prompt_tokens_total"] == first.usage.total_tokens
    assert metrics["sampled_tokens_total training"] == sum(turn["sampled_tokens"] for turn in recorded)
    assert metrics["policy_version"] == 3 and metrics["open_episodes"] == 1
    assert metrics["calls_waiting"] == metrics["calls_running"] == 0


def test_tokens_that_are_not_trained_are_counted_separately(counted: RunningProxy) -> None:
    counted.engine.script = lambda call: "{}"
    client = counted.openai(counted.open_episode())
    client.chat.completions.create(model="m", messages=HELLO, response_format={"type": "json_object"})
    counted.openai(counted.open_episode(split="eval")).chat.completions.create(model="m", messages=HELLO)
    metrics = read(counted)
    assert metrics["sampled_tokens_total constrained"] == metrics["sampled_tokens_total evaluation"] > 0
    assert "sampled_tokens_total training" not in metrics


def test_refusals_and_repeated_calls_are_counted(counted: RunningProxy) -> None:
    client = counted.openai(counted.open_episode())
    again = {"x-stainless-retry-count": "1"}
    for headers in ({}, again):
        client.chat.completions.create(model="m", messages=HELLO, extra_headers=headers)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="m", messages=[])
    with pytest.raises(openai.AuthenticationError):
        counted.openai(None, api_key="ep-nobody").chat.completions.create(model="m", messages=HELLO)
    metrics = read(counted)
    assert metrics["repeated_calls_total chat"] == 1 and metrics["turns_total"] == 1
    assert metrics["calls_total chat train 2xx no"] == 2
    assert sum(value for name, value in metrics.items() if name.startswith("refusals_total")) == 2
    assert metrics["refusals_total invalid_api_key"] == 1


def test_a_retry_of_a_running_call_is_not_counted_twice(
    counted: RunningProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = joined_replies(monkeypatch)
    counted.engine.delay_s = 60.0
    client = counted.openai(counted.open_episode())
    with ThreadPoolExecutor() as pool:
        calls = [
            pool.submit(
                client.chat.completions.create,
                model="m",
                messages=HELLO,
                extra_headers={"idempotency-key": "one", "x-stainless-retry-count": count},
            )
            for count in ("0", "1")
        ]
        until(lambda: len(joined) == 2)
        counted.engine.hurry.set()
        first, second = (call.result(timeout=60) for call in calls)
    assert joined[0] is joined[1]
    assert first.id == second.id and first.usage is not None
    metrics = read(counted)
    assert metrics["calls_total chat train 2xx no"] == 2 and metrics["turns_total"] == 1
    assert metrics["prompt_tokens_total"] == first.usage.prompt_tokens
    assert metrics["sampled_tokens_total training"] == first.usage.completion_tokens


def test_calls_of_another_model_are_counted_separately(
    counted: RunningProxy, renderer: ChatRenderer, tmp_path: Path
) -> None:
    models = {"judge": {"base_url": f"{counted.url}/v1"}}
    with running_proxy(tmp_path / "other.db", ScriptedSampler(renderer), models=models) as proxy:
        client = proxy.openai(proxy.open_episode())
        client.chat.completions.create(model="judge", messages=HELLO)
        metrics = read(proxy)
    assert metrics["passed_through_calls_total judge 2xx"] == 1 and metrics["turns_total"] == 0
    assert not any(name.startswith("calls_total") for name in metrics)


def test_waiting_and_running_calls_are_counted(renderer: ChatRenderer, tmp_path: Path) -> None:
    engine = ScriptedSampler(renderer, delay_s=60)
    with (
        running_proxy(tmp_path / "store.db", engine, max_concurrent=1) as proxy,
        ThreadPoolExecutor() as pool,
    ):
        episode = proxy.open_episode()
        client = proxy.openai(episode)
        calls = [
            pool.submit(client.chat.completions.create, model=name, messages=HELLO, user=name)
            for name in ("a", "b")
        ]
        deadline = time.monotonic() + 60
        while (metrics := read(proxy))["calls_waiting"] + metrics["calls_running"] < 2:
            assert time.monotonic() < deadline, metrics
            time.sleep(0.02)
        assert metrics["calls_waiting"] == metrics["calls_running"] == 1
        proxy.http.post(f"/episodes/{episode['id']}/fail", json={"error": "enough"})
        for call in calls:
            with pytest.raises(openai.ConflictError):
                call.result(timeout=60)
        metrics = read(proxy)
        assert metrics["calls_waiting"] == metrics["calls_running"] == 0
        assert metrics["open_episodes"] == 0 and metrics["refusals_total episode_sealed"] == 2


def test_metrics_need_the_admin_key(renderer: ChatRenderer, tmp_path: Path) -> None:
    settings = {"admin_key": "admin-key-of-the-test", "project_keys": ("project-key",)}
    with running_proxy(tmp_path / "store.db", ScriptedSampler(renderer), headers=ADMIN, **settings) as proxy:
        assert read(proxy)["open_episodes"] == 0
        for key, status in (("project-key", 403), ("wrong", 401), (proxy.open_episode()["key"], 403)):
            headers = {"Authorization": f"Bearer {key}"}
            response = httpx.get(f"{proxy.url}/metrics", headers=headers, timeout=60)
            assert response.status_code == status
        assert httpx.get(f"{proxy.url}/metrics", timeout=60).status_code == 401


def test_a_call_is_logged_as_one_json_line(renderer: ChatRenderer, tmp_path: Path) -> None:
    stream = io.StringIO()
    with (
        logging_as("json", stream),
        running_proxy(tmp_path / "store.db", ScriptedSampler(renderer), log_calls=True) as proxy,
    ):
        episode = proxy.open_episode()
        answer = proxy.openai(episode).chat.completions.create(
            model="m", messages=HELLO, user="u", extra_headers={"x-episode-label": "title"}
        )
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    (line,) = (line for line in lines if "call" in line)
    assert (line["level"], line["logger"]) == ("info", "areal_agents.proxy.logs")
    assert line["time"].endswith("+00:00") and line["message"].startswith("/v1/chat/completions 200 in ")
    assert line["episode_id"] == episode["id"] and line["turn_ids"] == [answer.id]
    call = line["call"]
    assert answer.usage is not None
    assert call["prompt_tokens"] == answer.usage.prompt_tokens and call["reused_tokens"] == 0
    assert (call["status"], call["code"], call["split"], call["label"]) == (200, "", "train", "title")
    assert call["ignored"] == ["user"] and call["client"].startswith("OpenAI/Python")
    (turn,) = call["turns"]
    assert turn["id"] == answer.id and turn["sampled_tokens"] == answer.usage.completion_tokens
    assert "secret word" not in stream.getvalue()


def test_a_call_that_is_refused_while_it_is_read_names_its_episode(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    stream = io.StringIO()
    with (
        logging_as("json", stream),
        running_proxy(tmp_path / "store.db", ScriptedSampler(renderer), log_calls=True) as proxy,
    ):
        episode = proxy.open_episode()
        with pytest.raises(openai.BadRequestError):
            proxy.openai(episode).chat.completions.create(model="m", messages=HELLO, n=0)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    (line,) = (line for line in lines if "call" in line)
    assert line["episode_id"] == episode["id"] and line["call"]["split"] == "train"
    assert (line["call"]["status"], line["call"]["code"]) == (400, "invalid_value")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_no_key_is_ever_logged(renderer: ChatRenderer, tmp_path: Path, log_format: Any) -> None:
    stream = io.StringIO()
    engine = ScriptedSampler(renderer)
    settings = {"admin_key": "admin-key-of-the-test", "project_keys": ("project-key",), "log_calls": True}
    with (
        logging_as(log_format, stream),
        running_proxy(tmp_path / "store.db", engine, headers=ADMIN, **settings) as proxy,
    ):
        episode = proxy.open_episode()
        key = episode["key"]
        client = proxy.openai(episode)
        client.chat.completions.create(model="m", messages=HELLO)

        engine.script = lambda call: EngineUnavailable(f"a failure that names {key}")
        with pytest.raises(openai.InternalServerError):
            client.chat.completions.create(model="m", messages=HELLO)
        engine.script = lambda call: ZeroDivisionError(f"a bug that names {key}")
        with pytest.raises(openai.InternalServerError):
            client.chat.completions.create(model="m", messages=HELLO)
        for wrong in (key[:-1] + "x", "project-key", "wrong-key"):
            with pytest.raises(openai.APIStatusError):
                proxy.openai(episode, api_key=wrong).chat.completions.create(model="m", messages=HELLO)
    logged = stream.getvalue()
    assert "a failure that names ep-***" in logged and "a bug in POST /e/***/v1/chat/completions" in logged
    assert "ZeroDivisionError" in logged
    for secret in (key, key[:20], "admin-key-of-the-test", "project-key", "wrong-key", "secret word"):
        assert secret not in logged


def test_logging_as_restores_the_logger() -> None:
    logger = logging.getLogger("areal_agents")
    before = (logger.level, logger.propagate, list(logger.handlers))
    stream = io.StringIO()
    with logging_as("text", stream):
        logging.getLogger("areal_agents.proxy.test").warning("several\nlines", extra={"episode_id": "e"})
    assert (logger.level, logger.propagate, list(logger.handlers)) == before
    assert (
        "WARNING areal_agents.proxy.test: several" in stream.getvalue() and "episode=e" in stream.getvalue()
    )


def test_calls_are_not_logged_by_default() -> None:
    assert ProxyConfig().log_calls is False and ProxyConfig().log_format == "text"


def test_metrics_of_several_processes_are_added_up() -> None:
    """The version is the newest one instead, and an engine serves only if it serves all processes."""

    def exposition(version: int, serving: int, waiting: int, durations_s: list[float], created: int) -> bytes:
        metrics = Metrics(waiting=lambda: waiting, running=lambda: 0, open_episodes=lambda: 0)
        metrics.served_version(version)
        for duration_s in durations_s:
            metrics.observe(CallRecord(endpoint="", dialect="chat", status=200, duration_s=duration_s))
        engines = (
            f'# TYPE areal_agents_engine_serving gauge\nareal_agents_engine_serving{{engine="a"}} {serving}\n'
            f"# TYPE areal_agents_turns_created gauge\nareal_agents_turns_created {created}\n"
        )
        text = metrics.exposition().decode()
        kept = [line for line in text.splitlines() if "_created" not in line]
        return ("\n".join(kept) + "\n" + engines).encode()

    both = merged([exposition(3, 1, 2, [0.07, 700.0], 100), exposition(4, 0, 5, [0.07], 90)])
    found = {
        " ".join((sample.name.removeprefix("areal_agents_"), *sample.labels.values())): sample.value
        for family in text_string_to_metric_families(both.decode())
        for sample in family.samples
    }
    assert (found["policy_version"], found["engine_serving a"], found["calls_waiting"]) == (4, 0, 7)
    assert found["calls_total chat none 2xx no"] == found["call_duration_seconds_count chat"] == 3
    assert found["call_duration_seconds_sum chat"] == pytest.approx(700.14)
    assert [found[f"call_duration_seconds_bucket chat {le}"] for le in ("0.05", "0.1", "+Inf")] == [0, 2, 3]
    assert found["turns_created"] == 90
    assert merged([both]) == both
