"""Invalid requests get clear errors in OpenAI's form, which are final if a retry cannot help."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from proxy_support import SEARCH, RunningProxy, running_proxy
from record_support import burst, until
from scripted_sampler import ScriptedSampler

from areal_agents.core.completion import Completion
from areal_agents.errors import (
    ConfigError,
    EngineError,
    EngineRejected,
    EngineUnavailable,
    RequestError,
    shown,
)
from areal_agents.proxy import ProxyConfig, serve
from areal_agents.rendering import ChatRenderer
from areal_agents.sockets import listen

USER = {"role": "user", "content": "Where is Lyon?"}


def refused(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """Check the form of an error response, and return the error."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == code
    assert "Traceback" not in response.text and 'File "' not in response.text
    assert response.headers.get("x-should-retry") == "false" or "retry-after" in response.headers
    return error


def message_of(response: httpx.Response) -> str:
    return str(response.json()["error"]["message"])


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": 7}]}, "messages[0].tool_calls"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"seed": "x"}, "seed"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": "x" * 1_001}, "stop"),
        ({"stop": ["x" * 1_000] * 64}, None),
        ({"stop": ""}, None),
        ({"n": 0}, "n"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"repetition_penalty": 1.0, "regex": None}, None),
        ({"structured_outputs": {"json": {"type": "object"}}}, "structured_outputs"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"stream": "yes"}, "stream"),
        ({"n": 129}, "n"),
        ({"n": "2"}, "n"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"chat_template_kwargs": 1}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"no_such_option": 1}}, "chat_template_kwargs"),
        ({"functions": [{}]}, "functions"),
        ({"modalities": 5}, "modalities"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"modalities": ["text"]}, None),
    ],
)
def test_the_error_of_a_malformed_chat_request_names_the_field(
    proxy: RunningProxy, change: dict[str, Any], param: str | None
) -> None:
    response = proxy.http.post("/v1/chat/completions", json={"messages": [USER], "tools": [SEARCH], **change})
    if param is None:
        assert response.status_code == 200, response.text
        return
    assert response.json()["error"]["param"] == param, response.text
    refused(response, 400, response.json()["error"]["code"])
    assert not proxy.engine.calls


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("top_p", 0),
        ("top_k", -2),
        ("top_k", 2**31),
        ("min_p", 2),
        ("frequency_penalty", 1e30),
        ("presence_penalty", -2.1),
        ("seed", -1),
        ("seed", 2**63),
    ],
)
def test_out_of_range_sampling_is_refused_unless_training_overrides_it(
    proxy: RunningProxy, name: str, value: float
) -> None:
    held_out = proxy.open_episode(split="eval")
    body = {"messages": [USER], name: value}
    refused(proxy.http.post(f"/e/{held_out['key']}/v1/chat/completions", json=body), 400, "invalid_value")
    training = proxy.open_episode()  # sampling is pinned: the agent's value is recorded and replaced
    assert proxy.http.post(f"/e/{training['key']}/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    "wish",
    [{"seed": 2**63 - 1, "top_k": 2**31 - 1}, {"frequency_penalty": -2, "presence_penalty": 2, "seed": 0}],
)
def test_values_at_the_limits_are_passed_on(proxy: RunningProxy, wish: dict[str, Any]) -> None:
    held_out = proxy.open_episode(split="eval")
    body = {"messages": [USER], **wish}
    assert proxy.http.post(f"/e/{held_out['key']}/v1/chat/completions", json=body).status_code == 200
    sampling = proxy.engine.calls[0].sampling
    assert {name: getattr(sampling, name) for name in wish} == wish


_LARGE = "x" * 1_000_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [USER], "temperature": _LARGE}),
        ("/v1/chat/completions", {"messages": [USER], "tools": [SEARCH], "tool_choice": [[_LARGE]]}),
        ("/v1/chat/completions", {"messages": [USER], "chat_template_kwargs": {_LARGE: 1}}),
        ("/v1/chat/completions", {"messages": [{"role": _LARGE}]}),
        ("/v1/completions", {"prompt": {"a": [0] * 100_000}}),
        ("/v1/responses", {"input": "x", "tool_choice": {"type": "function", "name": _LARGE}}),
        ("/v1/responses", {"input": "x", "previous_response_id": _LARGE}),
        ("/v1/messages", {"messages": [USER], "max_tokens": 5, "tool_choice": {"type": _LARGE}}),
        ("/v1/messages", {"messages": [USER], "max_tokens": 5, "output_config": [_LARGE]}),
        ("/v1beta/models/x:generateContent", {"contents": "x", "tools": [{_LARGE: {}}]}),
        ("/episodes", {"task": [_LARGE]}),
        ("/episodes", {"task": {"id": {"a": _LARGE}}}),
        ("/episodes", {"task": "t", "sampling": {_LARGE: 1}}),
        ("/episodes", {"task": "t", "split": _LARGE}),
    ],
)
def test_an_error_shows_only_the_beginning_of_a_long_value(
    proxy: RunningProxy, path: str, body: dict[str, Any]
) -> None:
    response = proxy.http.post(path, json=body)
    assert response.status_code == 400, response.text[:300]
    assert len(response.text) < 1_500
    assert not proxy.engine.calls


@pytest.mark.parametrize(
    "value", [None, True, 1.5, "it's", "é", [], {}, [1, "a", [None]], {"a": {"b": [1, {}]}, "c": "d"}]
)
def test_a_short_value_is_shown_unchanged(value: Any) -> None:
    assert shown(value) == repr(value)


def test_only_the_beginning_of_a_long_value_is_shown() -> None:
    assert shown("x" * 198) == repr("x" * 198)
    assert shown("x" * 199) == "'" + "x" * 198 + "…"
    assert shown({"a": [7] * 10_000}) == repr({"a": [7] * 10_000})[:199] + "…"
    assert len(RequestError("m" * 5_000).message) == 1_000


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", "invalid_json"),
        (b"[1]", "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "invalid_json"),
        (b'{"messages": [], "temperature": NaN}', "not_finite"),
        (b"[" * 100_000, "invalid_json"),
    ],
)
def test_a_body_that_is_not_a_valid_json_object_is_refused(
    proxy: RunningProxy, body: bytes, code: str
) -> None:
    refused(proxy.http.post("/v1/chat/completions", content=body), 400, code)


def test_deeply_nested_bodies_cause_no_server_error(proxy: RunningProxy) -> None:
    deep = "[" * 900 + "]" * 900
    call = f'{{"id": "c", "function": {{"name": "f", "arguments": {deep}}}}}'
    tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {deep}}}}}'
    for body in (
        f'{{"messages": [{{"role": "assistant", "tool_calls": [{call}]}}]}}',
        f'{{"messages": [{{"role": "user", "content": "x"}}], "tools": [{tool}]}}',
        f'{{"messages": [{{"role": "user", "content": {deep}}}]}}',
    ):
        response = proxy.http.post("/v1/chat/completions", content=body)
        assert response.status_code in (200, 400), response.text


def test_bodies_and_conversations_over_the_limits_are_refused(renderer: ChatRenderer, tmp_path: Path) -> None:
    with running_proxy(
        tmp_path / "s.db", ScriptedSampler(renderer), max_body_mb=0.01, max_messages=3
    ) as proxy:
        large = {"messages": [{"role": "user", "content": "x" * 20_000}]}
        refused(proxy.http.post("/v1/chat/completions", json=large), 413, "request_too_large")

        def chunks() -> Any:  # sent without a Content-Length
            for _ in range(30):
                yield b" " * 1000

        refused(proxy.http.post("/v1/chat/completions", content=chunks()), 413, "request_too_large")
        refused(proxy.http.post("/v1/chat/completions", json={"messages": [USER] * 4}), 400, "invalid_value")
        compressed = proxy.http.post(
            "/v1/chat/completions", content=b"x", headers={"content-encoding": "gzip"}
        )
        refused(compressed, 415, "unsupported_encoding")


def test_wrong_paths_and_methods_are_refused(proxy: RunningProxy) -> None:
    refused(proxy.http.get("/v1/nothing"), 404, "invalid_request")
    method = proxy.http.get("/v1/chat/completions")
    refused(method, 405, "invalid_request")
    assert message_of(method) == "/v1/chat/completions does not accept GET; use POST"
    method = proxy.http.post("/v1/models", json={})
    assert message_of(method) == "/v1/models does not accept POST; use GET"


@pytest.mark.parametrize("prefix", ["", "/e/ep-secret"])
@pytest.mark.parametrize("path", ["/chat/completions", "/v1/v1/messages"])
def test_the_error_for_a_wrong_base_url_explains_it_and_shows_no_key(
    proxy: RunningProxy, prefix: str, path: str
) -> None:
    for answer in (proxy.http.post(prefix + path, json={}), proxy.http.get(prefix + path)):
        assert answer.status_code == 404
        assert "the base_url of an OpenAI client must end in /v1" in message_of(answer)
        assert "ep-secret" not in answer.text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/episodes", {"task": {"id": "t"}, "groupsize": 2}, "groupsize"),
        ("/episodes/{id}/reward", {"reward": 1, "nam": "x"}, "nam"),
        ("/episodes/{id}/finish", {"truncate": True}, "truncate"),
        ("/episodes/{id}/finish", {"rewards": [{"reward": 1, "nme": "x"}]}, "nme"),
        ("/episodes/{id}/fail", {"reason": "x"}, "reason"),
        ("/groups/g/drop", {"error": "x"}, "error"),
        ("/episodes/{id}/reward", {"reward": 1, "scope": "turn"}, "scope"),
        ("/episodes/{id}/reward", {"reward": 1, "scope": "all"}, "scope"),
    ],
)
def test_a_misspelt_field_of_the_control_api_is_refused(
    proxy: RunningProxy, path: str, body: dict[str, Any], param: str
) -> None:
    episode = proxy.open_episode()
    answer = proxy.http.post(path.format(id=episode["id"]), json=body)
    refused(answer, 400, "invalid_request")
    assert answer.json()["error"]["param"] == param
    shown = proxy.http.get(f"/episodes/{episode['id']}").json()
    assert (shown["status"], shown["rewards"]) == ("open", [])


@pytest.mark.parametrize("query", ["split=trian", "status=done", "groups=g"])
def test_a_filter_that_cannot_match_is_refused(proxy: RunningProxy, query: str) -> None:
    error = refused(proxy.http.get(f"/episodes?{query}"), 400, "invalid_request")
    assert error["param"] == query.partition("=")[0]


def test_later_episodes_of_a_group_need_not_repeat_its_size(proxy: RunningProxy) -> None:
    first = proxy.http.post("/episodes", json={"task": {"id": "t"}, "group": "g", "group_size": 2})
    second = proxy.http.post("/episodes", json={"group": "g"})
    assert [answer.json()["index"] for answer in (first, second)] == [0, 1]
    refused(proxy.http.post("/episodes", json={"group": "g", "group_size": 3}), 409, "conflict")
    default = [proxy.http.post("/episodes", json={"group": "h"}) for _ in range(17)]
    assert [answer.status_code for answer in default] == [200] * 16 + [409]


def test_a_prompt_that_is_too_long_is_refused_and_truncates_the_episode(proxy: RunningProxy) -> None:
    proxy.engine.max_context = 4096
    episode = proxy.open_episode()
    client = proxy.openai(episode)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="p", messages=[{"role": "user", "content": "word " * 5000}])
    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length is 4096 tokens" in str(caught.value)
    assert not proxy.engine.calls
    # The episode continues; its final status shows that the policy reached a limit.
    client.chat.completions.create(model="p", messages=[USER])
    assert proxy.http.post(f"/episodes/{episode['id']}/finish").json()["status"] == "truncated"


def test_an_episode_may_have_a_shorter_context(proxy: RunningProxy) -> None:
    proxy.engine.script = lambda call: "word " * 50
    proxy.openai(proxy.open_episode()).chat.completions.create(model="p", messages=[USER])
    prompt = len(proxy.engine.calls[0].input_ids)
    cut_off = proxy.open_episode(limits={"context_tokens": prompt + 5})
    answer = proxy.openai(cut_off).chat.completions.create(model="p", messages=[USER])
    assert (
        answer.choices[0].finish_reason == "length"
        and proxy.tokens(cut_off)["turns"][0]["sampled_tokens"] == 5
    )
    too_short = proxy.open_episode(limits={"context_tokens": prompt})
    with pytest.raises(openai.BadRequestError, match=f"maximum context length is {prompt} tokens") as caught:
        proxy.openai(too_short).chat.completions.create(model="p", messages=[USER])
    assert caught.value.code == "context_length_exceeded" and len(proxy.engine.calls) == 2
    for episode in (cut_off, too_short):
        state = proxy.http.post(f"/episodes/{episode['id']}/finish").json()
        assert (state["status"], state["limit_reached"]) == ("truncated", "context_length")


def test_the_clients_own_token_limit_does_not_truncate_the_episode(proxy: RunningProxy) -> None:
    episode = proxy.open_episode(limits={"context_tokens": 4096})
    client = proxy.openai(episode)
    client.chat.completions.create(model="p", messages=[USER])
    proxy.engine.script = lambda call: "word " * 50
    client.chat.completions.create(model="p", messages=[USER], max_tokens=3)  # the client's own limit
    assert proxy.http.post(f"/episodes/{episode['id']}/finish").json()["status"] == "finished"


def test_max_tokens_is_lowered_to_the_limits_of_the_episode_and_the_context(proxy: RunningProxy) -> None:
    client = proxy.openai(proxy.open_episode(limits={"max_completion_tokens": 30}))
    client.chat.completions.create(model="p", messages=[USER], max_tokens=10**6)
    bare = proxy.openai(proxy.open_episode())
    bare.chat.completions.create(model="p", messages=[USER], max_tokens=10**6)
    limited, fitting = proxy.engine.calls
    assert limited.sampling.max_new_tokens == 30
    assert fitting.sampling.max_new_tokens + len(fitting.input_ids) == 4096


@pytest.mark.parametrize(
    ("limits", "calls"), [({"max_turns": 2}, 2), ({"max_tokens": 10}, 2), ({"time_s": 0.2}, None)]
)
def test_model_calls_are_refused_once_a_limit_of_the_episode_is_reached(
    proxy: RunningProxy, limits: dict[str, Any], calls: int | None
) -> None:
    proxy.engine.script = lambda call: (
        "word " * 50 if calls is None or len(proxy.engine.calls) > 1 else [1, 2, 3, 4]
    )
    episode = proxy.open_episode(limits=limits, group=f"g-{limits}", group_size=1)
    client = proxy.openai(episode)
    for _ in range(calls or 0):
        client.chat.completions.create(model="p", messages=[USER])
    if calls is None:
        time.sleep(0.25)
    with pytest.raises(openai.PermissionDeniedError) as caught:
        client.chat.completions.create(model="p", messages=[USER])
    assert caught.value.code == "episode_limit"
    shown = proxy.tokens(episode)
    assert len(shown["turns"]) == (calls or 0) and shown["limit_reached"] == next(iter(limits))
    if "max_tokens" in limits:
        assert sum(turn["sampled_tokens"] for turn in shown["turns"]) == 10
    assert proxy.http.post(f"/episodes/{episode['id']}/finish").json()["status"] == "truncated"
    assert proxy.tokens(episode)["rewards"] == [
        {"scope": "episode", "target": "", "name": "truncated_reward", "value": 0.0}
    ]


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_change_of_the_system_clock_does_not_affect_the_time_limit(
    proxy: RunningProxy, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    episode = proxy.open_episode(limits={"time_s": 100})
    client = proxy.openai(episode)
    now, monotonic = time.time, time.monotonic
    monkeypatch.setattr(time, "time", lambda: now() + 3600 * hours)
    client.chat.completions.create(model="p", messages=[USER])
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + 150)
    with pytest.raises(openai.PermissionDeniedError):
        client.chat.completions.create(model="p", messages=[USER])
    assert proxy.tokens(episode)["limit_reached"] == "time_s"


def test_token_ids_outside_the_vocabulary_never_reach_the_engine(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    class SmallModel(ScriptedSampler):
        async def model_info(self) -> Any:
            info = await super().model_info()
            return type(info)(info.model_path, info.version, 300, info.max_context)

    engine = SmallModel(renderer)
    with running_proxy(tmp_path / "s.db", engine) as proxy:
        response = proxy.http.post("/v1/chat/completions", json={"messages": [USER]})
        assert "vocabulary of 300" in refused(response, 400, "token_out_of_vocabulary")["message"]
    assert not engine.calls


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (EngineUnavailable("no answer"), 503, "engine_unavailable"),
        (EngineRejected("bad ids"), 502, "engine_rejected"),
        (Completion([1], [-1.0], [0], "abort"), 503, "engine_unavailable"),
        (RuntimeError("a bug with a secret"), 500, "internal_error"),
    ],
)
def test_a_failed_call_leaves_no_turn_and_the_next_call_succeeds(
    proxy: RunningProxy, failure: Any, status: int, code: str
) -> None:
    episode = proxy.open_episode()
    path = f"/e/{episode['key']}/v1/chat/completions"
    proxy.engine.script = lambda call: failure
    error = refused(proxy.http.post(path, json={"messages": [USER]}), status, code)
    assert "secret" not in error["message"]
    proxy.engine.script = lambda call: "ok"
    assert proxy.http.post(path, json={"messages": [USER]}).status_code == 200
    assert len(proxy.tokens(episode)["turns"]) == 1


def test_a_client_retries_calls_that_fail_in_the_engine(proxy: RunningProxy) -> None:
    """The real client retries after a 502 or a 503 by itself, and gets the next sample."""
    answers: list[Any] = [EngineError("half an answer"), EngineUnavailable("away"), "ok"]
    proxy.engine.script = lambda call: answers.pop(0)
    client = proxy.openai(proxy.open_episode(), max_retries=2)
    assert client.chat.completions.create(model="p", messages=[USER]).choices[0].message.content == "ok"


def test_a_generation_that_takes_too_long_is_cancelled(renderer: ChatRenderer, tmp_path: Path) -> None:
    engine = ScriptedSampler(renderer, delay_s=30)
    with running_proxy(tmp_path / "s.db", engine, generate_timeout_s=0.2) as proxy:
        response = proxy.http.post("/v1/chat/completions", json={"messages": [USER]})
        refused(response, 503, "engine_unavailable")
    assert len(engine.cancelled) == 1


async def test_a_client_that_hangs_up_aborts_its_generation(proxy: RunningProxy) -> None:
    proxy.engine.delay_s = 30
    episode = proxy.open_episode()
    async with AsyncOpenAI(base_url=episode["base_url"], api_key=episode["key"], max_retries=0) as client:
        call = asyncio.create_task(client.chat.completions.create(model="p", messages=[USER]))
        await asyncio.to_thread(until, lambda: proxy.engine.calls)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    await asyncio.to_thread(until, lambda: proxy.engine.cancelled)
    assert proxy.engine.cancelled == [proxy.engine.calls[0].rid]
    assert proxy.tokens(episode)["turns"] == []


def test_a_full_queue_is_answered_with_429_and_retry_after(renderer: ChatRenderer, tmp_path: Path) -> None:
    engine = ScriptedSampler(renderer, delay_s=30)
    with running_proxy(tmp_path / "s.db", engine, max_concurrent=2, max_queued=3) as proxy:
        requests = [("/v1/chat/completions", {"messages": [USER]})] * 8
        responses = asyncio.run(burst(proxy, requests, refused=3))
    assert sorted(r.status_code for r in responses) == [200] * 5 + [429] * 3
    assert all(int(r.headers["retry-after"]) >= 1 for r in responses if r.status_code == 429)
    assert engine.most_running == 2


def test_a_taken_port_is_a_clear_error(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            serve("no/model", ProxyConfig(port=port), store=tmp_path / "s.db")


def test_a_missing_model_and_open_access_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no/model"):
        serve("no/model", ProxyConfig(), store=tmp_path / "s.db")
    with pytest.raises(ConfigError, match="admin key"):
        serve("no/model", ProxyConfig(host="0.0.0.0"), store=tmp_path / "s.db")


CALLS = [{"id": "call_1", "type": "function", "function": {"name": "search", "arguments": "{}"}}]
TOOL_USE = {"type": "tool_use", "id": "call_1", "name": "search", "input": {}}
FUNCTION_CALL = {"type": "function_call", "call_id": "call_1", "name": "search", "arguments": "{}"}


@pytest.mark.parametrize(
    ("path", "body", "call"),
    [
        (
            "/v1/chat/completions",
            {"messages": [USER, {"role": "tool", "tool_call_id": "call_1", "content": "In France."}]},
            {"role": "assistant", "tool_calls": CALLS},
        ),
        (
            "/v1/responses",
            {"input": [USER, {"type": "function_call_output", "call_id": "call_1", "output": "In France."}]},
            FUNCTION_CALL,
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 9,
                "messages": [
                    USER,
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1"}]},
                ],
            },
            {"role": "assistant", "content": [TOOL_USE]},
        ),
    ],
    ids=["chat", "responses", "messages"],
)
def test_a_tool_result_needs_its_call_in_the_conversation(
    proxy: RunningProxy, path: str, body: dict[str, Any], call: dict[str, Any]
) -> None:
    url = f"{proxy.url}/e/{proxy.open_episode()['key']}{path}"
    answer = proxy.http.post(url, json={"model": "policy", **body})
    assert answer.status_code == 400 and "no message before it has this call" in message_of(answer)
    assert not proxy.engine.calls
    conversation = next(value for value in body.values() if isinstance(value, list))
    conversation.insert(1, call)
    assert proxy.http.post(url, json={"model": "policy", **body}).status_code == 200


def test_a_tool_result_without_a_call_id_is_accepted(proxy: RunningProxy) -> None:
    """Agents that write their tool calls as plain content send such results."""
    url = f"{proxy.url}/e/{proxy.open_episode()['key']}/v1/chat/completions"
    messages = [
        USER,
        {"role": "assistant", "content": "search(Lyon)"},
        {"role": "tool", "content": "France."},
    ]
    assert proxy.http.post(url, json={"model": "policy", "messages": messages}).status_code == 200
